package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// option is one setting with all its spellings. Those of NVIDIA's k8s-device-plugin are all here, with
// its names and defaults, whether they are supported or not.
type option struct {
	flag    string // "" = only in the configuration file
	aliases []string
	env     []string
	key     string // in the configuration file; "" = not there
	usage   string
	value   string // the default
	kind    configfile.Kind
	blank   bool // an empty variable is a value; elsewhere it is what charts write for "not set"

	// set takes the value over. nil means that only the default is supported, or, if without is set,
	// that any value is accepted because it changes nothing without that feature.
	set     func(*settings, string) error
	without string
}

// name is the option in the configuration file, else on the command line.
func (o option) name() string { return cmp.Or(o.key, "--"+o.flag) }

// How an option is given on the command line, and in the configuration file.
const (
	word    = configfile.Scalar
	toggle  = configfile.Toggle
	list    = configfile.List    // several times, or with commas
	mapping = configfile.Mapping // the same with "key=value"; in the configuration file a mapping too
	page    = configfile.Opaque  // a mapping in the configuration file that is not looked into
)

// several reports whether an option may be given several times.
func several(k configfile.Kind) bool { return k == list || k == mapping }

// settings are everything that the agent is told.
type settings struct {
	core          core.Config
	health        healthconfig.Values // those of core among them
	kubeletSocket string

	podResourcesSocket string // "" = not read

	httpAddress    string
	logLevel       slog.Level
	driverRoot     string      // on the host
	containerRoot  string      // where the driver root is mounted in the agent's container
	devRoot        string      // on the host; "" = the driver root
	fallbackDriver bool        // the driver's library may also be where the dynamic linker finds it
	mpsRoot        string      // folder of the MPS control daemons on the host, for mounts into containers; "" = none
	mpsSeen        string      // the same folder where this process sees it; "" = none
	shape          core.Policy // core.Policy without the lines of the file
	notes          []string
	warnings       []string          // of fields of the configuration file that NVIDIA's plugin ignores
	file           string            // text of the configuration file; "" = there is none
	said           map[string]string // what each option that means something was set to, by name
}

// options is the table of all settings.
func options() []option {
	return slices.Concat(supported(), healthOptions(), refused(), inert())
}

