package nomadadapter

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Every key of health is a key of the block, optional, of the type that one would write.
func TestHealthSchema(t *testing.T) {
	types := map[string]string{"recovery_checks": "number", "recovery_limit": "number", "simulation": "bool"}
	keys := schema.GetObject().GetAttributes()
	for _, k := range config.HealthSpecs() {
		if k.HCL == config.XIDs {
			want := &hclspec.BlockAttrs{Name: "xids", Type: "string"}
			if got := keys[k.HCL].GetBlockAttrs(); got.GetName() != want.Name || got.GetType() != want.Type || got.GetRequired() {
				t.Errorf("xids: %v", keys[k.HCL])
			}
			continue
		}
		want := types[k.HCL]
		if want == "" {
			want = "string"
		}
		attr := keys[k.HCL].GetDefault().GetPrimary().GetAttr()
		if attr.GetName() != k.HCL || attr.GetType() != want || attr.GetRequired() {
			t.Errorf("%s: %v, want an optional %s", k.HCL, keys[k.HCL], want)
		}
		value := keys[k.HCL].GetDefault().GetDefault().GetLiteral().GetValue()
		if quoted := `"` + k.Default + `"`; value != k.Default && value != quoted || (value == quoted) != (want == "string") {
			t.Errorf("%s: the default is %s, want %s", k.HCL, value, k.Default)
		}
	}
}

func TestHealthKeys(t *testing.T) {
	s := newFixture(t)
	err := s.configure(map[string]any{
		"health_mode": "observe", "xids": map[string]string{"63": "ignore", "999": "unhealthy"},
		"health_period": "5s", "health_settle": "20s", "call_deadline": "2m",
		"recovery": "manual", "recovery_dwell": "3m", "recovery_checks": 4, "recovery_limit": 5,
		"degraded": "unhealthy", "application_faults": "ignore",
		"kernel_log": "/host/kmsg", "state_dir": "", "simulation": true, "overlap": "refuse",
	})
	if err != nil {
		t.Fatal(err)
	}
	s.currentRun()
	want := config.Health{
		Policy: core.DefaultHealthPolicy(), Probe: 5 * time.Second, KernelLog: "/host/kmsg", Simulation: true,
		Overlap: core.OverlapRefuse,
	}
	want.Policy.Mode, want.Policy.Settle, want.Policy.Deadline = core.ModeObserve, 20*time.Second, 2*time.Minute
	want.Policy.XIDs = map[uint64]xid.Effect{63: xid.None, 999: xid.Withdraws}
	want.Policy.Manual, want.Policy.Dwell, want.Policy.CleanChecks, want.Policy.MaxRecoveries = true, 3*time.Minute, 4, 5
	want.Policy.DegradedTakesNoWork, want.Policy.Workloads = true, xid.None
	got := s.Started()[0]
	if diff := cmp.Diff(want, got.Health); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.Core.Probe != want.Probe || got.Core.Overlap != want.Overlap || !cmp.Equal(got.Core.Health, want.Policy) {
		t.Errorf("the core is not told: %+v", got.Core)
	}
}

// Errors in the health keys are reported together with the other errors.
func TestHealthErrors(t *testing.T) {
	err := newFixture(t).configure(map[string]any{
		"fingerprint_period": "often", "health_mode": "strict", "xids": map[string]string{"999": "fatal", "63": "ignore"},
		"recovery_checks": 0, "recovery_limit": 2.5, "recovery": []string{"auto"}, "kernel_log": "kmsg",
	})
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		t.Fatalf("got %v", err)
	}
	var got [][2]string
	for _, e := range joined.Unwrap() {
		var c *core.ConfigError
		if !errors.As(e, &c) || c.Remedy == "" {
			t.Fatalf("%v is no *core.ConfigError with a remedy", e)
		}
		got = append(got, [2]string{c.Key, c.Value})
	}
	want := [][2]string{
		{"fingerprint_period", "often"}, {"health_mode", "strict"}, {"xids", "63=ignore,999=fatal"},
		{"recovery", "[auto]"}, {"recovery_checks", "0"}, {"recovery_limit", "2.5"}, {"kernel_log", "kmsg"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Other words for the same are the same configuration.
func TestSameHealthIsNoChange(t *testing.T) {
	s := newFixture(t)
	for i, step := range []struct {
		keys   map[string]any
		starts int // so far
	}{
		{map[string]any{}, 1},
		{map[string]any{"health_period": "10000ms", "xids": map[string]string{}, "recovery_checks": 3}, 1},
		{map[string]any{"xids": map[string]string{"63": "ignore", "94": "degraded"}}, 2},
		{map[string]any{"xids": map[string]string{"94": "degraded", "63": "ignore"}}, 2},
		{map[string]any{"state_dir": "/srv/gpu", "xids": map[string]string{"94": "degraded", "63": "ignore"}}, 3},
	} {
		s.mustConfigure(t, step.keys)
		s.currentRun()
		if n := len(s.Started()); n != step.starts {
			t.Fatalf("step %d: %d starts, want %d", i, n, step.starts)
		}
	}
}

// Nomad gives what its own decoder made of a block: numbers may come as text.
func TestHealthFromText(t *testing.T) {
	var raw []byte
	if err := base.MsgPackEncode(&raw, map[string]any{"recovery_checks": "7", "simulation": "true"}); err != nil {
		t.Fatal(err)
	}
	b, err := decode(raw)
	if err != nil {
		t.Fatal(err)
	}
	s, _, err := b.Read()
	if err != nil || s.Health.Policy.CleanChecks != 7 || !s.Health.Simulation {
		t.Errorf("%+v, %v", s.Health, err)
	}
}
