package config

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestPrecedence(t *testing.T) {
	file := "version: v1\nflags:\n  migStrategy: single\n"
	env := map[string]string{"MIG_STRATEGY": "mixed"}
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		file string
		want inventory.MIGStrategy
	}{
		"default":           {want: inventory.MIGNone},
		"file":              {file: file, want: inventory.MIGSingle},
		"environment":       {file: file, env: env, want: inventory.MIGMixed},
		"flag":              {file: file, env: env, args: []string{"--mig-strategy=none"}, want: inventory.MIGNone},
		"empty environment": {file: file, env: map[string]string{"MIG_STRATEGY": ""}, want: inventory.MIGSingle},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolveAll(t, c.args, c.env, c.file)
			if err != nil || s.Core.MIG != c.want {
				t.Errorf("%v, %v; want %s", s.Core.MIG, err, c.want)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	s, err := resolveAll(t, []string{"--driver-root-ctr-path=/nowhere"}, nil, "")
	check.NoError(t, err)
	want := core.DefaultConfig()
	want.Injection.Name, want.API = "envvar", inventory.DevicePlugin
	want.Roots = core.Roots{Driver: "/", Dev: "/", Sys: "/sys", Proc: "/proc", Cgroup: "/sys/fs/cgroup"}
	if diff := cmp.Diff(want, s.Core, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
	if s.KubeletSocket != "/var/lib/kubelet/device-plugins/kubelet.sock" || s.Operations.HTTPAddress != ":9410" || len(s.Notes) != 0 {
		t.Errorf("%+v", s)
	}
}

// The environment that NVIDIA's Helm chart sets, and its example file, are taken as they are.
func TestIncumbentsConfigurationIsAccepted(t *testing.T) {
	s, err := resolveAll(t, nil, map[string]string{
		"MPS_ROOT": "/run/nvidia/mps", "NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
		"MIG_STRATEGY": "mixed", "FAIL_ON_INIT_ERROR": "true", "DEVICE_LIST_STRATEGY": "envvar", "DEVICE_ID_STRATEGY": "uuid",
		"NVIDIA_DRIVER_ROOT": "/", "GDS_ENABLED": "false", "IMEX_CHANNEL_IDS": "", "DEVICE_DISCOVERY_STRATEGY": "auto",
		"PASS_DEVICE_SPECS": "true", "SHARED_DEVICES_ALLOCATION_POLICY": "distributed", "RESCAN": "90s",
	}, `
version: v1
flags:
  migStrategy: none
  failOnInitError: true
  nvidiaDriverRoot: /
  useNodeFeatureAPI: true
  plugin:
    passDeviceSpecs: false
    deviceListStrategy: [envvar]
    deviceIDStrategy: uuid
    cdiAnnotationPrefix: cdi.k8s.io/
    containerDriverRoot: /driver-root
  gfd: {oneshot: false, sleepInterval: 60s}
sharing: {timeSlicing: {renameByDefault: false, resources: []}}
imex: {channelIDs: [], required: false}
`)
	check.NoError(t, err)
	if s.Core.MIG != inventory.MIGMixed || !s.Core.Injection.Nodes || s.Core.Rescan != 90*time.Second {
		t.Errorf("%+v", s)
	}
	// A value without effect is reported, unless it is the default.
	want := []string{
		"FAIL_ON_INIT_ERROR has no effect: without a driver this agent waits for one",
		"c.yaml:7: flags.useNodeFeatureAPI has no effect: it configures NVIDIA's gpu-feature-discovery; --use-node-feature-api writes a NodeFeature object, with the rights for it",
		"c.yaml:14: flags.gfd has no effect: it configures NVIDIA's gpu-feature-discovery; in its place --features-file and --use-node-feature-api write the same node labels, when they change",
	}
	if diff := cmp.Diff(want, withoutFolder(s.Notes)); diff != "" {
		t.Error(diff)
	}
}

// The variables of gpu-feature-discovery mean the same here, less than those of the agent itself where both are set, and those that have no effect are
// named.
func TestVariablesOfFeatureDiscovery(t *testing.T) {
	env := map[string]string{
		"GFD_MIG_STRATEGY": "mixed", "GFD_OUTPUT_FILE": "/etc/kubernetes/node-feature-discovery/features.d/gfd", "GFD_NO_TIMESTAMP": "true",
		"GFD_USE_NODE_FEATURE_API": "true", "NODE_NAME": "n1", "NAMESPACE": "gpus", "GFD_FAIL_ON_INIT_ERROR": "true",
		"GFD_SLEEP_INTERVAL": "60s", "GFD_MACHINE_TYPE_FILE": "/sys/class/dmi/id/product_name",
	}
	s, err := resolveAll(t, nil, env, "")
	check.NoError(t, err)
	if o := s.Operations; s.Core.MIG != inventory.MIGMixed || o.FeaturesFile != env["GFD_OUTPUT_FILE"] || !o.NoTimestamp || !o.NodeFeatureAPI {
		t.Errorf("%v, %+v", s.Core.MIG, o)
	}
	want := []string{
		"GFD_FAIL_ON_INIT_ERROR has no effect: without a driver this agent waits for one",
		"GFD_SLEEP_INTERVAL has no effect: the node labels are written when they change, and not at an interval",
		"GFD_MACHINE_TYPE_FILE has no effect: the label nvidia.com/gpu.machine is class/dmi/id/product_name below --sysfs-root",
	}
	if diff := cmp.Diff(want, withoutFolder(s.Notes)); diff != "" {
		t.Error(diff)
	}
	if s, err := resolveAll(t, nil, map[string]string{"GFD_MIG_STRATEGY": "mixed", "MIG_STRATEGY": "none"}, ""); err != nil || s.Core.MIG != inventory.MIGNone {
		t.Errorf("both: %v, %v", s.Core.MIG, err)
	}
	flags, file := NewFlags(KubernetesSpecs()), "version: v1\nflags: {migStrategy: single}\n"
	s, err = ReadKubernetes(flags, Environment{
		LookupEnv: func(name string) (string, bool) {
			path, set := map[string]string{"GFD_CONFIG_FILE": "/c.yaml"}[name]
			return path, set
		},
		CheckAddress: func(string) error { return nil }, ReadFile: func(string) ([]byte, error) { return []byte(file), nil },
	})
	if err != nil || s.Core.MIG != inventory.MIGSingle {
		t.Errorf("GFD_CONFIG_FILE: %v, %v", s.Core.MIG, err)
	}
}

// What this version does not support is refused by name, together with all other problems.
func TestEveryProblemIsNamed(t *testing.T) {
	_, err := resolveAll(t,
		[]string{"--device-id-strategy=number", "--rescan=0s", "--gdrcopy-enabled=on", "--xids=63", "--cdi-disable-hooks=chmod,chmd"},
		map[string]string{"DEVICE_LIST_STRATEGY": "envvar,cdi-cry", "PASS_DEVICE_SPECS": "yes", "CDI_FEATURE_FLAGS": "disable-sandbox",
			"CDI_ANNOTATION_PREFIX": "nvidia.cdi.k8s.io", "CDI_DIR": "run/cdi", "IMEX_CHANNEL_IDS": "0,1", "DEVICE_DISCOVERY_STRATEGY": "tegra",
			"DP_ENABLE_HEALTHCHECKS": "48,x", "KUBELET_SOCKET": "kubelet.sock", "RECOVERY": "never"},
		`version: v2
flags:
  migStrategy: [single]
  plugin:
    pasDeviceSpecs: true
    pasDeviceSpecs: true
    deviceListStrategy: {a: b}
sharing:
  timeSlicing:
    resources: [{name: nvidia.com/gpu, replicas: 1}]
imex: none
shearing: {}
health: {callDeadline: soon, halthMode: off}
`)
	sameProblems(t, err, `c.yaml:1: version = "v2": want v1
c.yaml:3: flags.migStrategy = "[...]": want a single value
c.yaml:5: flags.plugin.pasDeviceSpecs = "true": unknown key: did you mean passDeviceSpecs?
c.yaml:6: flags.plugin.pasDeviceSpecs = "true": given twice
c.yaml:7: flags.plugin.deviceListStrategy = "{...}": want a list
c.yaml:10: sharing.timeSlicing.resources[0].replicas = "1": want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)
c.yaml:11: imex = "none": want a mapping with channelIDs or required
c.yaml:12: shearing = "{...}": unknown key: did you mean sharing?
c.yaml:13: health.halthMode = "off": unknown key: did you mean healthMode?
PASS_DEVICE_SPECS = "yes": want true or false
DEVICE_LIST_STRATEGY = "envvar,cdi-cry": cdi-cry: want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri
--device-id-strategy = "number": want index or uuid
DEVICE_DISCOVERY_STRATEGY = "tegra": tegra is not supported by this version: want nvml
KUBELET_SOCKET = "kubelet.sock": want an absolute path such as /var/lib/kubelet/device-plugins/kubelet.sock
CDI_ANNOTATION_PREFIX = "nvidia.cdi.k8s.io": want a DNS name and a slash, such as cdi.k8s.io/
CDI_FEATURE_FLAGS = "disable-sandbox": want disable-ipc-discoverer, disable-multiple-csv-devices, disable-nvsandboxutils, enable-coherent-annotations, enable-explicit-driver-libraries or no-additional-gids-for-device-nodes
--cdi-disable-hooks = "chmd": want all, apply-cuda-memory-limits, chmod, create-symlinks, disable-device-node-modification, enable-cuda-compat, update-application-profile or update-ldcache
CDI_DIR = "run/cdi": want an absolute path such as /var/run/cdi
--gdrcopy-enabled = "on": want true or false
IMEX_CHANNEL_IDS = "0,1": want 0, which is the only channel that can be given, or nothing
--rescan = "0s": want a positive duration such as 30s or 1m
--xids = "63": "63": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy
c.yaml:13: health.callDeadline = "soon": want a positive duration such as 30s or 1m
RECOVERY = "never": want auto or manual
DP_ENABLE_HEALTHCHECKS = "48,x": want XIDs such as 48,79, or "all"`)
}

func TestConfigFileForms(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		want string // of the error
		mig  inventory.MIGStrategy
	}{
		"empty":          {file: " ", mig: inventory.MIGNone},
		"null sections":  {file: "flags:\nsharing:\n", mig: inventory.MIGNone},
		"JSON":           {file: `{"version": "v1", "flags": {"migStrategy": "mixed"}}`, mig: inventory.MIGMixed},
		"anchors":        {file: "flags: &f\n  migStrategy: &m single\n", mig: inventory.MIGSingle},
		"no mapping":     {file: "flags", want: "c.yaml:1: want a mapping"},
		"list of lists":  {file: "imex: {channelIDs: [[0]]}", want: `c.yaml:1: imex.channelIDs[0] = "[...]": want a single value`},
		"IMEX channel 1": {file: "imex: {channelIDs: [1]}", want: `c.yaml:1: imex.channelIDs = "1": want 0, which is the only channel that can be given, or nothing`},
		"no strategy":    {file: "flags: {plugin: {deviceListStrategy: []}}", want: `c.yaml:1: flags.plugin.deviceListStrategy = "": want auto, or a list of envvar, volume-mounts, cdi-annotations or cdi-cri`},
		"auto and more":  {file: "flags: {plugin: {deviceListStrategy: [auto, cdi-cri]}}", want: `c.yaml:1: flags.plugin.deviceListStrategy = "auto,cdi-cri": auto can't be combined: want auto alone, or a list without it`},
		"syntax":         {file: "flags: {", want: "c.yaml: line 1: did not find expected node content"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolveAll(t, nil, nil, c.file)
			if text := errorText(err); text != c.want {
				t.Errorf("error %q, want %q", text, c.want)
			}
			if err == nil && s.Core.MIG != c.mig {
				t.Errorf("%q, want %q", s.Core.MIG, c.mig)
			}
		})
	}
}