func supported() []option {
	return []option{
		{flag: "mig-strategy", env: []string{"MIG_STRATEGY"}, key: "flags.migStrategy", value: "none",
			usage: "which MIG instances are offered: none, single (as nvidia.com/gpu) or mixed (as nvidia.com/mig-<profile>)",
			set: func(s *settings, v string) error {
				s.core.MIG = core.MIGStrategy(v)
				return among(v, "none", "single", "mixed")
			}},
		{flag: "fail-on-init-error", env: []string{"FAIL_ON_INIT_ERROR"}, key: "flags.failOnInitError", value: "true", kind: toggle,
			usage: "accepted and without effect: without a driver the agent waits for one, ready and with a reason",
			set:   func(_ *settings, v string) error { _, err := truth(v); return err }},
		{flag: "driver-root", aliases: []string{"nvidia-driver-root"}, env: []string{"NVIDIA_DRIVER_ROOT"}, key: "flags.nvidiaDriverRoot", value: "/",
			usage: "root of the driver's installation on the host",
			set:   func(s *settings, v string) error { s.driverRoot = v; return absolute(v) }},
		{flag: "driver-root-ctr-path", aliases: []string{"container-driver-root"}, env: []string{"DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"},
			key: "flags.plugin.containerDriverRoot", value: "/driver-root",
			usage: "where the driver root is mounted in this container; without such a folder the driver root itself is used",
			set:   func(s *settings, v string) error { s.containerRoot = v; return absolute(v) }},
		{flag: "dev-root", aliases: []string{"nvidia-dev-root"}, env: []string{"NVIDIA_DEV_ROOT"}, key: "flags.nvidiaDevRoot",
			usage: "folder on the host that holds dev/nvidia0 ...; the driver root if empty",
			set: func(s *settings, v string) error {
				if s.devRoot = v; v == "" {
					return nil
				}
				return absolute(v)
			}},
		{flag: "pass-device-specs", env: []string{"PASS_DEVICE_SPECS"}, key: "flags.plugin.passDeviceSpecs", value: "false", kind: toggle,
			usage: "give containers the device nodes beside the environment",
			set:   func(s *settings, v string) (err error) { s.core.DeviceNodes, err = truth(v); return err }},
		{flag: "device-list-strategy", env: []string{"DEVICE_LIST_STRATEGY"}, key: "flags.plugin.deviceListStrategy", value: "envvar", kind: list,
			usage: "how a container is told its devices: envvar",
			set: func(_ *settings, v string) error {
				return each(v, "envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
			}},
		{flag: "device-id-strategy", env: []string{"DEVICE_ID_STRATEGY"}, key: "flags.plugin.deviceIDStrategy", value: "uuid",
			usage: "how a container's devices are named: uuid",
			set:   func(_ *settings, v string) error { return each(v, "uuid", "index") }},
		{flag: "device-discovery-strategy", env: []string{"DEVICE_DISCOVERY_STRATEGY"}, key: "flags.deviceDiscoveryStrategy", value: "auto",
			usage: "where devices are looked for: auto or nvml, which are the same",
			set: func(_ *settings, v string) error {
				if v == "auto" {
					return nil
				}
				return each(v, "nvml", "tegra")
			}},
		{flag: "shared-devices-allocation-policy", env: []string{"SHARED_DEVICES_ALLOCATION_POLICY"},
			key: "flags.plugin.sharedDevicesAllocationPolicy", value: "distributed",
			usage: "which units of shared devices are preferred: distributed (an even load) or packed (whole devices stay free)",
			set: func(s *settings, v string) error {
				s.core.Packed = v == "packed"
				return among(v, "distributed", "packed")
			}},
		{flag: "mps-root", env: []string{"MPS_ROOT"}, key: "flags.mpsRoot",
			usage: "folder of the MPS control daemons on the host, such as /run/nvidia/mps; in a container it is looked for at " + mpsMount,
			set: func(s *settings, v string) error {
				if s.mpsRoot = v; v == "" {
					return nil
				}
				return absolute(v)
			}},
		{flag: "kubelet-socket", env: []string{"KUBELET_SOCKET"}, value: v1beta1.KubeletSocket, blank: true,
			usage: "the kubelet's registration socket; empty: serve, but register nowhere",
			set: func(s *settings, v string) error {
				if s.kubeletSocket = v; v == "" {
					return nil
				}
				return absolute(v)
			}},
		{flag: "pod-resources-socket", env: []string{"POD_RESOURCES_SOCKET"}, value: podresources.DefaultSocket, blank: true,
			usage: "the kubelet's pod-resources API, which says which pods hold which devices; empty: not read",
			set: func(s *settings, v string) error {
				if s.podResourcesSocket = v; v == "" {
					return nil
				}
				return absolute(v)
			}},
		{flag: configFlag, env: []string{configEnv}, usage: "configuration file (version: v1)", set: func(*settings, string) error { return nil }},
		{flag: "http-address", env: []string{"HTTP_ADDRESS"}, value: ":9410", blank: true, usage: "address of /healthz, /readyz and /metrics; empty: none",
			set: func(s *settings, v string) error {
				if s.httpAddress = v; v == "" {
					return nil
				}
				return address(v)
			}},
		{flag: "log-level", env: []string{"LOG_LEVEL"}, value: "info", usage: "debug, info, warn or error",
			set: func(s *settings, v string) error {
				_ = s.logLevel.UnmarshalText([]byte(v))
				return among(v, "debug", "info", "warn", "error")
			}},
		{flag: "rescan", env: []string{"RESCAN"}, value: "1m", usage: "time between full readings of the machine; events bring one forward",
			set: func(s *settings, v string) (err error) { s.core.Rescan, err = duration(v); return err }},
		{flag: "exclude", env: []string{"EXCLUDE"}, kind: list, usage: "UUIDs of devices that are never offered",
			set: func(s *settings, v string) error {
				for id := range split(v) {
					s.core.Exclude = append(s.core.Exclude, core.DeviceID(id))
				}
				return nil
			}},
		{flag: "sysfs-root", env: []string{"SYSFS_ROOT"}, value: "/sys", usage: "where the host's sysfs is mounted",
			set: func(s *settings, v string) error { s.core.Roots.Sys = v; return absolute(v) }},
		{flag: "procfs-root", env: []string{"PROCFS_ROOT"}, value: "/proc", usage: "where the host's procfs is mounted",
			set: func(s *settings, v string) error { s.core.Roots.Proc = v; return absolute(v) }},
	}
}

// refused are the settings of NVIDIA's plugin that would change what a container gets.
func refused() []option {
	return []option{
		{flag: "gdrcopy-enabled", env: []string{"GDRCOPY_ENABLED"}, key: "flags.gdrcopyEnabled", value: "false", kind: toggle},
		{flag: "gds-enabled", env: []string{"GDS_ENABLED"}, key: "flags.gdsEnabled", value: "false", kind: toggle},
		{flag: "mofed-enabled", env: []string{"MOFED_ENABLED"}, key: "flags.mofedEnabled", value: "false", kind: toggle},
		{flag: "imex-channel-ids", env: []string{"IMEX_CHANNEL_IDS"}, key: "imex.channelIDs", kind: list},
		{flag: "imex-required", env: []string{"IMEX_REQUIRED"}, key: "imex.required", value: "false", kind: toggle},
	}
}

// inert are the settings of NVIDIA's plugin and its charts that matter only together with one that is
// refused, or to another program that reads the same file.
func inert() []option {
	const cdi, features = "CDI", "GPU feature discovery"
	return []option{
		{flag: "cdi-annotation-prefix", env: []string{"CDI_ANNOTATION_PREFIX"}, key: "flags.plugin.cdiAnnotationPrefix", value: "cdi.k8s.io/", without: cdi},
		{flag: "nvidia-cdi-hook-path", aliases: []string{"nvidia-ctk-path"}, env: []string{"NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"},
			key: "flags.plugin.nvidiaCTKPath", value: "/usr/bin/nvidia-ctk", without: cdi},
		{flag: "cdi-feature-flags", env: []string{"CDI_FEATURE_FLAGS"}, kind: list, without: cdi},
		{flag: "cdi-disable-hooks", env: []string{"CDI_DISABLE_HOOKS"}, kind: list, without: cdi},
		{key: "flags.useNodeFeatureAPI", without: features},
		{key: "flags.gfd", kind: page, without: features},
	}
}

// among accepts one of the values.
func among(v string, values ...string) error {
	if slices.Contains(values, v) {
		return nil
	}
	last := len(values) - 1
	return fmt.Errorf("want %s or %s", strings.Join(values[:last], ", "), values[last])
}

// each accepts a list of the one supported value; the others are known.
func each(v, supported string, known ...string) error {
	if v == "" {
		return fmt.Errorf("want %s", supported)
	}
	for item := range split(v) {
		switch {
		case item == supported:
		case slices.Contains(known, item):
			return fmt.Errorf("%s is not supported by this version: want %s", item, supported)
		default:
			return fmt.Errorf("want %s", supported)
		}
	}
	return nil
}

// split yields the items of a list with commas.
func split(v string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for item := range strings.SplitSeq(v, ",") {
			if item = strings.TrimSpace(item); item != "" && !yield(item) {
				return
			}
		}
	}
}

func address(v string) error {
	_, port, err := net.SplitHostPort(v)
	if err == nil {
		_, err = net.DefaultResolver.LookupPort(context.Background(), "tcp", port) // a name of /etc/services, too
	}
	if err != nil {
		return errors.New("want HOST:PORT such as :9410")
	}
	return nil
}

func absolute(path string) error {
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("want an absolute path")
	}
	return nil
}

func truth(v string) (bool, error) {
	b, err := strconv.ParseBool(v)
	if err != nil {
		return false, fmt.Errorf("want true or false")
	}
	return b, nil
}

func duration(v string) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("want a positive duration such as 30s")
	}
	return d, nil
}
