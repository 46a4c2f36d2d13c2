package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Nomad are the settings of nomad-gpu: those of the plugin's config block and of its policy file.
type Nomad struct {
	Core    core.Config // Health included
	Health  Health
	GroupBy GroupBy
	MPSRoot string // folder on the host that holds "nvidia.com/<pool>/pipe", the pipe directories of MPS daemons

	Prove        proof.Policy // the zero value = no GPU is proved
	Reset        reset.Policy // the zero value = no GPU is reset but by a person
	ResetProgram string       // path of nvidia-smi; "" = where the driver has it
	ResetPause   reset.Pause  // the programs that watch GPUs, and are stopped for a reset

	Operations Operations

	// For pools whose Injection needs a CDI specification; without such a pool there is none.
	CDIDir      string // folder of the specification
	CDIHookPath string // of NVIDIA's CDI hook program: nvidia-ctk or nvidia-cdi-hook
}

// GroupBy is the part of the node by which device groups are split: Nomad takes all devices of a task from one group.
type GroupBy string

// The values of group_by.
const (
	GroupByNone   GroupBy = "none"
	GroupByNUMA   GroupBy = "numa"   // "<name> NUMA 0"; "<name>" for a GPU whose node is unknown
	GroupByNVLink GroupBy = "nvlink" // "<name> NVLink 0000:17:00.0", the first GPU of the island; "<name>" for a GPU without NVLinks
)

// Block is the plugin's config block without its policy file.
type Block struct {
	Enabled    bool
	PolicyFile string // "" = none

	settings Nomad // Core.MIG and MPSRoot are "" if the block has none
	problems []error
	paths    paths
	strict   bool // the policy file is checked as k8s-gpu would, too
}

// minFingerprintPeriod is the minimum of fingerprint_period, the time between complete enumerations. Events and health
// checks do not wait for one.
const minFingerprintPeriod = time.Second

// defaultMPSRoot is where NVIDIA's mps-control-daemon has its folders on the host.
const defaultMPSRoot = "/run/nvidia/mps"

// NomadSpecs are the keys of the config block. All are optional. The first three are those of nomad-device-nvidia. Some are also
// flags of the commands.
func NomadSpecs() []Spec { return nomadOptions(new(Block)) }

// NomadKeys are the names of NomadSpecs.
func NomadKeys() (keys []string) {
	for _, s := range NomadSpecs() {
		keys = append(keys, s.HCL)
	}
	return keys
}

func nomadOptions(b *Block) []Spec {
	s := &b.settings
	roots := &s.Core.Roots
	options := []Spec{
		{HCL: "enabled", Default: "true", Usage: "false: offer nothing and do not open the driver", binding: boolean(&b.Enabled)},
		{HCL: "ignored_gpu_ids", Usage: "UUIDs of GPUs or MIG instances that are not offered", binding: ignoredIDs(&s.Core.Exclude)},
		{HCL: "fingerprint_period", Default: "1m", Usage: "time between complete enumerations; an event causes one earlier",
			binding: duration(&s.Core.Rescan, minFingerprintPeriod)},
		{HCL: "driver_root", Flag: "driver-root", Default: "/", Exists: true, Usage: "root of the driver's installation", binding: root(&roots.Driver, "/")},
		{HCL: "dev_root", Flag: "dev-root", Exists: true, Usage: "folder that has dev/nvidia0 ...; the driver root if empty",
			binding: devRoot(roots)},
		{HCL: "sysfs_root", Flag: "sysfs-root", Default: "/sys", Exists: true, Usage: "mount point of sysfs", binding: root(&roots.Sys, "/sys")},
		{HCL: "procfs_root", Flag: "procfs-root", Default: "/proc", Exists: true, Usage: "mount point of procfs", binding: root(&roots.Proc, "/proc")},
		{HCL: "cgroup_root", Flag: "cgroup-root", Default: "/sys/fs/cgroup", Exists: true, Usage: "mount point of the control groups of version 2, for limits of device memory",
			binding: root(&roots.Cgroup, "/sys/fs/cgroup")},
		{HCL: "policy_file", Flag: FlagConfigFile, Aliases: []string{"policy-file"},
			Usage:   "which GPUs are offered, under which names, for how many tasks: see docs/policy.md; read again at SIGHUP",
			binding: pathOrEmpty(&b.PolicyFile, "/etc/tandem/policy.yaml")},
		{HCL: "mig_strategy", Flag: "mig-strategy", Usage: "none, single or mixed; if empty, that of the policy file, else mixed",
			binding: orEmpty(&s.Core.MIG, migStrategy(&s.Core.MIG))},
		{HCL: "group_by", Default: string(GroupByNone),
			Usage:   "numa or nvlink: a device group for each NUMA node or NVLink island, so that the GPUs of a task are near each other",
			binding: oneOf(&s.GroupBy, GroupByNone, GroupByNUMA, GroupByNVLink)},
		{HCL: "mps_root", Flag: "mps-root", Usage: "folder that has nvidia.com/<pool>/pipe of MPS daemons; if empty, that of the policy file, else " + defaultMPSRoot,
			binding: orEmpty(&s.MPSRoot, ownFolder(&s.MPSRoot, defaultMPSRoot, nil))},
		{HCL: "injection", Default: "variables",
			Usage:   "how tasks get the GPUs of pools whose rule has no injection: variables, devices, cdi, libraries; see docs/policy.md",
			binding: injection(&s.Core.Injection)},
		{HCL: "cdi_dir", Flag: "cdi-dir", Default: defaultCDIDir, Usage: "folder of the CDI specification, which is written for injection cdi and libraries",
			binding: ownFolder(&s.CDIDir, defaultCDIDir, nil)},
		{HCL: "cdi_hook_path", Default: defaultCDIHook, Exists: true, Usage: "nvidia-ctk or nvidia-cdi-hook, which container runtimes call for a CDI specification",
			binding: path(&s.CDIHookPath, defaultCDIHook)},
	}
	options = append(options, nomadOperations(&s.Operations)...)
	for _, o := range healthOptions(&s.Core, &s.Health) {
		if o.HCL != "state_dir" {
			o.Flag = ""
		}
		options = append(options, o)
	}
	return options
}

