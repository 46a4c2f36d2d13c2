package config

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Strategies are those of --device-list-strategy: how a container's devices are passed to its runtime.
type Strategies struct {
	Auto           bool // EnvVar, and CDICRI while the CDI specification is usable; no other field is set then
	EnvVar         bool // NVIDIA_VISIBLE_DEVICES
	VolumeMounts   bool // mounts that NVIDIA's container runtime takes for a list of devices
	CDIAnnotations bool // CDI names in an annotation of the container
	CDICRI         bool // CDI names in the field of the container runtime interface
}

// byName are the strategies that can be combined.
func (s *Strategies) byName() map[string]*bool {
	return map[string]*bool{
		"envvar": &s.EnvVar, "volume-mounts": &s.VolumeMounts, "cdi-annotations": &s.CDIAnnotations, "cdi-cri": &s.CDICRI,
	}
}

// strategyNames are the strategies that can be combined, in the order of NVIDIA's documentation.
var strategyNames = []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri"}

// strategyType is the type of --device-list-strategy.
func strategyType() schema.Type {
	list := commaList(schema.OneOf(strategyNames...))
	list.Min = 1
	auto := commaList(schema.OneOf("auto"))
	auto.Min, auto.Max = 1, 1
	return schema.Type{Kind: schema.List, Or: []schema.Type{schema.OneOf("auto"), list, auto}, Words: "`auto`, or " + list.String()}
}

// set is the setter. Without a strategy a container would have no GPU, so an empty list is an error.
func (s *Strategies) set(v Value) error {
	*s = Strategies{}
	items := v.items()
	for _, item := range items {
		field := s.byName()[item]
		switch {
		case item == "auto" && len(items) == 1:
			s.Auto = true
		case item == "auto":
			return errors.New("auto can't be combined: want auto alone, or a list without it")
		case field == nil:
			return fmt.Errorf("%s: want auto, or a list of %s", item, document.Choice(strategyNames))
		default:
			*field = true
		}
	}
	if len(items) == 0 {
		return errors.New("want auto, or a list of " + document.Choice(strategyNames))
	}
	return nil
}

