package config

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
)

// different is a value other than the default for each option, by its HCL key, and by its flag if it has no such key.
var different = map[string]string{
	"health_mode": "observe", "xids": "63=ignore,999=unhealthy", "health_period": "7s", "health_settle": "11s",
	"call_deadline": "13s", "recovery": "manual", "recovery_dwell": "17s", "recovery_checks": "5",
	"recovery_limit": "6", "degraded": "unhealthy", "application_faults": "ignore", "kernel_log": "/host/kmsg",
	"state_dir": "/state", "simulation": "true", "overlap": "warn", "reservation_check": "refuse", "occupancy": "withhold",

	"enabled": "false", "ignored_gpu_ids": "GPU-1,MIG-2", "fingerprint_period": "90s", "driver_root": "/driver", "dev_root": "/d",
	"sysfs_root": "/host/sys", "procfs_root": "/host/proc", "cgroup_root": "/host/cgroup", "policy_file": "/policy.yaml", "mig_strategy": "single", "group_by": "numa", "mps_root": "/mps/root",
	"injection": "devices,cdi", "cdi_dir": "/cdi", "cdi_hook_path": "/hook", "http_address": "127.0.0.1:1", "hpc_job_mapping_dir": "/jobs",
	"nomad_address": "http://127.0.0.1:1", "nomad_token_file": "/token",

	"mig-strategy": "single", "driver-root": "/driver", "driver-root-ctr-path": "/mnt", "dev-root": "/d", "pass-device-specs": "true",
	"device-list-strategy": "envvar,volume-mounts", "device-id-strategy": "index", "shared-devices-allocation-policy": "packed", "mps-root": "/mps/root",
	"kubelet-socket": "/kubelet/plugins.sock", "pod-resources-socket": "/pods.sock", "http-address": ":1", "log-level": "debug", "rescan": "90s",
	"exclude": "GPU-1", "sysfs-root": "/host/sys", "procfs-root": "/host/proc", "cgroup-root": "/host/cgroup", "cdi-annotation-prefix": "nvidia.cdi.k8s.io/", "nvidia-cdi-hook-path": "/hook",
	"cdi-feature-flags": "disable-nvsandboxutils", "cdi-disable-hooks": "chmod,update-ldcache", "cdi-dir": "/cdi", "cri-socket": "/cri.sock",
	"gdrcopy-enabled": "true", "gds-enabled": "true", "mofed-enabled": "true", "imex-channel-ids": "0", "imex-required": "true",
	"hpc-job-mapping-dir": "/jobs", "features-file": "/features.d/gfd", "log-format": "json",

	"api": "dra", "node-name": "node-1", "kube-api": "https://127.0.0.1:6443", "kube-token-file": "/token", "kube-ca-file": "/ca.crt",
	"kubelet-dir": "/data/kubelet", "on-unhealthy": "evict", "evictions-per-hour": "3",

	"hand-over": "true", "hand-over-condition": "ExampleReady", "hand-over-second-condition": "GPUMissing", "hand-over-events": "false",

	"config-file-srcdir": "/configs", "node-label": "example.com/config", "default-config": "b", "fallback-strategies": "empty", "pause-label": "nvidia.com/gpu.deploy.client",
	"use-node-feature-api": "true", "namespace": "gpu", "pod-name": "agent-1", "no-timestamp": "true", "oneshot": "true",

	"fail-on-init-error": "", "device-discovery-strategy": "", "config-file": "", // without effect on the settings, or no setting
}

func differentFor(t *testing.T, o Spec, name string) string {
	t.Helper()
	value, ok := different[name]
	if !ok || value != "" && value == o.Default {
		t.Fatalf("the test has no value for %s", name)
	}
	return value
}