// ignoredIDs adds the UUID of a device.
func ignoredIDs(field *[]gpu.DeviceID) binding {
	return binding{Type: commaList(schema.Match("^(GPU|MIG)-", "UUIDs")), setItem: func(id string) error {
		if !strings.HasPrefix(id, "GPU-") && !strings.HasPrefix(id, "MIG-") {
			return errors.New("want UUIDs (GPU-... or MIG-...) as nvidia-smi -L prints them")
		}
		*field = append(*field, gpu.DeviceID(id))
		return nil
	}}
}

// devRoot sets the dev root; "" for the driver root, which is set before.
func devRoot(roots *core.Roots) binding {
	set := root(&roots.Dev, "/").set
	return custom(orEmpty(new(string), path(new(string), "/")).Type, func(v Value) error {
		if v.Text == "" {
			roots.Dev = roots.Driver
			return nil
		}
		return set(v)
	})
}

// root sets an absolute path; "" for the path that the node has.
func root(field *string, host string) binding {
	b := path(field, host)
	return custom(b.Type, func(v Value) error {
		err := b.set(v)
		if *field = filepath.Clean(v.Text); *field == host {
			*field = ""
		}
		return err
	})
}

func migStrategy(field *inventory.MIGStrategy) binding {
	return oneOf(field, inventory.MIGNone, inventory.MIGSingle, inventory.MIGMixed)
}

func injection(field *inventory.Injection) binding {
	return custom(commaList(schema.OneOf(policy.InjectionWords()...)), func(v Value) (err error) {
		*field, err = policy.ParseInjection(v.items())
		return err
	})
}

// Keys are the keys of a config block in a file.
type Keys struct {
	Values map[string]any    // a bool, number, string, list or mapping each
	Where  map[string]string // the place of each: "/etc/nomad.d/client.hcl:12: xids"
}

// NewBlock reads the keys of a config block: a bool, number, string, list or mapping each. A key that is absent or nil has
// its default. The problems are returned by Read and Compile.
func NewBlock(keys map[string]any) Block {
	return newBlock(func(o Spec) (Value, error) { return blockValue(o, keys[o.HCL], o.HCL) })
}

// BlockOfFlags is the config block with the keys that have a flag in NomadSpecs. The path of the policy file may be relative.
func BlockOfFlags(flags Flags) Block { return BlockWithFlags(Keys{}, flags) }

