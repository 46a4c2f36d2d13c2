package config

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Kubernetes are the settings of k8s-gpu.
type Kubernetes struct {
	Core   core.Config // Health included
	Health Health
	File   File

	KubeletSocket      string // "" = the agent does not register
	PodResourcesSocket string // "" = it is not read
	Operations         Operations
	LogLevel           slog.Level
	DriverRoot         string // on the host
	ContainerRoot      string // mount point of DriverRoot in the agent's container
	DevRoot            string // on the host
	FallbackDriver     bool   // the driver's library may also be where the dynamic linker finds it
	MPSRoot            string // folder of the MPS control daemons on the host, for mounts into containers; "" = none
	MPSMount           string // MPSRoot as this process sees it; "" = none
	Strategies         Strategies
	AnnotationPrefix   string // of Strategies.CDIAnnotations
	CDI                CDI
	DRA                DRA // where Core.API is inventory.DRA
	HandOver           HandOver
	ByLabel            ByLabel
	PauseLabel         string // of the node, by which the GPU Operator announces a change of driver or MIG layout; "" = none

	Notes []string // the options that have no effect

	values map[string]string // of the options that have an effect, by Spec.Name
}

// Flags are the flags of a command line by name.
type Flags map[string]*Flag

// Flag is the text of one flag. Its methods are those of flag.Value, flag.Getter and cli.Value. It accepts any text:
// ReadKubernetes reports the problems of all flags together.
type Flag struct {
	of   schema.Type
	text string // the default until set
	set  bool
}

// Set implements flag.Value. The values of a list or mapping add up.
func (f *Flag) Set(s string) error {
	if f.set && repeatable(f.of.Kind) {
		s = f.text + "," + s
	}
	f.text, f.set = s, true
	return nil
}

// Get implements flag.Getter.
func (f *Flag) Get() any { return f.text }

// String implements flag.Value.
func (f *Flag) String() string { return f.text }

// Choices are the values that can be listed, without those of a pattern.
func (f *Flag) Choices() []string { return f.of.Scalars() }

// IsBoolFlag reports whether the flag needs no value.
func (f *Flag) IsBoolFlag() bool { return f.of.Kind == schema.Bool }

// NewFlags are the flags of the options, none of them set.
func NewFlags(specs []Spec) Flags {
	flags := Flags{}
	for _, s := range specs {
		if s.Flag != "" {
			flags[s.Flag] = &Flag{of: s.Type, text: s.Default}
		}
	}
	return flags
}

// Environment is what ReadKubernetes needs of the process and the node beside files.
type Environment struct {
	LookupEnv    func(name string) (string, bool)  // as os.LookupEnv
	CheckAddress func(address string) error        // whether a TCP listener accepts it; this package does not link package net
	ReadFile     func(path string) ([]byte, error) // of the configuration file; nil = os.ReadFile
	Config       string                            // with ByLabel the name of the file that applies; "" = none
}

// ReadKubernetes reads command line, environment and configuration file, with this precedence. It returns every problem
// (errors.Join of *setting.Error and the error with which the file can't be read); the settings are then those without
// a problem, without the policy if the file has one, and valid.
func ReadKubernetes(flags Flags, env Environment) (Kubernetes, error) {
	var f File
	var problems error
	path, unreadable := configFile(flags, env)
	if path != "" {
		var text []byte
		if text, unreadable = readText(path, env.ReadFile); unreadable == nil {
			if f, problems = parseFile(path, text, policy.Kubernetes, fileKinds(true)); problems != nil {
				f.Policy = inventory.Policy{} // rules refer to each other
			}
		}
	}
	s, err := resolve(flags, env, f)
	return s, errors.Join(unreadable, problems, err, s.checkMPS(), s.checkNodeName(), s.checkLabels(), s.checkHandOver())
}

// checkMPS reports whether there is a folder of MPS control daemons if the file uses MPS.
func (s *Kubernetes) checkMPS() error {
	if s.File.MPS == "" || s.MPSRoot != "" {
		return nil
	}
	return &setting.Error{Key: s.File.MPS, Value: "mps", Remedy: "takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as " + defaultMPSRoot}
}