// String lists the strategies as on the command line.
func (s Strategies) String() string {
	if s.Auto {
		return "auto"
	}
	var names []string
	for _, name := range strategyNames {
		if *s.byName()[name] {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// injection is what the strategies mean for the core. As with NVIDIA's plugin, containers get device nodes only beside a strategy
// for NVIDIA's container runtime: a CDI specification has them.
func (s Strategies) injection(nodes bool) inventory.Injection {
	i := inventory.Injection{Name: s.String(), Runtime: s.Auto || s.EnvVar || s.VolumeMounts}
	i.Nodes = nodes && i.Runtime
	switch {
	case s.Auto:
		i.CDI = inventory.CDIAuto
	case s.CDIAnnotations || s.CDICRI:
		i.CDI = inventory.CDIRequired
	}
	return i
}

// CDI are the settings of the CDI specifications, and of what containers get beside their devices.
type CDI struct {
	Folder        string   // of the specifications: the same path on the host and in the agent's container
	HookPath      string   // of NVIDIA's CDI hook program on the host
	DisabledHooks []string // names of CDIHooks
	FeatureFlags  []string // names of CDIFeatureFlags
	CRISocket     string   // of the container runtime, for its name and version; "" = it is not asked

	GDS, MOFED, GDRCopy bool
	IMEXChannels        []int // nil or [0]
}

// The defaults are those of package cdi, which this package does not link: TestDefaultsOfCDI compares them.
const (
	defaultCDIDir  = "/var/run/cdi"
	defaultCDIHook = "/usr/bin/nvidia-ctk"
)

// CDIHooks are the names of hooks in specifications of nvidia-container-toolkit 1.20.1 (internal/discover/hooks.go); "all" is all of
// them.
var CDIHooks = []string{
	"all", "apply-cuda-memory-limits", "chmod", "create-symlinks", "disable-device-node-modification", "enable-cuda-compat",
	"update-application-profile", "update-ldcache",
}

// CDIFeatureFlags are those of nvidia-container-toolkit 1.20.1 (pkg/nvcdi/api.go).
var CDIFeatureFlags = []string{
	"disable-ipc-discoverer", "disable-multiple-csv-devices", "disable-nvsandboxutils", "enable-coherent-annotations",
	"enable-explicit-driver-libraries", "no-additional-gids-for-device-nodes",
}

// injectionOptions are options of NVIDIA's plugin and of this agent for CDI, and for what containers get beside GPUs.
func injectionOptions(s *Kubernetes) []Spec {
	return []Spec{
		{Flag: "cdi-annotation-prefix", Key: "flags.plugin.cdiAnnotationPrefix", Default: defaultAnnotationPrefix,
			Usage:   "prefix of the annotations of cdi-annotations",
			Note:    "With another one, such as `nvidia.cdi.k8s.io/`, NVIDIA's container runtime reads the annotation and the engine does not",
			binding: annotationPrefix(&s.AnnotationPrefix)},
		{Flag: "nvidia-cdi-hook-path", Aliases: []string{"nvidia-ctk-path"}, Env: []string{"NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"},
			Key: "flags.plugin.nvidiaCTKPath", Default: defaultCDIHook,
			Usage:   "nvidia-ctk or nvidia-cdi-hook on the host, which container runtimes call for a CDI specification",
			Note:    "The engine runs it for each container that gets a GPU by CDI",
			binding: path(&s.CDI.HookPath, defaultCDIHook)},
		{Flag: "cdi-feature-flags", Usage: "feature flags of NVIDIA's CDI library",
			binding: known(&s.CDI.FeatureFlags, CDIFeatureFlags)},
		{Flag: "cdi-disable-hooks", Usage: "hooks that the CDI specification does not have, or all",
			binding: known(&s.CDI.DisabledHooks, CDIHooks)},
		{Flag: "cdi-dir", Default: defaultCDIDir, Usage: "folder of the CDI specifications, on the host and here",
			Note:    "The same path on the host and in the agent's container. Use one of the engine's `cdi_spec_dirs` that is emptied at boot",
			binding: ownFolder(&s.CDI.Folder, defaultCDIDir, nil)},
		{Flag: "cri-socket", Usage: "socket of the container runtime, which is asked for its version and CDI settings; empty: it is not asked",
			Note:    "The agent asks for a second at most. `auto` is `envvar` if the runtime does not read the specifications, with the setting to change in the reason; with a listed strategy of CDI that is a warning. The socket controls the node: no manifest mounts it",
			binding: pathOrEmpty(&s.CDI.CRISocket, "/run/containerd/containerd.sock")},
		{Flag: "gdrcopy-enabled", Key: "flags.gdrcopyEnabled", Default: "false", Usage: "give containers GDRCopy",
			Note:    "The variable `NVIDIA_GDRCOPY` for NVIDIA's container runtime, and its CDI devices if the node has them",
			binding: boolean(&s.CDI.GDRCopy)},
		{Flag: "gds-enabled", Key: "flags.gdsEnabled", Default: "false", Usage: "give containers GPUDirect Storage",
			Note:    "The variable `NVIDIA_GDS` for NVIDIA's container runtime, and its CDI devices if the node has them",
			binding: boolean(&s.CDI.GDS)},
		{Flag: "mofed-enabled", Key: "flags.mofedEnabled", Default: "false", Usage: "give containers the InfiniBand devices of MOFED",
			Note:    "The variable `NVIDIA_MOFED` for NVIDIA's container runtime, and its CDI devices if the node has them",
			binding: boolean(&s.CDI.MOFED)},
		{Flag: "imex-channel-ids", Key: "imex.channelIDs", Usage: "IMEX channels that containers get if the node has them: none, or 0",
			Note:    "With `0` containers get IMEX channel 0 if the node has the device node `/dev/nvidia-caps-imex-channels/channel0`. No other channel can be given",
			binding: custom(imexType(), s.setIMEXChannels)},
		{Flag: flagIMEXRequired, Key: "imex.required", Default: "false",
			Usage:   "devices take no work while the channel of --imex-channel-ids is missing",
			Note:    "While that node is missing, devices are unhealthy (`IMEX_CHANNEL_MISSING`); they are healthy again when it appears. NVIDIA's plugin ends instead",
			binding: boolean(&s.Core.IMEXRequired)},
	}
}

// imexType is the type of --imex-channel-ids.
func imexType() schema.Type {
	t := commaList(schema.OneOf("0"))
	t.Max = 1
	return t
}

// setIMEXChannels accepts no channel, or channel 0.
func (s *Kubernetes) setIMEXChannels(v Value) error {
	s.CDI.IMEXChannels, s.Core.IMEXChannel = nil, false
	switch items := v.items(); {
	case len(items) == 0:
		return nil
	case slices.Equal(items, []string{"0"}):
		s.CDI.IMEXChannels, s.Core.IMEXChannel = []int{0}, true
		return nil
	}
	return errors.New("want 0, which is the only channel that can be given, or nothing")
}

const defaultAnnotationPrefix = "cdi.k8s.io/"

// prefixForm is the prefix of an annotation key in Kubernetes: a DNS subdomain and a slash.
const prefixForm = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/$`

func annotationPrefix(field *string) binding {
	return custom(schema.Match(prefixForm, "a DNS name and `/`"), func(v Value) error {
		*field = v.Text
		if ok, err := regexp.MatchString(prefixForm, v.Text); !ok || len(v.Text) > 254 {
			return cmp.Or(err, errors.New("want a DNS name and a slash, such as "+defaultAnnotationPrefix))
		}
		return nil
	})
}
