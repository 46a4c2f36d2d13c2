// Package configtest has broken configurations for tests.
package configtest

// Case is a configuration with one mistake, which is where a field other than "" has it.
type Case struct {
	Flag  string         // of k8s-gpu: "mig-strategy=all"
	Env   string         // of k8s-gpu: "MIG_STRATEGY=all"
	Block map[string]any // the plugin block of nomad-gpu
	File  string         // of k8s-gpu; its path is /c.yaml in Want
	Both  bool           // nomad-gpu has the same error for File
	Want  string         // the one error: place, value and remedy
}

// Broken are configurations with one mistake each.
var Broken = []Case{
	// Flags.
	{Flag: "mig-strategy=all", Want: `--mig-strategy = "all": want none, single or mixed`},
	{Flag: "device-list-strategy=", Want: `--device-list-strategy = "": want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri`},
	{Flag: "device-id-strategy=UUID", Want: `--device-id-strategy = "UUID": want index or uuid`},
	{Flag: "pass-device-specs=yes", Want: `--pass-device-specs = "yes": want true or false`},
	{Flag: "cdi-disable-hooks=chmod,ldcache", Want: `--cdi-disable-hooks = "ldcache": want all, apply-cuda-memory-limits, chmod, create-symlinks, disable-device-node-modification, enable-cuda-compat, update-application-profile or update-ldcache`},
	{Flag: "health-mode=on", Want: `--health-mode = "on": want enforce, observe or off`},
	{Flag: "health-period=10", Want: `--health-period = "10": want a positive duration such as 30s or 1m`},
	{Flag: "recovery-checks=0", Want: `--recovery-checks = "0": want a number of 1 or more`},
	{Flag: "xids=63:ignore", Want: `--xids = "63:ignore": "63:ignore": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy`},
	{Flag: "http-address=9410", Want: `--http-address = "9410": want HOST:PORT such as :9410`},
	{Flag: "log-level=trace", Want: `--log-level = "trace": want debug, info, warn or error`},
	{Flag: "kubelet-socket=kubelet.sock", Want: `--kubelet-socket = "kubelet.sock": want an absolute path such as /var/lib/kubelet/device-plugins/kubelet.sock`},
	{Flag: "api=DRA", Want: `--api = "DRA": want device-plugin or dra`},
	{Flag: "kube-api=10.0.0.1:6443", Want: `--kube-api = "10.0.0.1:6443": want a URL such as https://10.0.0.1:6443`},
	{Flag: "on-unhealthy=delete", Want: `--on-unhealthy = "delete": want evict or taint`},
	{Flag: "hand-over=on", Want: `--hand-over = "on": want true or false`},
	{Flag: "hand-over-condition=Ready", Want: `--hand-over-condition = "Ready": the kubelet writes this condition: want a type such as TandemGPUsHealthy`},
	{Flag: "hand-over-second-condition=GPU Missing", Want: `--hand-over-second-condition = "GPU Missing": want the type of a condition such as AcceleratedHardwareReady`},
	{Flag: "state-dir=/etc", Want: `--state-dir = "/etc": want a folder of its own such as /var/lib/tandem, or nothing: /etc belongs to the operating system`},
	{Flag: "features-file=/etc/passwd", Want: `--features-file = "/etc/passwd": want a folder of its own such as /etc/kubernetes/node-feature-discovery/features.d: /etc belongs to the operating system`},
	{Flag: "hpc-job-mapping-dir=/var/run/", Want: `--hpc-job-mapping-dir = "/var/run/": want a folder of its own such as /var/run/dcgm_job_maps: /var/run belongs to the operating system`},
	// Variables.
	{Env: "NODE_NAME=Node_1", Want: `NODE_NAME = "Node_1": want the name of a Node object`},
	{Env: "DRIVER_ROOT_CTR_PATH=driver", Want: `DRIVER_ROOT_CTR_PATH = "driver": want an absolute path such as /driver-root`},
	{Env: "DEVICE_DISCOVERY_STRATEGY=tegra", Want: `DEVICE_DISCOVERY_STRATEGY = "tegra": tegra is not supported by this version: want nvml`},
	{Env: "IMEX_CHANNEL_IDS=1", Want: `IMEX_CHANNEL_IDS = "1": want 0, which is the only channel that can be given, or nothing`},
	{Env: "CDI_ANNOTATION_PREFIX=nvidia", Want: `CDI_ANNOTATION_PREFIX = "nvidia": want a DNS name and a slash, such as cdi.k8s.io/`},
	{Env: "KERNEL_LOG=kmsg", Want: `KERNEL_LOG = "kmsg": want auto, off or an absolute path such as /dev/kmsg`},
	{Env: "OVERLAP=deny", Want: `OVERLAP = "deny": want warn or refuse`},
	{Env: "SIMULATION=on", Want: `SIMULATION = "on": want true or false`},
	{Env: "DP_DISABLE_HEALTHCHECKS=48,ecc", Want: `DP_DISABLE_HEALTHCHECKS = "48,ecc": want XIDs such as 48,79, or "all"`},
	{Env: "CONFIG_FILE=/nowhere/c.yaml", Want: `configuration file: open /nowhere/c.yaml: no such file or directory`},
	{Env: "MPS_ROOT=/", Want: `MPS_ROOT = "/": want a folder of its own such as /run/nvidia/mps: / belongs to the operating system`},
	{Env: "CDI_DIR=/usr/local/lib/cdi", Want: `CDI_DIR = "/usr/local/lib/cdi": want a folder of its own such as /var/run/cdi: /usr/local/lib/cdi belongs to the operating system`},
	{Env: "KUBELET_DIR=/var/lib/../lib", Want: `KUBELET_DIR = "/var/lib/../lib": want a folder of its own such as /var/lib/kubelet: /var/lib belongs to the operating system`},
	// The plugin block of a Nomad client.
	{Block: map[string]any{"enabled": "maybe"}, Want: `enabled = "maybe": want true or false`},
	{Block: map[string]any{"ignored_gpu_ids": []any{"GPU-1", "0"}}, Want: `ignored_gpu_ids = "0": want UUIDs (GPU-... or MIG-...) as nvidia-smi -L prints them`},
	{Block: map[string]any{"fingerprint_period": "100ms"}, Want: `fingerprint_period = "100ms": want 1s or more`},
	{Block: map[string]any{"group_by": "socket"}, Want: `group_by = "socket": want none, numa or nvlink`},
	{Block: map[string]any{"injection": []any{}}, Want: `injection = "": an empty list gives a task nothing: leave the key out`},
	{Block: map[string]any{"injection": []any{"cdi", "libraries"}}, Want: `injection = "cdi,libraries": libraries belongs to devices, because NVIDIA's container runtime and CDI have the driver's files: want devices beside it`},
	{Block: map[string]any{"xids": []any{63}}, Want: `xids = "[63]": want a mapping`},
	{Block: map[string]any{"recovery_limit": 2.5}, Want: `recovery_limit = "2.5": want a number of 1 or more`},
	{Block: map[string]any{"nomad_address": "127.0.0.1:4646"}, Want: `nomad_address = "127.0.0.1:4646": want auto, off, http://HOST:PORT, https://HOST:PORT or unix:///PATH`},
	{Block: map[string]any{"policy_file": "policy.yaml"}, Want: `policy_file = "policy.yaml": want an absolute path such as /etc/tandem/policy.yaml`},
	{Block: map[string]any{"state_dir": "state"}, Want: `state_dir = "state": want an absolute path such as /var/lib/tandem, or nothing`},
	{Block: map[string]any{"mps_root": "/run"}, Want: `mps_root = "/run": want a folder of its own such as /run/nvidia/mps: /run belongs to the operating system`},
	// The file.
	{Both: true, File: "flags: {mpsRoot: /}\n", Want: `/c.yaml:1: flags.mpsRoot = "/": want a folder of its own such as /run/nvidia/mps: / belongs to the operating system`},
	{Both: true, File: "flags: {migStrategy: none\n", Want: `/c.yaml: line 1: did not find expected ',' or '}'`},
	{Both: true, File: "version: v2\n", Want: `/c.yaml:1: version = "v2": want v1`},
	{Both: true, File: "flags:\n  migStratgy: mixed\n", Want: `/c.yaml:2: flags.migStratgy = "mixed": unknown key: did you mean migStrategy?`},
	{Both: true, File: "flags:\n  migStrategy: mixed\n  migStrategy: none\n", Want: `/c.yaml:3: flags.migStrategy = "none": given twice`},
	{Both: true, File: "flags: [migStrategy]\n", Want: `/c.yaml:1: flags = "[...]": want a mapping`},
	{File: "flags: {plugin: {deviceListStrategy: [envvar, cdi]}}\n", Want: `/c.yaml:1: flags.plugin.deviceListStrategy = "envvar,cdi": cdi: want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri`},
	{File: "health: {recoveryDwell: 60}\n", Want: `/c.yaml:1: health.recoveryDwell = "60": want a positive duration such as 30s or 1m`},
	{File: "health:\n  xids: {63: warn}\n", Want: `/c.yaml:2: health.xids = "63=warn": "63=warn": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy`},
	{File: "imex: {channelIDs: [0, 1]}\n", Want: `/c.yaml:1: imex.channelIDs = "0,1": want 0, which is the only channel that can be given, or nothing`},
	{Both: true, File: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}\n", Want: `/c.yaml:1: sharing.timeSlicing.resources[0].replicas = "1": want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)`},
	{File: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n", Want: `/c.yaml:1: sharing.mps.resources[0] = "mps": takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as /run/nvidia/mps`},
	{Both: true, File: "sharing: {timeSlicing: {resources: [{name: gppu, replicas: 2}]}}\n", Want: `/c.yaml:1: sharing.timeSlicing.resources[0].name = "gppu": unknown resource: did you mean nvidia.com/gpu? (gpu, mig-<profile>, or a name from resources or policy.rules)`},
	{Both: true, File: "resources: {gpus: [{pattern: \"*\", name: amd.com/gpu}]}\n", Want: `/c.yaml:1: resources.gpus[0].name = "amd.com/gpu": want a name without a domain, or with nvidia.com/; amd.com/ is another domain`},
	{Both: true, File: "prove: {timeout: 30s}\n", Want: `/c.yaml:1: prove.command = "": want the absolute path of a program and its arguments, such as [/usr/local/bin/check-gpu, --quick]`},
	{Both: true, File: "prove: {command: [/usr/bin/true], timeout: 1h}\n", Want: `/c.yaml:1: prove.timeout = "1h": want a time from 1s to 15m0s`},
	{Both: true, File: "reset: {mode: auto}\n", Want: `/c.yaml:1: reset.mode = "auto": want off, report or act`},
	// What the API dra can't have.
	{File: "api: dra\nflags: {plugin: {deviceListStrategy: [cdi-cri, envvar]}}\n", Want: `/c.yaml:2: flags.plugin.deviceListStrategy = "cdi-cri,envvar": with api dra containers get their devices by CDI only: want cdi-cri or auto, or remove it`},
	{File: "api: dra\nflags: {plugin: {passDeviceSpecs: true}}\n", Want: `/c.yaml:2: flags.plugin.passDeviceSpecs = "true": with api dra the CDI specification has the device nodes: remove it`},
	{File: "api: dra\nflags: {plugin: {deviceIDStrategy: index}}\n", Want: `/c.yaml:2: flags.plugin.deviceIDStrategy = "index": with api dra devices are named by UUID, because a claim outlives a reboot: want uuid, or remove it`},
	{File: "api: dra\nsharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n", Want: `/c.yaml:2: sharing.timeSlicing.failRequestsGreaterThanOne = "true": with api dra a request never gets two shares of one device, and one for two shares gets them on two devices: remove it`},
	{File: "api: dra\ndra: {kubletDir: /data/kubelet}\n", Want: `/c.yaml:2: dra.kubletDir = "/data/kubelet": unknown key: did you mean kubeletDir?`},
	// The section policy, for both agents.
	{Both: true, File: "policy: {include: []}\n", Want: `/c.yaml:1: policy.include = "[...]": an empty list offers nothing: leave the key out to offer everything`},
	{Both: true, File: "policy:\n  rules:\n  - select: {index: GPU-1}\n    use: reserved\n", Want: `/c.yaml:3: policy.rules[0].select.index = "GPU-1": want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {index: 0}, use: shared}\n", Want: `/c.yaml:3: policy.rules[0].use = "shared": want exclusive, time-slicing, mps or reserved`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {index: 0}, use: time-slicing}\n", Want: `/c.yaml:3: policy.rules[0].replicas = "": want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {index: 0}, use: exclusive}\n  - {select: {index: 0}, use: reserved}\n", Want: `/c.yaml:4: policy.rules[1] = "{...}": selects 0, as does c.yaml:3: policy.rules[0].select, and the first rule that selects a device counts`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {memory: {min: 40GB}}, use: exclusive}\n", Want: `/c.yaml:3: policy.rules[0].select.memory.min = "40GB": want a size such as 512MiB or 40GiB (KiB, MiB, GiB, TiB), from 1MiB to 16TiB`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {migProfile: 1g.*}, use: mps, replicas: 2}\n", Want: `/c.yaml:3: policy.rules[0].use = "mps": MPS shares full GPUs only, and this rule selects MIG instances: want time-slicing or exclusive`},
	{Both: true, File: "policy:\n  rules:\n  - {select: {index: 0}, use: mps, replicas: 2, name: a}\n  - {select: {index: 1}, use: mps, replicas: 3, name: a}\n", Want: `/c.yaml:4: policy.rules[1].select = "nvidia.com/a": would be mps by 3, but by c.yaml:3: policy.rules[0].select it is mps by 2: want another name for one of them`},
}