func TestWhatMayBeEmpty(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
	}{
		{args: []string{"--kubelet-socket=", "--http-address=", "--state-dir="}},
		{env: map[string]string{"KUBELET_SOCKET": "", "HTTP_ADDRESS": "", "STATE_DIR": ""}},
	} {
		if s, err := resolveAll(t, c.args, c.env, ""); err != nil || s.KubeletSocket+s.Operations.HTTPAddress+s.Health.StateDir != "" {
			t.Errorf("%+v: %+v, %v", c, s, err)
		}
	}
}

// A list or mapping may be given several times; a variable does not add to it.
func TestListsAddUp(t *testing.T) {
	s, err := resolveAll(t, []string{"--exclude=GPU-a, GPU-b", "--exclude=GPU-c", "--xids=63=ignore", "--xids=64=unhealthy"},
		map[string]string{"XIDS": "79=ignore", "EXCLUDE": "GPU-d"}, "")
	want := core.DefaultConfig()
	want.Exclude, want.Health.XIDs = []gpu.DeviceID{"GPU-a", "GPU-b", "GPU-c"}, map[uint64]xid.Effect{63: xid.None, 64: xid.Withdraws}
	if diff := cmp.Diff(want.Exclude, s.Core.Exclude) + cmp.Diff(want.Health, s.Core.Health); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

func TestRoots(t *testing.T) {
	for name, c := range map[string]struct {
		s            Kubernetes
		folders      []string
		driver, dev  string // for this process
		host         string // the path on the host
		mayBeOutside bool
		mps          string // MPSMount: NVIDIA's chart mounts the folder of the MPS daemons at another path than that of the host
	}{
		"on the host": {Kubernetes{DriverRoot: "/", ContainerRoot: "/driver-root"},
			[]string{"/dev"}, "/", "/", "/", false, ""},
		"in a container": {Kubernetes{DriverRoot: "/", ContainerRoot: "/driver-root"},
			[]string{"/driver-root", "/driver-root/dev", "/dev"}, "/driver-root", "/driver-root", "/", true, ""},
		"driver container": {Kubernetes{DriverRoot: "/run/nvidia/driver", ContainerRoot: "/driver-root"},
			[]string{"/driver-root", "/driver-root/dev"}, "/driver-root", "/driver-root", "/run/nvidia/driver", true, ""},
		"driver container without nodes": {Kubernetes{DriverRoot: "/run/nvidia/driver", ContainerRoot: "/driver-root", DevRoot: "/"},
			[]string{"/driver-root", "/dev"}, "/driver-root", "/", "/", true, ""},
		"driver root without nodes": {Kubernetes{DriverRoot: "/opt/nvidia"},
			[]string{"/opt/nvidia", "/dev"}, "/opt/nvidia", "", "/opt/nvidia", false, ""},
		"without a folder for MPS": {Kubernetes{DriverRoot: "/"}, []string{"/mps"}, "/", "", "/", false, ""},
		"MPS on the host":          {Kubernetes{DriverRoot: "/", MPSRoot: "/run/nvidia/mps"}, nil, "/", "", "/", false, "/run/nvidia/mps"},
		"MPS in a container":       {Kubernetes{DriverRoot: "/", MPSRoot: "/run/nvidia/mps"}, []string{"/mps"}, "/", "", "/", false, "/mps"},
	} {
		t.Run(name, func(t *testing.T) {
			mpsRoot := c.s.MPSRoot
			c.s.findRoots(func(path string) bool { return slices.Contains(c.folders, path) })
			got := []string{c.s.Core.Roots.Driver, c.s.Core.Roots.Dev, c.s.DevRoot, c.s.MPSMount, c.s.MPSRoot}
			if want := []string{c.driver, c.dev, c.host, c.mps, mpsRoot}; !slices.Equal(got, want) || c.s.FallbackDriver != c.mayBeOutside {
				t.Errorf("%v %v, want %v %v", got, c.s.FallbackDriver, want, c.mayBeOutside)
			}
		})
	}
}

// Names and defaults of NVIDIA's k8s-device-plugin 0.20.0, as its users have them in their DaemonSets.
func TestIncumbentsNames(t *testing.T) {
	var got []string
	for _, o := range KubernetesSpecs() {
		ours := []string{"http-address", "log-level", "rescan", "exclude", "sysfs-root", "procfs-root", "cgroup-root", "pod-resources-socket", "cdi-dir", "cri-socket", "hpc-job-mapping-dir", "features-file", "log-format", "api", "node-name", "kubelet-dir", "on-unhealthy", "evictions-per-hour",
			// of NVIDIA's config-manager and gpu-feature-discovery
			"config-file-srcdir", "node-label", "default-config", "fallback-strategies", "pause-label", "use-node-feature-api", "namespace", "pod-name", "no-timestamp", "oneshot"}
		if o.Flag != "" && !slices.Contains(ours, o.Flag) && !strings.HasPrefix(o.Key, "health.") && !strings.HasPrefix(o.Flag, "kube-") && !strings.HasPrefix(o.Flag, "hand-over") {
			got = append(got, strings.Join(slices.Concat([]string{o.Flag}, o.Aliases, o.Env, []string{o.Default, o.Key}), " "))
		}
	}
	slices.Sort(got)
	want := strings.Split(strings.TrimSpace(`
cdi-annotation-prefix CDI_ANNOTATION_PREFIX cdi.k8s.io/ flags.plugin.cdiAnnotationPrefix
cdi-disable-hooks CDI_DISABLE_HOOKS  
cdi-feature-flags CDI_FEATURE_FLAGS  
config-file CONFIG_FILE GFD_CONFIG_FILE  
dev-root nvidia-dev-root NVIDIA_DEV_ROOT  flags.nvidiaDevRoot
device-discovery-strategy DEVICE_DISCOVERY_STRATEGY auto flags.deviceDiscoveryStrategy
device-id-strategy DEVICE_ID_STRATEGY uuid flags.plugin.deviceIDStrategy
device-list-strategy DEVICE_LIST_STRATEGY envvar flags.plugin.deviceListStrategy
driver-root nvidia-driver-root NVIDIA_DRIVER_ROOT / flags.nvidiaDriverRoot
driver-root-ctr-path container-driver-root DRIVER_ROOT_CTR_PATH CONTAINER_DRIVER_ROOT /driver-root flags.plugin.containerDriverRoot
fail-on-init-error FAIL_ON_INIT_ERROR GFD_FAIL_ON_INIT_ERROR true flags.failOnInitError
gdrcopy-enabled GDRCOPY_ENABLED false flags.gdrcopyEnabled
gds-enabled GDS_ENABLED false flags.gdsEnabled
imex-channel-ids IMEX_CHANNEL_IDS  imex.channelIDs
imex-required IMEX_REQUIRED false imex.required
kubelet-socket KUBELET_SOCKET /var/lib/kubelet/device-plugins/kubelet.sock 
mig-strategy MIG_STRATEGY GFD_MIG_STRATEGY none flags.migStrategy
mofed-enabled MOFED_ENABLED false flags.mofedEnabled
mps-root MPS_ROOT  flags.mpsRoot
nvidia-cdi-hook-path nvidia-ctk-path NVIDIA_CDI_HOOK_PATH NVIDIA_CTK_PATH /usr/bin/nvidia-ctk flags.plugin.nvidiaCTKPath
pass-device-specs PASS_DEVICE_SPECS false flags.plugin.passDeviceSpecs
shared-devices-allocation-policy SHARED_DEVICES_ALLOCATION_POLICY distributed flags.plugin.sharedDevicesAllocationPolicy
`), "\n")
	want[len(want)-1] = strings.TrimRight(want[len(want)-1], "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A limit that is required can't hold with device list strategies that have no CDI device, and validate reports it.
func TestRequiredLimitNeedsCDINames(t *testing.T) {
	file := "memoryLimits: {experimental: true}\npolicy: {rules: [{select: {index: 0}, use: time-slicing, replicas: 2, limit: required}]}\n"
	for flags, want := range map[string]bool{
		"deviceListStrategy: [envvar]": true, "deviceListStrategy: [volume-mounts]": true, "deviceListStrategy: [envvar, cdi-cri]": false, "deviceListStrategy: auto": false,
	} {
		f := mustParse(t, file+"flags: {plugin: {"+flags+"}}\n")
		s, err := resolve(NewFlags(KubernetesSpecs()), environment(nil), f)
		check.NoError(t, err)
		if reported := strings.Contains(strings.Join(s.Summary(), "\n"), "limit required takes no work of device plugins"); reported != want {
			t.Errorf("%s: %q", flags, s.Summary())
		}
	}
}
