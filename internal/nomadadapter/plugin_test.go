package nomadadapter

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/mps"
)

func defaultSettings() Settings {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Rescan = inventory.MIGMixed, time.Minute
	cfg.Injection = inventory.Injection{Name: "variables", Runtime: true, Nodes: true}
	return Settings{
		Core: cfg, Health: config.DefaultHealth(), GroupBy: config.GroupByNone, MPSRoot: mps.DefaultRoot,
		CDIDir: "/var/run/cdi", CDIHookPath: "/usr/bin/nvidia-ctk",
		Operations: config.Operations{NomadAddress: config.DefaultNomadAddress, NomadGuessed: true},
	}
}

// The settings of a block in Nomad's encoding are the defaults, changed by its keys.
func TestSettings(t *testing.T) {
	unchanged := func(*Settings) {}
	for name, tc := range map[string]struct {
		keys map[string]any
		want func(*Settings)
	}{
		"empty block": {map[string]any{}, unchanged},
		"the defaults of the schema": {map[string]any{
			"enabled": true, "ignored_gpu_ids": nil, "fingerprint_period": "1m",
			"driver_root": "/", "dev_root": "", "sysfs_root": "/sys", "procfs_root": "/proc",
			"health_mode": "enforce", "xids": nil, "health_period": "10s", "health_settle": "30s", "call_deadline": "1m",
			"recovery": "auto", "recovery_dwell": "1m", "recovery_checks": 3, "recovery_limit": 3,
			"degraded": "schedulable", "application_faults": "degraded",
			"kernel_log": "auto", "state_dir": "/var/lib/tandem", "simulation": false,
			"policy_file": "", "mig_strategy": "", "group_by": "none", "mps_root": "",
			"injection": nil, "cdi_dir": "/var/run/cdi", "cdi_hook_path": "/usr/bin/nvidia-ctk",
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
			s.Health = config.Health{KernelLog: "/host/kmsg", Simulation: true}
			s.Core.Health, s.Core.Probe, s.Core.Overlap = p, 5*time.Second, inventory.OverlapRefuse
		}},
		"numbers as text": {map[string]any{"recovery_checks": "7", "simulation": "true"}, func(s *Settings) { // as Nomad's decoder may encode them
			s.Core.Health.CleanChecks, s.Health.Simulation = 7, true
		}},
		"the block": {map[string]any{
			"mig_strategy": "none", "group_by": "nvlink", "mps_root": "/run/mps/",
			"injection": []string{"libraries", "devices"}, "cdi_dir": "/etc/cdi", "cdi_hook_path": "/opt/bin/nvidia-cdi-hook",
		}, func(s *Settings) {
			s.Core.Injection = inventory.Injection{Name: "devices, libraries", Nodes: true, Libraries: true}
			s.CDIDir, s.CDIHookPath = "/etc/cdi", "/opt/bin/nvidia-cdi-hook"
			s.Core.MIG, s.GroupBy, s.MPSRoot = inventory.MIGNone, config.GroupByNVLink, "/run/mps"
		}},
	} {
		s := newFixture(t, nil)
		s.mustConfigure(t, tc.keys)
		s.currentRun()
		want := defaultSettings()
		if tc.want(&want); !cmp.Equal([]Settings{want}, s.Started()) {
			t.Errorf("%s (-want +got):\n%s", name, cmp.Diff([]Settings{want}, s.Started()))
		}
	}
	s := newFixture(t, nil)
	if err := s.SetConfig(&base.Config{}); err != nil { // without a block
		t.Fatal(err)
	}
	s.currentRun()
	checkEqual(t, "no block", []Settings{defaultSettings()}, s.Started())
}

