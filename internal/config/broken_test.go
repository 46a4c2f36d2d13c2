package config

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// broken are configurations with one mistake each, by where it is: a flag, a variable, a key of the plugin block, the file. want is the one
// error: place, value and remedy.
var broken = []struct {
	flag, env, file string
	block           map[string]any
	nomad           bool // the file is nomad-gpu's
	want            string
}{
	// Flags.
	{flag: "mig-strategy=all", want: `--mig-strategy = "all": want none, single or mixed`},
	{flag: "device-list-strategy=", want: `--device-list-strategy = "": want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri`},
	{flag: "device-id-strategy=UUID", want: `--device-id-strategy = "UUID": want index or uuid`},
	{flag: "pass-device-specs=yes", want: `--pass-device-specs = "yes": want true or false`},
	{flag: "cdi-disable-hooks=chmod,ldcache", want: `--cdi-disable-hooks = "ldcache": want all, apply-cuda-memory-limits, chmod, create-symlinks, disable-device-node-modification, enable-cuda-compat, update-application-profile or update-ldcache`},
	{flag: "health-mode=on", want: `--health-mode = "on": want enforce, observe or off`},
	{flag: "health-period=10", want: `--health-period = "10": want a positive duration such as 30s or 1m`},
	{flag: "recovery-checks=0", want: `--recovery-checks = "0": want a number of 1 or more`},
	{flag: "xids=63:ignore", want: `--xids = "63:ignore": "63:ignore": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy`},
	{flag: "http-address=9410", want: `--http-address = "9410": want HOST:PORT such as :9410`},
	{flag: "log-level=trace", want: `--log-level = "trace": want debug, info, warn or error`},
	{flag: "kubelet-socket=kubelet.sock", want: `--kubelet-socket = "kubelet.sock": want an absolute path such as /var/lib/kubelet/device-plugins/kubelet.sock`},
	// Variables.
	{env: "DRIVER_ROOT_CTR_PATH=driver", want: `DRIVER_ROOT_CTR_PATH = "driver": want an absolute path such as /driver-root`},
	{env: "DEVICE_DISCOVERY_STRATEGY=tegra", want: `DEVICE_DISCOVERY_STRATEGY = "tegra": tegra is not supported by this version: want nvml`},
	{env: "IMEX_CHANNEL_IDS=1", want: `IMEX_CHANNEL_IDS = "1": want 0, which is the only channel that can be given, or nothing`},
	{env: "CDI_ANNOTATION_PREFIX=nvidia", want: `CDI_ANNOTATION_PREFIX = "nvidia": want a DNS name and a slash, such as cdi.k8s.io/`},
	{env: "KERNEL_LOG=kmsg", want: `KERNEL_LOG = "kmsg": want auto, off or an absolute path such as /dev/kmsg`},
	{env: "OVERLAP=deny", want: `OVERLAP = "deny": want warn or refuse`},
	{env: "SIMULATION=on", want: `SIMULATION = "on": want true or false`},
	{env: "DP_DISABLE_HEALTHCHECKS=48,ecc", want: `DP_DISABLE_HEALTHCHECKS = "48,ecc": want XIDs such as 48,79, or "all"`},
	{env: "CONFIG_FILE=/nowhere/c.yaml", want: `configuration file: open /nowhere/c.yaml: no such file or directory`},
	// The plugin block of a Nomad client.
	{block: map[string]any{"enabled": "maybe"}, want: `enabled = "maybe": want true or false`},
	{block: map[string]any{"ignored_gpu_ids": []any{"GPU-1", "0"}}, want: `ignored_gpu_ids = "0": want UUIDs (GPU-... or MIG-...) as nvidia-smi -L prints them`},
	{block: map[string]any{"fingerprint_period": "100ms"}, want: `fingerprint_period = "100ms": want 1s or more`},
	{block: map[string]any{"group_by": "socket"}, want: `group_by = "socket": want none, numa or nvlink`},
	{block: map[string]any{"injection": []any{}}, want: `injection = "": an empty list gives a task nothing: leave the key out`},
	{block: map[string]any{"injection": []any{"cdi", "libraries"}}, want: `injection = "cdi,libraries": libraries belongs to devices, because NVIDIA's container runtime and CDI have the driver's files: want devices beside it`},
	{block: map[string]any{"xids": []any{63}}, want: `xids = "[63]": want a mapping`},
	{block: map[string]any{"recovery_limit": 2.5}, want: `recovery_limit = "2.5": want a number of 1 or more`},
	{block: map[string]any{"nomad_address": "127.0.0.1:4646"}, want: `nomad_address = "127.0.0.1:4646": want http://HOST:PORT, https://HOST:PORT or unix:///PATH`},
	{block: map[string]any{"policy_file": "policy.yaml"}, want: `policy_file = "policy.yaml": want an absolute path such as /etc/tandem/policy.yaml`},
	{block: map[string]any{"state_dir": "state"}, want: `state_dir = "state": want an absolute path such as /var/lib/tandem, or nothing`},
	// The file.
	{file: "flags: {migStrategy: none\n", want: `/c.yaml: line 1: did not find expected ',' or '}'`},
	{file: "version: v2\n", want: `/c.yaml:1: version = "v2": want v1`},
	{file: "flags:\n  migStratgy: mixed\n", want: `/c.yaml:2: flags.migStratgy = "mixed": unknown key: did you mean migStrategy?`},
	{file: "flags:\n  migStrategy: mixed\n  migStrategy: none\n", want: `/c.yaml:3: flags.migStrategy = "none": given twice`},
	{file: "flags: [migStrategy]\n", want: `/c.yaml:1: flags = "[...]": want a mapping`},
	{file: "flags: {plugin: {deviceListStrategy: [envvar, cdi]}}\n", want: `/c.yaml:1: flags.plugin.deviceListStrategy = "envvar,cdi": cdi: want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri`},
	{file: "health: {recoveryDwell: 60}\n", want: `/c.yaml:1: health.recoveryDwell = "60": want a positive duration such as 30s or 1m`},
	{file: "health:\n  xids: {63: warn}\n", want: `/c.yaml:2: health.xids = "63=warn": "63=warn": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy`},
	{file: "imex: {channelIDs: [0, 1]}\n", want: `/c.yaml:1: imex.channelIDs = "0,1": want 0, which is the only channel that can be given, or nothing`},
	{file: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}\n", want: `/c.yaml:1: sharing.timeSlicing.resources[0].replicas = "1": want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)`},
	{file: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n", want: `/c.yaml:1: sharing.mps.resources[0] = "mps": takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as /run/nvidia/mps`},
	{file: "sharing: {timeSlicing: {resources: [{name: gppu, replicas: 2}]}}\n", want: `/c.yaml:1: sharing.timeSlicing.resources[0].name = "gppu": unknown resource: did you mean nvidia.com/gpu? (gpu, mig-<profile>, or a name from resources or policy.rules)`},
	{file: "resources: {gpus: [{pattern: \"*\", name: amd.com/gpu}]}\n", want: `/c.yaml:1: resources.gpus[0].name = "amd.com/gpu": want a name without a domain, or with nvidia.com/; amd.com/ is another domain`},
	// The section policy, for both agents.
	{file: "policy: {include: []}\n", want: `/c.yaml:1: policy.include = "[...]": an empty list offers nothing: leave the key out to offer everything`},
	{nomad: true, file: "policy:\n  rules:\n  - select: {index: GPU-1}\n    use: reserved\n", want: `/c.yaml:3: policy.rules[0].select.index = "GPU-1": want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {index: 0}, use: shared}\n", want: `/c.yaml:3: policy.rules[0].use = "shared": want exclusive, time-slicing, mps or reserved`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {index: 0}, use: time-slicing}\n", want: `/c.yaml:3: policy.rules[0].replicas = "": want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {index: 0}, use: exclusive}\n  - {select: {index: 0}, use: reserved}\n", want: `/c.yaml:4: policy.rules[1] = "{...}": selects 0, as does c.yaml:3: policy.rules[0].select, and the first rule that selects a device counts`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {memory: {min: 40GB}}, use: exclusive}\n", want: `/c.yaml:3: policy.rules[0].select.memory.min = "40GB": want a size such as 512MiB or 40GiB (KiB, MiB, GiB, TiB), from 1MiB to 16TiB`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {migProfile: 1g.*}, use: mps, replicas: 2}\n", want: `/c.yaml:3: policy.rules[0].use = "mps": MPS shares full GPUs only, and this rule selects MIG instances: want time-slicing or exclusive`},
	{nomad: true, file: "policy:\n  rules:\n  - {select: {index: 0}, use: mps, replicas: 2, name: a}\n  - {select: {index: 1}, use: mps, replicas: 3, name: a}\n", want: `/c.yaml:4: policy.rules[1].select = "nvidia.com/a": would be mps by 3, but by c.yaml:3: policy.rules[0].select it is mps by 2: want another name for one of them`},
}