// resolve applies all options to the defaults.
func resolve(flags Flags, env Environment, f File) (Kubernetes, error) {
	s := Kubernetes{Core: core.DefaultConfig(), Health: DefaultHealth(), File: f, values: map[string]string{}}
	s.Core.Policy, s.Notes = f.Policy, slices.Clone(f.Notes)
	var errs []error
	given := map[string]Value{} // by flag
	for _, o := range kubernetesOptions(&s, env.CheckAddress) {
		v := lookup(o, flags, env, f.values)
		if o.Hidden {
			s.noteUnsupported(o, v)
			continue
		}
		s.values[o.Name()] = v.Text
		errs = append(errs, o.apply(v)...)
		if o.Flag == flagFailOnInitError && v.Where != "" {
			s.Notes = append(s.Notes, v.Where+" has no effect: without a driver this agent waits for one")
		}
		given[o.Flag] = v
	}
	errs = append(errs, s.applyDRA(given)...)
	wanted := s.Core.Injection.Nodes
	if s.Core.Injection = s.Strategies.injection(wanted); wanted && !s.Core.Injection.Nodes {
		s.Notes = append(s.Notes, given[flagPassDeviceSpecs].Where+" has no effect: with CDI strategies only, the device nodes are in the CDI specification")
	}
	if s.Core.IMEXRequired && !s.Core.IMEXChannel {
		s.Notes = append(s.Notes, given[flagIMEXRequired].Where+" has no effect: containers get no IMEX channel, as --imex-channel-ids or imex.channelIDs names none")
	}
	errs = append(errs, healthChecks(&s.Core.Health, env.LookupEnv))
	s.findRoots(isFolder)
	if err := errors.Join(errs...); err != nil {
		return s, err
	}
	return s, s.Core.Validate()
}

// lookup finds the value of an option. An empty text counts only for Spec.Empty; a flag always counts.
func lookup(o Spec, flags Flags, env Environment, file map[string]Value) Value {
	if f := flags[o.Flag]; f != nil && f.set {
		return Value{Text: f.text, Where: "--" + o.Flag}
	}
	for _, name := range o.Env {
		if text, ok := env.LookupEnv(name); ok && (text != "" || o.Empty) {
			return Value{Text: text, Where: name}
		}
	}
	if v, ok := file[o.Key]; ok && o.counts(v) {
		return v
	}
	return Value{Text: o.Default}
}

// noteUnsupported notes a value of an option that is not supported.
func (s *Kubernetes) noteUnsupported(o Spec, v Value) {
	if v.Where != "" && v.Text != o.Default {
		s.Notes = append(s.Notes, fmt.Sprintf("%s has no effect: %s", v.Where, o.without))
	}
}

// mpsMount is where NVIDIA's chart mounts the folder of the MPS control daemons in the plugin's container.
const mpsMount = "/mps"

// findRoots finds the driver, its device nodes and the MPS control daemons for this process. In a container the folders of
// the host have other mount points, or NVIDIA's container runtime has mounted the library.
func (s *Kubernetes) findRoots(isFolder func(string) bool) {
	root := s.DriverRoot
	if s.ContainerRoot != "" && isFolder(s.ContainerRoot) {
		root, s.FallbackDriver = s.ContainerRoot, true
	}
	s.Core.Roots.Driver = root
	switch {
	case s.DevRoot != "" && s.DevRoot != s.DriverRoot:
		s.Core.Roots.Dev = s.DevRoot
	case isFolder(filepath.Join(root, "dev")):
		s.Core.Roots.Dev = root
	}
	if s.DevRoot == "" {
		s.DevRoot = s.DriverRoot
	}
	if s.MPSMount = s.MPSRoot; s.MPSRoot != "" && isFolder(mpsMount) {
		s.MPSMount = mpsMount
	}
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// Equal reports whether two settings have the same meaning, in whatever spelling and place.
func (s Kubernetes) Equal(o Kubernetes) bool {
	s.Core.Policy, o.Core.Policy = s.File.Normalized, o.File.Normalized
	s.Notes, s.values, o.Notes, o.values = nil, nil, nil, nil
	s.File, o.File = s.File.beside(), o.File.beside()
	return reflect.DeepEqual(s, o)
}

// beside is what a file has beside policy and options.
func (f File) beside() File { return File{Result: policy.Result{Prove: f.Prove, Reset: f.Reset}} }

// DiffersInPolicyOnly reports whether settings differ from others at most in policy, MIG strategy, excluded devices and
// preference, which a running agent can apply.
func (s Kubernetes) DiffersInPolicyOnly(o Kubernetes) bool {
	o.File.Normalized = s.File.Normalized
	o.Core.MIG, o.Core.Exclude, o.Core.Packed = s.Core.MIG, s.Core.Exclude, s.Core.Packed
	return s.Equal(o)
}

// Changes names what differs from earlier settings.
func (s Kubernetes) Changes(before Kubernetes) []string {
	var changes []string
	for _, name := range slices.Sorted(maps.Keys(s.values)) {
		if was, is := before.values[name], s.values[name]; was != is {
			changes = append(changes, fmt.Sprintf("%s from %q to %q", name, was, is))
		}
	}
	is, was := s.File.Normalized, before.File.Normalized
	for _, section := range []struct {
		name    string
		is, was any
	}{
		{"resources", is.Names, was.Names},
		{"sharing", is.Shares, was.Shares},
		{"policy.include", is.Include, was.Include},
		{"policy.exclude or policy.rules", is.Rules, was.Rules},
		{"prove", s.File.Prove, before.File.Prove},
		{"reset", s.File.Reset, before.File.Reset},
	} {
		if !reflect.DeepEqual(section.is, section.was) {
			changes = append(changes, section.name)
		}
	}
	if len(changes) == 0 {
		changes = []string{"folders that are there now"} // see findRoots
	}
	return changes
}