// An option means the same in each spelling, and something else than its default.
func TestSpellingsOfKubernetes(t *testing.T) {
	byDefault, err := resolveOne(t, NewFlags(KubernetesSpecs()), nil, nil)
	check.NoError(t, err)
	for _, o := range KubernetesSpecs() {
		name := o.Flag
		if o.HCL != "" {
			name = o.HCL
		}
		if o.Hidden || differentFor(t, o, name) == "" {
			continue
		}
		value := different[name]
		flags := NewFlags(KubernetesSpecs())
		check.NoError(t, flags[o.Flag].Set(value))
		want, err := resolveOne(t, flags, nil, nil)
		check.NoError(t, err)
		if want.Equal(byDefault) {
			t.Errorf("--%s=%s has no effect", o.Flag, value)
		}
		for _, variable := range o.Env {
			if got, err := resolveOne(t, NewFlags(KubernetesSpecs()), map[string]string{variable: value}, nil); err != nil || !got.Equal(want) {
				t.Errorf("%s=%s is not --%s: %v", variable, value, o.Flag, err)
			}
		}
		if o.Key != "" {
			if got, err := resolveOne(t, NewFlags(KubernetesSpecs()), nil, map[string]string{o.Key: value}); err != nil || !got.Equal(want) {
				t.Errorf("%s: %s is not --%s: %v", o.Key, value, o.Flag, err)
			}
		}
	}
}

// encoded is a value as HCL has it.
func encoded(o Spec, text string) any {
	items, values := []any{}, map[string]any{}
	for item := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(item, "=")
		items, values[key] = append(items, item), value
	}
	if o.Kind == schema.List {
		return items
	}
	if o.Kind == schema.Mapping {
		return values
	}
	return text
}

// A key of the plugin block means the same as a flag of the commands, as a key of the policy file and, for the settings of both agents, to
// k8s-gpu.
func TestSpellingsOfNomad(t *testing.T) {
	compile := func(b Block, file string) (Nomad, bool, string) {
		t.Helper()
		s, _, err := b.Compile("/c.yaml", []byte(file))
		check.NoError(t, err)
		return s, b.Enabled, b.PolicyFile
	}
	byDefault := NewBlock(nil)
	for _, o := range NomadSpecs() {
		value := differentFor(t, o, o.HCL)
		block := map[string]any{o.HCL: encoded(o, value)}
		b := NewBlock(block)
		want, enabled, _ := compile(b, "")
		plain, _, _ := compile(byDefault, "")
		if reflect.DeepEqual(want, plain) && enabled && b.PolicyFile == "" {
			t.Errorf("%s = %s has no effect", o.HCL, value)
		}
		same := func(how string, got Block, file string) {
			t.Helper()
			s, e, _ := compile(got, file)
			if diff := cmp.Diff(want, s); diff != "" || e != enabled || got.PolicyFile != b.PolicyFile {
				t.Errorf("%s is not %s = %s: %s", how, o.HCL, value, diff)
			}
		}
		same("the file", BlockWithFlags(Keys{Values: block}, NewFlags(NomadSpecs())), "")
		if o.Flag != "" {
			flags := NewFlags(NomadSpecs())
			check.NoError(t, flags[o.Flag].Set(value))
			same("--"+o.Flag, BlockOfFlags(flags), "")
		}
		switch o.HCL {
		case "mig_strategy":
			same(keyMIGStrategy, byDefault, nested(keyMIGStrategy, " "+value))
		case "mps_root":
			same(keyMPSRoot, byDefault, nested(keyMPSRoot, " "+value))
		}
	}
	for _, o := range HealthSpecs() {
		n, _, err := NewBlock(map[string]any{o.HCL: encoded(o, different[o.HCL])}).Read()
		check.NoError(t, err)
		flags := NewFlags(KubernetesSpecs())
		check.NoError(t, flags[o.Flag].Set(different[o.HCL]))
		k, err := resolveOne(t, flags, nil, nil)
		check.NoError(t, err)
		k.Core.MIG, k.Core.Roots, k.Core.Injection, k.Core.API = n.Core.MIG, n.Core.Roots, n.Core.Injection, n.Core.API // other options
		if diff := cmp.Diff(n.Core, k.Core, cmpopts.EquateEmpty()) + cmp.Diff(n.Health, k.Health); diff != "" {
			t.Errorf("%s differs between the agents: %s", o.HCL, diff)
		}
	}
}