// BlockWithFlags is the config block of a file, except that flags that are set have precedence, as in BlockOfFlags. A key that a block can't
// have is a problem, too.
func BlockWithFlags(file Keys, flags Flags) Block {
	b := newBlock(func(o Spec) (Value, error) {
		if f := flags[o.Flag]; f != nil && f.set && o.Flag != FlagConfigFile {
			return Value{Text: f.text, Where: "--" + o.Flag}, nil
		}
		return blockValue(o, file.Values[o.HCL], file.Where[o.HCL])
	})
	if f := flags[FlagConfigFile]; f.set {
		b.PolicyFile = f.text
	}
	known := NomadKeys()
	for _, key := range slices.Sorted(maps.Keys(file.Values)) {
		if !slices.Contains(known, key) {
			b.problems = append(b.problems, &setting.Error{Key: file.Where[key], Value: fmt.Sprint(file.Values[key]), Remedy: "unknown key: " + document.Meant(key, known)})
		}
	}
	return b
}

func newBlock(value func(Spec) (Value, error)) Block {
	b := Block{settings: Nomad{Core: core.DefaultConfig(), Health: DefaultHealth()}}
	b.settings.Core.MIG = ""
	for _, o := range nomadOptions(&b) {
		if v, err := value(o); err != nil {
			b.problems = append(b.problems, err)
			o.reset()
		} else {
			b.problems = append(b.problems, o.apply(v)...)
			b.paths.add(o, v)
		}
	}
	return b
}

// blockValue is the value of a key as Nomad encodes it. A number or a bool may be a string.
func blockValue(s Spec, given any, where string) (Value, error) {
	list, isList := given.([]any)
	mapping, isMapping := given.(map[string]any)
	pairs := []pair{}
	switch {
	case given == nil:
		return Value{Text: s.Default, Where: where}, nil
	case isList && s.Kind == schema.List:
		for _, item := range list {
			pairs = append(pairs, pair{key: fmt.Sprint(item)})
		}
		return valueOf(where, pairs), nil
	case isMapping && s.Kind == schema.Mapping:
		for _, key := range slices.Sorted(maps.Keys(mapping)) {
			pairs = append(pairs, pair{key, fmt.Sprint(mapping[key])})
		}
		return valueOf(where, pairs), nil
	case isList || isMapping || s.Kind == schema.List || s.Kind == schema.Mapping:
		return Value{}, &setting.Error{Key: where, Value: fmt.Sprint(given), Remedy: wanted(s.Kind)}
	}
	return Value{Text: fmt.Sprint(given), Where: where}, nil
}

// StateDir is the state directory; "" = none.
func (b Block) StateDir() string { return b.settings.Health.StateDir }

// Read returns the settings of the block and its policy file, which it reads. A caller that stores the policy must store the
// text of this File: the file may change. It returns every problem (errors.Join of *setting.Error and the error with
// which the file can't be read); the settings are then those without a problem, without the policy if the file has one, and valid.
func (b Block) Read() (Nomad, File, error) {
	if b.PolicyFile == "" {
		return b.compile(nil)
	}
	text, err := readText(b.PolicyFile, nil)
	if err != nil {
		b.PolicyFile, b.problems = "", append([]error{err}, b.problems...)
	}
	return b.compile(text)
}

// Check is Read without the settings. It also checks the keys of the policy file that only k8s-gpu reads.
func (b Block) Check() (File, error) {
	b.strict = true
	_, f, err := b.Read()
	return f, err
}

// Compile is Read with a text in place of the policy file; the file at path is not read.
func (b Block) Compile(path string, text []byte) (Nomad, File, error) {
	b.PolicyFile = path
	return b.compile(text)
}

// compile reads nothing. The block has precedence over the policy file. As for nomad-device-nvidia, the default MIG
// strategy is mixed: a GPU in MIG mode is not offered, its instances are.
func (b Block) compile(text []byte) (s Nomad, f File, err error) {
	if b.PolicyFile != "" {
		f, err = parseAs(b.PolicyFile, text, policy.Nomad, fileKinds(b.strict))
	}
	s = b.settings
	s.Core.Policy, s.Prove = f.Policy, f.Prove
	s.Reset, s.ResetProgram, s.ResetPause = f.Reset, f.ResetProgram, f.ResetPause
	s.Core.MIG = cmp.Or(s.Core.MIG, f.MIG, inventory.MIGMixed)
	s.MPSRoot = filepath.Clean(cmp.Or(s.MPSRoot, f.MPSRoot, defaultMPSRoot))
	return s, f, errors.Join(slices.Concat(b.problems, []error{err})...)
}
