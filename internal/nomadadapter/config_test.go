package nomadadapter

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func TestConfigDefaults(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes, cfg.Rescan = core.MIGMixed, true, time.Minute
	want := Settings{Core: cfg, Health: config.DefaultHealth(), GroupBy: config.GroupByNone, MPSRoot: hostwatch.DefaultMPSRoot}
	for name, keys := range map[string]map[string]any{
		"empty block": {},
		"as the schema fills it in": {
			"enabled": true, "ignored_gpu_ids": []string{}, "fingerprint_period": "1m",
			"driver_root": "/", "dev_root": "", "sysfs_root": "/sys", "procfs_root": "/proc",
			"health_mode": "enforce", "xids": nil, "health_period": "10s", "health_settle": "30s", "call_deadline": "1m",
			"recovery": "auto", "recovery_dwell": "1m", "recovery_checks": 3, "recovery_limit": 3,
			"degraded": "schedulable", "application_faults": "degraded",
			"kernel_log": "auto", "state_dir": "/var/lib/tandem", "simulation": false,
			"policy_file": "", "mig_strategy": "", "group_by": "none", "mps_root": "",
		},
		"an empty map": {"xids": map[string]string{}},
	} {
		var raw []byte
		if err := base.MsgPackEncode(&raw, keys); err != nil {
			t.Fatal(err)
		}
		check(t, name, raw, want)
	}
	check(t, "no block", nil, want)
	if err := cfg.Validate(); err != nil {
		t.Errorf("the defaults are not valid: %v", err)
	}
}

func check(t *testing.T, name string, raw []byte, want Settings) {
	t.Helper()
	b, err := decode(raw)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	got, _, err := b.Read()
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

func TestConfigKeys(t *testing.T) {
	s := newFixture(t)
	err := s.configure(map[string]any{
		"ignored_gpu_ids":    []string{"GPU-1", "MIG-2"},
		"fingerprint_period": "90s",
		"driver_root":        "/run/nvidia/driver/",
		"sysfs_root":         "/host/sys",
		"procfs_root":        "/host/proc",
	})
	if err != nil {
		t.Fatal(err)
	}
	s.currentRun()
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes, cfg.Rescan = core.MIGMixed, true, 90*time.Second
	cfg.Exclude = []core.DeviceID{"GPU-1", "MIG-2"}
	cfg.Roots = core.Roots{
		Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver", // as the driver's
		Sys: "/host/sys", Proc: "/host/proc",
	}
	if diff := cmp.Diff([]Settings{{Core: cfg, Health: config.DefaultHealth(), GroupBy: config.GroupByNone, MPSRoot: hostwatch.DefaultMPSRoot}}, s.Started()); diff != "" {
		t.Errorf("started with (-want +got):\n%s", diff)
	}
}

func TestConfigErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]any
		want []core.ConfigError // in the order reported; Remedy is a part of it
	}{
		"no duration": {
			map[string]any{"fingerprint_period": "often"},
			[]core.ConfigError{{Key: "fingerprint_period", Value: "often", Remedy: "30s"}},
		},
		"a number is no duration": {
			map[string]any{"fingerprint_period": "60"},
			[]core.ConfigError{{Key: "fingerprint_period", Value: "60", Remedy: "30s"}},
		},
		"zero period":     {map[string]any{"fingerprint_period": "0s"}, []core.ConfigError{{Key: "fingerprint_period", Value: "0s", Remedy: "1s or more"}}},
		"negative period": {map[string]any{"fingerprint_period": "-1m"}, []core.ConfigError{{Key: "fingerprint_period", Value: "-1m", Remedy: "1s or more"}}},
		"hectic period":   {map[string]any{"fingerprint_period": "999ms"}, []core.ConfigError{{Key: "fingerprint_period", Value: "999ms", Remedy: "1s or more"}}},
		"an index is no id": {
			map[string]any{"ignored_gpu_ids": []string{"GPU-1", "0"}},
			[]core.ConfigError{{Key: "ignored_gpu_ids", Value: "0", Remedy: "nvidia-smi -L"}},
		},
		"all errors": {
			map[string]any{
				"ignored_gpu_ids": []string{"gpu-1", ""}, "fingerprint_period": "x",
				"driver_root": "run/nvidia", "sysfs_root": "sys", "procfs_root": "",
			},
			[]core.ConfigError{
				{Key: "ignored_gpu_ids", Value: "gpu-1", Remedy: "GPU-"},
				{Key: "ignored_gpu_ids", Value: "", Remedy: "GPU-"},
				{Key: "fingerprint_period", Value: "x", Remedy: "duration"},
				{Key: "driver_root", Value: "run/nvidia", Remedy: "absolute"},
				{Key: "sysfs_root", Value: "sys", Remedy: "absolute"},
				{Key: "procfs_root", Value: "", Remedy: "absolute"},
			},
		},
		"also when disabled": {
			map[string]any{"enabled": false, "fingerprint_period": "x"},
			[]core.ConfigError{{Key: "fingerprint_period", Value: "x", Remedy: "duration"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			err := s.configure(tc.keys)
			joined, ok := err.(interface{ Unwrap() []error })
			if !ok {
				t.Fatalf("got %v, want joined errors", err)
			}
			if len(joined.Unwrap()) != len(tc.want) {
				t.Fatalf("got %q, want %d problems", err, len(tc.want))
			}
			for i, e := range joined.Unwrap() {
				var got *core.ConfigError
				if !errors.As(e, &got) {
					t.Fatalf("%v is no *core.ConfigError", e)
				}
				want := tc.want[i]
				if got.Key != want.Key || got.Value != want.Value || !strings.Contains(got.Remedy, want.Remedy) {
					t.Errorf("got %v, want %v", got, &want)
				}
			}
			s.currentRun()
			if got := s.Started(); len(got) != 1 || got[0].Core.Rescan != time.Minute || len(got[0].Core.Exclude) != 0 {
				t.Errorf("a refused configuration took effect: %+v", got)
			}
		})
	}
}

func TestConfigOfTheWrongType(t *testing.T) {
	for key, value := range map[string]any{
		"enabled": "maybe", "ignored_gpu_ids": "GPU-1", "fingerprint_period": []string{"1m"}, "xids": []string{"63"},
	} {
		if err := newFixture(t).configure(map[string]any{key: value}); err == nil {
			t.Errorf("%s = %v was accepted", key, value)
		}
	}
}

// What one configuration ignored, the next one does not.
func TestSetConfigTwice(t *testing.T) {
	s := newFixture(t)
	ignoring := map[string]any{"ignored_gpu_ids": []string{"GPU-1"}}
	steps := []struct {
		keys   map[string]any
		starts int // so far
	}{
		{ignoring, 1},
		{ignoring, 1},
		{map[string]any{}, 2},
		{map[string]any{"fingerprint_period": "60s"}, 2}, // the same as 1m
		{map[string]any{"enabled": false}, 2},
		{map[string]any{}, 3},
	}
	for i, step := range steps {
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
			if i == 2 {
				t.Error("the last source was ended")
			}
		default:
			if i < 2 {
				t.Errorf("source %d was not ended", i)
			}
		}
	}
}

func TestConstructorsStartNothing(t *testing.T) {
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
		t.Errorf("%d sources were started before anyone asked about devices", n)
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
