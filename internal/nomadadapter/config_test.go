package nomadadapter

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
	"github.com/tandem-gpu/tandem/internal/setting"
)

func defaultSettings() Settings {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes, cfg.Rescan = inventory.MIGMixed, true, time.Minute
	return Settings{Core: cfg, Health: config.DefaultHealth(), GroupBy: config.GroupByNone, MPSRoot: hostwatch.DefaultMPSRoot}
}

// The settings of a block are the defaults, changed by its keys. Keys of the block have precedence over those of the policy
// file.
func TestSettings(t *testing.T) {
	unchanged := func(*Settings) {}
	flags := policyFile(t, "version: v1\nflags: {migStrategy: single, mpsRoot: /srv/mps}\n")
	for name, tc := range map[string]struct {
		keys map[string]any
		want func(*Settings)
	}{
		"empty block": {map[string]any{}, unchanged},
		"the defaults of the schema": {map[string]any{
			"enabled": true, "ignored_gpu_ids": []string{}, "fingerprint_period": "1m",
			"driver_root": "/", "dev_root": "", "sysfs_root": "/sys", "procfs_root": "/proc",
			"health_mode": "enforce", "xids": nil, "health_period": "10s", "health_settle": "30s", "call_deadline": "1m",
			"recovery": "auto", "recovery_dwell": "1m", "recovery_checks": 3, "recovery_limit": 3,
			"degraded": "schedulable", "application_faults": "degraded",
			"kernel_log": "auto", "state_dir": "/var/lib/tandem", "simulation": false,
			"policy_file": "", "mig_strategy": "", "group_by": "none", "mps_root": "",
		}, unchanged},
		"an empty map": {map[string]any{"xids": map[string]string{}}, unchanged},
		"the host": {map[string]any{
			"ignored_gpu_ids": []string{"GPU-1", "MIG-2"}, "fingerprint_period": "90s",
			"driver_root": "/run/nvidia/driver/", "sysfs_root": "/host/sys", "procfs_root": "/host/proc",
		}, func(s *Settings) {
			s.Core.Rescan, s.Core.Exclude = 90*time.Second, []gpu.DeviceID{"GPU-1", "MIG-2"}
			s.Core.Roots = core.Roots{
				Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver", // dev_root is driver_root by default
				Sys: "/host/sys", Proc: "/host/proc",
			}
		}},
		"health": {map[string]any{
			"health_mode": "observe", "xids": map[string]string{"63": "ignore", "999": "unhealthy"},
			"health_period": "5s", "health_settle": "20s", "call_deadline": "2m",
			"recovery": "manual", "recovery_dwell": "3m", "recovery_checks": 4, "recovery_limit": 5,
			"degraded": "unhealthy", "application_faults": "ignore",
			"kernel_log": "/host/kmsg", "state_dir": "", "simulation": true, "overlap": "refuse",
		}, func(s *Settings) {
			p := health.DefaultPolicy()
			p.Mode, p.SettleTime, p.CallDeadline = health.ModeObserve, 20*time.Second, 2*time.Minute
			p.XIDs = map[uint64]xid.Effect{63: xid.None, 999: xid.Withdraws}
			p.ManualRecovery, p.RecoveryDwell, p.CleanChecks, p.MaxRecoveries = true, 3*time.Minute, 4, 5
			p.DegradedTakesNoWork, p.ApplicationFaults = true, xid.None
			s.Health = config.Health{Policy: p, Probe: 5 * time.Second, KernelLog: "/host/kmsg", Simulation: true, Overlap: inventory.OverlapRefuse}
			s.Core.Health, s.Core.Probe, s.Core.Overlap = p, 5*time.Second, inventory.OverlapRefuse
		}},
		"numbers as text": {map[string]any{"recovery_checks": "7", "simulation": "true"}, func(s *Settings) { // as Nomad's decoder may encode them
			s.Health.Policy.CleanChecks, s.Core.Health.CleanChecks, s.Health.Simulation = 7, 7, true
		}},
		"the block": {map[string]any{"mig_strategy": "none", "group_by": "nvlink", "mps_root": "/run/mps/"}, func(s *Settings) {
			s.Core.MIG, s.GroupBy, s.MPSRoot = inventory.MIGNone, config.GroupByNVLink, "/run/mps"
		}},
		"the file": {map[string]any{"policy_file": flags, "group_by": "numa"}, func(s *Settings) {
			s.Core.MIG, s.GroupBy, s.MPSRoot = inventory.MIGSingle, config.GroupByNUMA, "/srv/mps"
		}},
		"block and file":  {map[string]any{"policy_file": flags, "mig_strategy": "mixed", "mps_root": "/mps"}, func(s *Settings) { s.MPSRoot = "/mps" }},
		"an empty file":   {map[string]any{"policy_file": policyFile(t, "version: v1\n")}, unchanged},
		"unrelated flags": {map[string]any{"policy_file": policyFile(t, "version: v1\nflags: {plugin: {deviceListStrategy: cdi-cri}, gfd: {oneshot: true}}\n")}, unchanged},
	} {
		s := newFixture(t)
		if err := s.configure(tc.keys); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.currentRun()
		want := defaultSettings()
		if tc.want(&want); !cmp.Equal([]Settings{want}, s.Started()) {
			t.Errorf("%s (-want +got):\n%s", name, cmp.Diff([]Settings{want}, s.Started()))
		}
	}
	s := newFixture(t) // without a block
	if err := s.SetConfig(&base.Config{}); err != nil {
		t.Fatal(err)
	}
	s.currentRun()
	if diff := cmp.Diff([]Settings{defaultSettings()}, s.Started()); diff != "" {
		t.Errorf("no block (-want +got):\n%s", diff)
	}
	if err := defaultSettings().Core.Validate(); err != nil {
		t.Errorf("the defaults are invalid: %v", err)
	}
}