// Both binaries read every spelling: with a value that is refused, each is named in an error.
func TestBinariesReadEverySpelling(t *testing.T) {
	const bad = "?"
	refuses := func(o Spec) bool { return !o.Hidden && o.Flag != FlagConfigFile && len(o.apply(Value{Text: bad})) > 0 }
	kubernetes := kubernetesOptions(new(Kubernetes), environment(nil).CheckAddress)
	for name, c := range map[string]struct {
		program string
		specs   []Spec
		spelled func(Spec) []string             // the places that the errors name
		use     func(cmd *exec.Cmd, s []string) // sets all of them
	}{
		"flags of k8s-gpu": {"k8s-gpu", kubernetes, func(o Spec) []string { return []string{"--" + o.Flag} }, func(cmd *exec.Cmd, s []string) {
			for _, flag := range s {
				cmd.Args = append(cmd.Args, flag+"="+bad)
			}
		}},
		"aliases of k8s-gpu": {"k8s-gpu", slices.DeleteFunc(slices.Clone(kubernetes), func(o Spec) bool { return o.Aliases == nil }), func(o Spec) []string { return []string{"--" + o.Flag} }, func(cmd *exec.Cmd, s []string) {
			for _, o := range kubernetes {
				if slices.Contains(s, "--"+o.Flag) {
					cmd.Args = append(cmd.Args, "--"+o.Aliases[0]+"="+bad)
				}
			}
		}},
		"variables of k8s-gpu": {"k8s-gpu", kubernetes, func(o Spec) []string { return o.Env[:min(1, len(o.Env))] }, func(cmd *exec.Cmd, s []string) {
			for _, variable := range s {
				cmd.Env = append(cmd.Env, variable+"="+bad)
			}
		}},
		"file of k8s-gpu": {"k8s-gpu", kubernetes, func(o Spec) []string { return []string{o.Key} }, func(cmd *exec.Cmd, s []string) {
			values := map[string]Value{}
			for _, key := range s {
				values[key] = Value{Text: bad}
			}
			cmd.Args = append(cmd.Args, temporary(t, string(written(t, values))))
		}},
		"flags of nomad-gpu": {"nomad-gpu", NomadSpecs(), func(o Spec) []string { return []string{"--" + o.Flag} }, func(cmd *exec.Cmd, s []string) {
			cmd.Args = append(cmd.Args, temporary(t, ""))
			for _, flag := range s {
				cmd.Args = append(cmd.Args, flag+"="+bad)
			}
		}},
		"block of nomad-gpu": {"nomad-gpu", NomadSpecs(), func(o Spec) []string { return []string{o.HCL} }, func(cmd *exec.Cmd, s []string) {
			var b strings.Builder
			for _, key := range s {
				fmt.Fprintf(&b, "    %s = %q\n", key, bad)
			}
			cmd.Args = append(cmd.Args, "--nomad-config", temporary(t, "plugin \"nomad-gpu\" {\n  config {\n"+b.String()+"  }\n}\n"))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var all []string
			for _, o := range c.specs {
				for _, s := range c.spelled(o) {
					if s != "" && s != "--" && refuses(o) {
						all = append(all, s)
					}
				}
			}
			cmd := exec.CommandContext(t.Context(), binaries.Path(t, c.program), "validate")
			cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if c.use(cmd, all); cmd.Run() == nil || len(all) < 3 {
				t.Errorf("%d spellings, and no error", len(all))
			}
			for _, s := range all {
				all := strings.Split(stderr.String(), "\n")
				if n := len(slices.DeleteFunc(all, func(line string) bool { return !strings.Contains(line, " "+s+` = "`) })); n != 1 {
					t.Errorf("%s is named in %d errors", s, n)
				}
			}
			if t.Failed() {
				t.Log(stderr.String())
			}
		})
	}
}

func temporary(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c")
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}
