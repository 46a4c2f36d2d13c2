package config

import (
	"errors"
	"log/slog"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

const (
	// FlagConfigFile is the flag of the configuration file.
	FlagConfigFile = "config-file"

	flagFailOnInitError = "fail-on-init-error"
	flagPassDeviceSpecs = "pass-device-specs"
	flagIMEXRequired    = "imex-required"

	// The sockets of a kubelet with the default --root-dir.
	defaultKubeletSocket      = "/var/lib/kubelet/device-plugins/kubelet.sock"
	defaultPodResourcesSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"
)

// configFileVariables are those of FlagConfigFile.
var configFileVariables = []string{"CONFIG_FILE", "GFD_CONFIG_FILE"}

// KubernetesSpecs are the options of k8s-gpu. Those of NVIDIA's k8s-device-plugin are all among them, with its names and
// defaults, whether they are supported or not.
func KubernetesSpecs() []Spec { return kubernetesOptions(new(Kubernetes), nil) }

// kubernetesOptions are bound to s. checkAddress reports whether a TCP listener accepts an address.
func kubernetesOptions(s *Kubernetes, checkAddress func(string) error) []Spec {
	options := slices.Concat(nvidiaOptions(s), injectionOptions(s), ownOptions(s, checkAddress), draOptions(s), handOverOptions(&s.HandOver), nodeOptions(s), kubernetesOperations(&s.Operations), healthOptions(&s.Core, &s.Health), inertOptions())
	for i := range options {
		o := &options[i]
		if o.Env == nil && o.Flag != "" {
			o.Env = []string{variable(o.Flag)}
		}
		o.Hidden = o.set == nil && o.setItem == nil
	}
	return options
}

// variable is the environment variable of a flag, unless Spec.Env has others.
func variable(flag string) string { return strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }

// nvidiaOptions are options of NVIDIA's plugin that are supported.
func nvidiaOptions(s *Kubernetes) []Spec {
	return []Spec{
		{Flag: "mig-strategy", Env: []string{"MIG_STRATEGY", "GFD_MIG_STRATEGY"}, Key: keyMIGStrategy, Default: "none",
			Usage:   "which MIG instances are offered: none, single (as nvidia.com/gpu) or mixed (as nvidia.com/mig-<profile>)",
			Note:    "`nomad-gpu` reads the key of its policy file, too, if its block has none",
			binding: migStrategy(&s.Core.MIG)},
		{Flag: flagFailOnInitError, Env: []string{"FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"}, Key: "flags.failOnInitError", Default: "true",
			Usage:   "accepted and without effect: without a driver the agent waits for one, and reports the reason",
			binding: boolean(new(bool))},
		{Flag: "driver-root", Aliases: []string{"nvidia-driver-root"}, Env: []string{"NVIDIA_DRIVER_ROOT"}, Key: "flags.nvidiaDriverRoot", Exists: true, Default: "/",
			Usage:   "root of the driver's installation on the host",
			binding: path(&s.DriverRoot, "/")},
		{Flag: "driver-root-ctr-path", Aliases: []string{"container-driver-root"}, Env: []string{"DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"},
			Key: "flags.plugin.containerDriverRoot", Default: "/driver-root",
			Usage:   "mount point of the driver root in this container; if it does not exist, the driver root itself is used",
			binding: path(&s.ContainerRoot, "/driver-root")},
		{Flag: "dev-root", Aliases: []string{"nvidia-dev-root"}, Env: []string{"NVIDIA_DEV_ROOT"}, Key: "flags.nvidiaDevRoot", Exists: true,
			Usage:   "folder on the host that has dev/nvidia0 ...; the driver root if empty",
			binding: pathOrEmpty(&s.DevRoot, "/")},
		{Flag: flagPassDeviceSpecs, Key: "flags.plugin.passDeviceSpecs", Default: "false",
			Usage:   "give containers the device nodes in addition to the environment",
			Note:    "Those that the node has under the dev root, `rw`. Without effect if all strategies are of CDI, whose specification has them",
			binding: boolean(&s.Core.Injection.Nodes)},
		{Flag: flagListStrategy, Key: "flags.plugin.deviceListStrategy", Default: "envvar",
			Usage:   "how the devices of a container are passed: envvar, volume-mounts, cdi-annotations, cdi-cri, several of these, or auto: envvar, and cdi-cri while the CDI specification is usable",
			Note:    "An empty list is an error: containers would have no GPU",
			binding: custom(strategyType(), s.Strategies.set)},
		{Flag: flagIDStrategy, Key: "flags.plugin.deviceIDStrategy", Default: "uuid",
			Usage:   "how the devices of a container are identified: uuid or index",
			Note:    "With `index` containers' devices are named `0`, or `0:1` for a MIG instance. An index can mean another device after a reboot, and the kubelet keeps the response of a pod. Devices of claims, on GPUs that have moved to DRA, have their UUIDs in any case",
			binding: choice(&s.Core.IndexIDs, map[string]bool{"uuid": false, "index": true})},
		{Flag: "device-discovery-strategy", Key: "flags.deviceDiscoveryStrategy", Default: "auto",
			Usage: "how devices are discovered: auto or nvml, which are the same",
			binding: custom(schema.OneOf("auto", "nvml"), func(v Value) error {
				switch v.Text {
				case "auto", "nvml":
					return nil
				case "tegra":
					return errors.New("tegra is not supported by this version: want nvml")
				}
				return errors.New("want auto or nvml")
			})},
		{Flag: "shared-devices-allocation-policy",
			Key: "flags.plugin.sharedDevicesAllocationPolicy", Default: "distributed",
			Usage:   "which units of shared devices are preferred: distributed (an even load) or packed (whole devices stay free)",
			binding: choice(&s.Core.Packed, map[string]bool{"distributed": false, "packed": true})},
		{Flag: "mps-root", Key: keyMPSRoot,
			Usage:   "folder of the MPS control daemons on the host, such as " + defaultMPSRoot + "; in a container its mount point is " + mpsMount,
			Note:    "`nomad-gpu` reads the key of its policy file, too, if its block has none",
			binding: orEmpty(&s.MPSRoot, ownFolder(&s.MPSRoot, defaultMPSRoot, nil))},
		{Flag: "kubelet-socket", Default: defaultKubeletSocket, Empty: true, Exists: true,
			Usage:   "the kubelet's registration socket; empty: the agent serves, but does not register",
			binding: orEmpty(&s.KubeletSocket, inOwnFolder(&s.KubeletSocket, defaultKubeletSocket))},
	}
}

// ownOptions are options that NVIDIA's plugin does not have, and the configuration file.
func ownOptions(s *Kubernetes, checkAddress func(string) error) []Spec {
	return []Spec{
		{Flag: "pod-resources-socket", Default: defaultPodResourcesSocket, Empty: true, Exists: true,
			Usage:   "the kubelet's pod-resources API, which lists the devices of each pod; empty: it is not read",
			binding: pathOrEmpty(&s.PodResourcesSocket, defaultPodResourcesSocket)},
		{Flag: FlagConfigFile, Env: configFileVariables, Usage: "configuration file (version: " + version + ")",
			binding: custom(schema.Match("", "a path"), func(Value) error { return nil })},
		{Flag: "http-address", Default: ":9410", Empty: true, Usage: "address of the status page, /inventory, /metrics, /healthz and /readyz; empty: none",
			binding: custom(address, func(v Value) error {
				if s.Operations.HTTPAddress = v.Text; v.Text == "" || checkAddress(v.Text) == nil {
					return nil
				}
				return errors.New("want HOST:PORT such as :9410")
			})},
		{Flag: "log-level", Default: "info", Usage: "debug, info, warn or error",
			binding: logLevel(&s.LogLevel)},
		{Flag: "rescan", Default: "1m", Usage: "time between complete enumerations; an event causes one earlier",
			binding: duration(&s.Core.Rescan, 0)},
		{Flag: "exclude", Usage: "UUIDs of devices that are never offered",
			binding: binding{Type: commaList(schema.Match("", "UUIDs")), setItem: func(id string) error {
				s.Core.Exclude = append(s.Core.Exclude, gpu.DeviceID(id))
				return nil
			}}},
		{Flag: "sysfs-root", Default: "/sys", Exists: true, Usage: "mount point of the host's sysfs",
			binding: path(&s.Core.Roots.Sys, "/sys")},
		{Flag: "procfs-root", Default: "/proc", Exists: true, Usage: "mount point of the host's procfs",
			binding: path(&s.Core.Roots.Proc, "/proc")},
		{Flag: "cgroup-root", Default: "/sys/fs/cgroup", Exists: true, Usage: "mount point of the host's control groups of version 2, for limits of device memory",
			binding: path(&s.Core.Roots.Cgroup, "/sys/fs/cgroup")},
	}
}

func logLevel(field *slog.Level) binding {
	b := oneOf(new(string), "debug", "info", "warn", "error")
	return custom(b.Type, func(v Value) error {
		_ = field.UnmarshalText([]byte(v.Text))
		return b.set(v)
	})
}

// inertOptions are options of NVIDIA's programs that configure what this agent does in another way, or not at all.
func inertOptions() []Spec {
	return []Spec{
		{Key: "flags.useNodeFeatureAPI", without: "it configures NVIDIA's gpu-feature-discovery; --use-node-feature-api writes a NodeFeature object, with the rights for it"},
		{Key: "flags.gfd", binding: custom(schema.Type{Kind: schema.Opaque}, nil), without: "it configures NVIDIA's gpu-feature-discovery; in its place --features-file and --use-node-feature-api write the same node labels, when they change"},
		{Env: []string{"GFD_SLEEP_INTERVAL"}, without: "the node labels are written when they change, and not at an interval"},
		{Env: []string{"GFD_MACHINE_TYPE_FILE"}, without: "the label nvidia.com/gpu.machine is class/dmi/id/product_name below --sysfs-root"},
	}
}