// readBroken reads flags, variables and, unless it is nomad-gpu's, a file.
func readBroken(t *testing.T, flags, env []string, file string, nomad bool) error {
	t.Helper()
	if nomad {
		_, err := ParseFile("/c.yaml", []byte(file), policy.Nomad)
		return err
	}
	values, variables := NewFlags(KubernetesSpecs()), map[string]string{}
	for _, flag := range flags {
		name, value, _ := strings.Cut(flag, "=")
		must(t, values[name].Set(value))
	}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		variables[name] = value
	}
	if file == "" {
		_, err := ReadKubernetes(values, environment(variables))
		return err
	}
	f, err := parseFile("/c.yaml", []byte(file), policy.Kubernetes, fileKinds(true))
	if err == nil {
		var s Kubernetes
		if s, err = resolve(values, environment(variables), f); err == nil {
			err = s.checkMPS()
		}
	}
	return err
}

// Each mistake is one error, with place, value and remedy.
func TestBrokenConfigurations(t *testing.T) {
	if len(broken) < 50 {
		t.Errorf("%d configurations", len(broken))
	}
	some := func(s string) []string { return slices.DeleteFunc([]string{s}, func(s string) bool { return s == "" }) }
	for _, c := range broken {
		var err error
		if c.block != nil {
			_, _, err = NewBlock(c.block).Read()
		} else {
			err = readBroken(t, some(c.flag), some(c.env), c.file, c.nomad)
		}
		sameProblems(t, err, c.want)
	}
}

// Several mistakes are all reported: those of all flags and variables above, and those of the block, at once.
func TestBrokenAtOnce(t *testing.T) {
	var flags, env, want, wantOfBlock []string
	block := map[string]any{}
	for _, c := range broken {
		switch {
		case c.flag != "":
			flags, want = append(flags, c.flag), append(want, c.want)
		case c.env != "":
			env, want = append(env, c.env), append(want, c.want)
		case c.block != nil && (c.block["injection"] == nil || block["injection"] == nil): // it is there twice
			maps.Copy(block, c.block)
			wantOfBlock = append(wantOfBlock, c.want)
		}
	}
	sorted := func(lines []string) []string { return slices.Sorted(slices.Values(lines)) }
	_, _, err := NewBlock(block).Read()
	for of, got := range map[string][2][]string{
		"flags and variables": {want, strings.Split(errorText(readBroken(t, flags, env, "", false)), "\n")},
		"block":               {wantOfBlock, strings.Split(errorText(err), "\n")},
	} {
		if diff := cmp.Diff(sorted(got[0]), sorted(got[1])); diff != "" {
			t.Errorf("%s: %s", of, diff)
		}
	}
}