// Every health key is an optional key of the block, with the type of its default.
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

func TestPolicyFile(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"policy_file": policyFile(t, validPolicy)})
	s.currentRun()
	inv := inventoryWith(s.Started()[0].Core, linked(3))
	want := map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2}
	if diff := cmp.Diff(want, groupSizes(groups(inv, assignment{}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestConfigErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]any
		want []setting.Error // in the order reported; Remedy is a part of it
	}{
		"not a duration": {
			map[string]any{"fingerprint_period": "often"},
			[]setting.Error{{Key: "fingerprint_period", Value: "often", Remedy: "30s"}},
		},
		"a number without unit": {
			map[string]any{"fingerprint_period": "60"},
			[]setting.Error{{Key: "fingerprint_period", Value: "60", Remedy: "30s"}},
		},
		"zero period":     {map[string]any{"fingerprint_period": "0s"}, []setting.Error{{Key: "fingerprint_period", Value: "0s", Remedy: "1s or more"}}},
		"negative period": {map[string]any{"fingerprint_period": "-1m"}, []setting.Error{{Key: "fingerprint_period", Value: "-1m", Remedy: "1s or more"}}},
		"short period":    {map[string]any{"fingerprint_period": "999ms"}, []setting.Error{{Key: "fingerprint_period", Value: "999ms", Remedy: "1s or more"}}},
		"an index": {
			map[string]any{"ignored_gpu_ids": []string{"GPU-1", "0"}},
			[]setting.Error{{Key: "ignored_gpu_ids", Value: "0", Remedy: "nvidia-smi -L"}},
		},
		"all errors": {
			map[string]any{
				"ignored_gpu_ids": []string{"gpu-1", ""}, "fingerprint_period": "x",
				"driver_root": "run/nvidia", "sysfs_root": "sys", "procfs_root": "",
			},
			[]setting.Error{
				{Key: "ignored_gpu_ids", Value: "gpu-1", Remedy: "GPU-"},
				{Key: "ignored_gpu_ids", Value: "", Remedy: "GPU-"},
				{Key: "fingerprint_period", Value: "x", Remedy: "duration"},
				{Key: "driver_root", Value: "run/nvidia", Remedy: "absolute"},
				{Key: "sysfs_root", Value: "sys", Remedy: "absolute"},
				{Key: "procfs_root", Value: "", Remedy: "absolute"},
			},
		},
		"health keys": {
			map[string]any{
				"fingerprint_period": "often", "health_mode": "strict", "xids": map[string]string{"999": "fatal", "63": "ignore"},
				"recovery_checks": 0, "recovery_limit": 2.5, "recovery": []string{"auto"}, "kernel_log": "kmsg",
			},
			[]setting.Error{
				{Key: "fingerprint_period", Value: "often"}, {Key: "health_mode", Value: "strict"}, {Key: "xids", Value: "63=ignore,999=fatal"},
				{Key: "recovery", Value: "[auto]"}, {Key: "recovery_checks", Value: "0"}, {Key: "recovery_limit", Value: "2.5"}, {Key: "kernel_log", Value: "kmsg"},
			},
		},
		"also when disabled": {
			map[string]any{"enabled": false, "fingerprint_period": "x"},
			[]setting.Error{{Key: "fingerprint_period", Value: "x", Remedy: "duration"}},
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
				var got *setting.Error
				if !errors.As(e, &got) {
					t.Fatalf("%v is not a *setting.Error", e)
				}
				want := tc.want[i]
				if got.Remedy == "" || got.Key != want.Key || got.Value != want.Value || !strings.Contains(got.Remedy, want.Remedy) {
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

// All errors in block and file are reported together, and the settings do not change.
func TestPolicyErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]any
		want []string
	}{
		"no such file":    {map[string]any{"policy_file": "/nowhere/policy.yaml"}, []string{"/nowhere/policy.yaml: no such file"}},
		"a relative path": {map[string]any{"policy_file": "policy.yaml"}, []string{`policy_file = "policy.yaml": want an absolute path`}},
		"invalid YAML":    {map[string]any{"policy_file": policyFile(t, "{")}, []string{"policy.yaml"}},
		"an unknown key":  {map[string]any{"policy_file": policyFile(t, "version: v1\npolice: {}\n")}, []string{"policy.yaml:2", "police"}},
		"unknown values":  {map[string]any{"mig_strategy": "double", "group_by": "rack"}, []string{`mig_strategy = "double": want none, single or mixed`, `group_by = "rack": want none, numa or nvlink`}},
		"a relative root": {map[string]any{"mps_root": "mps"}, []string{`mps_root = "mps": want an absolute path`}},
		"all errors": {
			map[string]any{"policy_file": policyFile(t, invalidPolicy), "group_by": "rack", "fingerprint_period": "often", "recovery": "never"},
			[]string{"policy.yaml:4", `"zero"`, "policy.yaml:5", `"quartered"`, `group_by = "rack"`, `fingerprint_period = "often"`, `recovery = "never"`},
		},
	} {
		s := newFixture(t)
		err := s.configure(tc.keys)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in:\n%v", name, want, err)
			}
		}
		s.currentRun()
		if diff := cmp.Diff(inventory.Policy{}, s.Started()[0].Core.Policy); diff != "" {
			t.Errorf("%s: a refused policy is in effect:\n%s", name, diff)
		}
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