// All errors of block and policy file are reported together, also when the plugin is disabled, and the settings do not change.
func TestRefusedConfiguration(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]any
		want []string // the beginning of each error, in this order
	}{
		"a fingerprint_period": {map[string]any{"fingerprint_period": "often"}, []string{`fingerprint_period = "often": want a positive duration such as 30s`}},
		"without a unit":       {map[string]any{"fingerprint_period": "60"}, []string{`fingerprint_period = "60": want a positive duration such as 30s`}},
		"too short":            {map[string]any{"fingerprint_period": "999ms"}, []string{`fingerprint_period = "999ms": want 1s or more`}},
		"negative":             {map[string]any{"fingerprint_period": "-1m"}, []string{`fingerprint_period = "-1m": want 1s or more`}},
		"disabled":             {map[string]any{"enabled": false, "fingerprint_period": "x"}, []string{`fingerprint_period = "x"`}},
		"no such file":         {map[string]any{"policy_file": "/nowhere/policy.yaml"}, []string{"configuration file: open /nowhere/policy.yaml: no such file"}},
		"a relative path":      {map[string]any{"policy_file": "policy.yaml"}, []string{`policy_file = "policy.yaml": want an absolute path`}},
		"all": {
			map[string]any{
				"ignored_gpu_ids": []string{"GPU-1", "0", ""}, "fingerprint_period": "x", "driver_root": "run/nvidia", "sysfs_root": "sys", "procfs_root": "",
				"policy_file": policyFile(t, invalidPolicy), "mig_strategy": "double", "group_by": "rack", "mps_root": "mps",
				"injection": []string{"devices", "nodes"}, "cdi_dir": "", "cdi_hook_path": "nvidia-ctk",
				"health_mode": "strict", "xids": map[string]string{"999": "fatal", "63": "ignore"}, "recovery": []string{"auto"}, "recovery_checks": 0, "recovery_limit": 2.5, "kernel_log": "kmsg",
			},
			[]string{
				`ignored_gpu_ids = "0": want UUIDs`, `ignored_gpu_ids = "": want UUIDs`, `fingerprint_period = "x"`, `driver_root = "run/nvidia": want an absolute path`,
				`sysfs_root = "sys": want an absolute path`, `procfs_root = "": want an absolute path`, `mig_strategy = "double": want none, single or mixed`,
				`group_by = "rack": want none, numa or nvlink`, `mps_root = "mps": want an absolute path`,
				`injection = "devices,nodes": want variables, devices, cdi or libraries, or several of them`, `cdi_dir = "": want an absolute path`, `cdi_hook_path = "nvidia-ctk": want an absolute path`,
				`health_mode = "strict"`, `xids = "63=ignore,999=fatal"`,
				`recovery = "[auto]"`, `recovery_checks = "0"`, `recovery_limit = "2.5"`, `kernel_log = "kmsg"`, "policy.yaml:4", "policy.yaml:5",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, nil)
			err := s.configure(tc.keys)
			if err == nil {
				t.Fatal("accepted")
			}
			lines := strings.Split(err.Error(), "\n")
			for i, want := range tc.want {
				if i >= len(lines) || !strings.Contains(lines[i], want) {
					t.Errorf("line %d: want %s", i, want)
				}
			}
			if len(lines) != len(tc.want) {
				t.Errorf("%d problems, want %d:\n%v", len(lines), len(tc.want), err)
			}
			s.currentRun()
			if diff := cmp.Diff([]Settings{defaultSettings()}, s.Started()); diff != "" {
				t.Errorf("a refused configuration is in effect:\n%s", diff)
			}
		})
	}
}

// Another configuration ends the source and starts another one; an equal one, also if it is written in another way, does
// not.
func TestSetConfigAgain(t *testing.T) {
	s := newFixture(t, nil)
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

// The process that validates the configuration starts no source.
func TestValidationStartsNoSource(t *testing.T) {
	s := newFixture(t, nil)
	if info, err := s.PluginInfo(); err != nil || info.PluginVersion != "2.0.0" {
		t.Fatal(info, err)
	}
	if keys, err := s.ConfigSchema(); err != nil || len(keys.GetObject().GetAttributes()) != len(config.NomadSpecs()) {
		t.Fatal(keys, err)
	}
	for range 2 {
		s.mustConfigure(t, map[string]any{})
	}
	if n := len(s.Started()); n != 0 {
		t.Errorf("%d sources were started", n)
	}
}

// Lines are hclog's JSON with the three texts that go-plugin requires.
func TestLog(t *testing.T) {
	out := &logBuffer{}
	base := slog.New(hclogHandler{log: hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: out, JSONFormat: true})})
	log := base.With("node", 1).WithGroup("gpu").With("id", inventory.UnitID("GPU-1"))
	log.Warn("lost", "at", gpu.WholeGPU("GPU-1"), "error", errors.New("gone"), "pci", "", "none", nil,
		slog.Group("x", slog.Int("xid", 79)))
	base.Debug("quiet", "@level", 3, "@message", true)
	base.Error("bad")
	base.Info("good")
	base.Log(t.Context(), slog.LevelDebug-4, "detail")

	want := []map[string]any{
		{"@level": "warn", "@message": "lost", "node": 1.0, "gpu.id": "GPU-1", "gpu.at": "GPU-1", "gpu.error": "gone", "gpu.x.xid": 79.0},
		{"@level": "debug", "@message": "quiet", "level": 3.0, "message": true},
		{"@level": "error", "@message": "bad"},
		{"@level": "info", "@message": "good"},
		{"@level": "trace", "@message": "detail"},
	}
	var got []map[string]any
	for _, line := range out.Lines() {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if _, ok := fields["@timestamp"].(string); !ok {
			t.Errorf("%q has no timestamp", line)
		}
		delete(fields, "@timestamp")
		got = append(got, fields)
	}
	checkEqual(t, "log", want, got)
}

func TestLogLevel(t *testing.T) {
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: &logBuffer{}})
	h := hclogHandler{log: log}
	if h.Enabled(t.Context(), slog.LevelDebug) || !h.Enabled(t.Context(), slog.LevelInfo) {
		t.Error("the level of the hclog logger is ignored")
	}
}
