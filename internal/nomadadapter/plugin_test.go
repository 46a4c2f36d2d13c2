package nomadadapter

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// Another configuration ends the source and starts another one; an equal one, also if it is written in another way, does
// not.
func TestSetConfigAgain(t *testing.T) {
	s := newFixture(t)
	ignoring := map[string]any{"ignored_gpu_ids": []string{"GPU-1"}}
	for i, step := range []struct {
		keys   map[string]any
		starts int // so far
	}{
		{ignoring, 1},
		{ignoring, 1},
		{map[string]any{}, 2},
		{map[string]any{"fingerprint_period": "60s"}, 2},
		{map[string]any{"health_period": "10000ms", "xids": map[string]string{}, "recovery_checks": 3}, 2},
		{map[string]any{"enabled": false}, 2},
		{map[string]any{}, 3},
		{map[string]any{"xids": map[string]string{"63": "ignore", "94": "degraded"}}, 4},
		{map[string]any{"xids": map[string]string{"94": "degraded", "63": "ignore"}}, 4},
		{map[string]any{"state_dir": "/srv/gpu", "xids": map[string]string{"94": "degraded", "63": "ignore"}}, 5},
	} {
		s.mustConfigure(t, step.keys)
		s.currentRun()
		if n := len(s.Started()); n != step.starts {
			t.Fatalf("step %d: %d starts, want %d", i, n, step.starts)
		}
	}
	if e := s.Started()[1].Core.Exclude; len(e) != 0 {
		t.Errorf("the second source ignores %v", e)
	}
	for i, ended := range s.ended {
		select {
		case <-ended:
			if i == len(s.ended)-1 {
				t.Error("the last source was ended")
			}
		default:
			if i < len(s.ended)-1 {
				t.Errorf("source %d was not ended", i)
			}
		}
	}
}

func TestValidationStartsNoSource(t *testing.T) {
	s := newFixture(t)
	if _, err := s.PluginInfo(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ConfigSchema(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // as in the process that validates the configuration
		s.mustConfigure(t, map[string]any{})
	}
	if n := len(s.Started()); n != 0 {
		t.Errorf("%d sources were started", n)
	}
}

func TestIdentity(t *testing.T) {
	info, err := nomadtest.Serve(t, newFixture(t).Plugin).PluginInfo()
	if err != nil {
		t.Fatal(err)
	}
	want := &base.PluginInfoResponse{
		Type: "device", Name: "nvidia-gpu", PluginVersion: "2.0.0", PluginApiVersions: []string{"v0.1.0"},
	}
	if diff := cmp.Diff(want, info); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
