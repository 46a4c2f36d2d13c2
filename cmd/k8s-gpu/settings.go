package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
	"github.com/tandem-gpu/tandem/internal/policy"
)

const (
	configFlag = "config-file"
	configEnv  = "CONFIG_FILE"
)

// given is a value with the place where somebody wrote it.
type given = configfile.Value

// flagValues are what stands on the command line, by flag.
type flagValues map[string]*flagValue

// flagValue is a flag's text. It implements cli.Value; what the text means is decided in resolve, so
// that every problem is found, and named by where it was written.
type flagValue struct {
	kind configfile.Kind
	text string // the default until set
	set  bool
}

func (f *flagValue) Set(s string) error {
	if f.set && several(f.kind) {
		s = f.text + "," + s
	}
	f.text, f.set = s, true
	return nil
}

func (f *flagValue) Get() any         { return f.text }
func (f *flagValue) String() string   { return f.text }
func (f *flagValue) IsBoolFlag() bool { return f.kind == toggle }

func newFlagValues() flagValues {
	values := flagValues{}
	for _, o := range options() {
		if o.flag != "" {
			values[o.flag] = &flagValue{kind: o.kind, text: o.value}
		}
	}
	return values
}

// flags declares the options to the command line. Those without a meaning here are known but not shown.
func (values flagValues) flags() []cli.Flag {
	var flags []cli.Flag
	for _, o := range options() {
		if o.flag == "" {
			continue
		}
		flags = append(flags, &cli.GenericFlag{
			Name: o.flag, Aliases: o.aliases, Value: values[o.flag], Hidden: o.set == nil,
			Usage: o.usage + " [$" + strings.Join(o.env, ", $") + "]",
		})
	}
	return flags
}

// resolve reads command line, environment and configuration file, in this order of precedence, and
// returns every problem at once; the settings are then those in which there is none.
func resolve(flags flagValues, lookupEnv func(string) (string, bool)) (settings, error) {
	table := options()
	var file configfile.File
	var errs []error
	if path := lookup(option{flag: configFlag, env: []string{configEnv}}, flags, lookupEnv, nil); path.Text != "" {
		file, errs = configfile.Read(path.Text, known(table))
	}
	offer, unclear := policy.Compile(file, policy.Kubernetes)
	s, err := resolveWith(flags, lookupEnv, file.Values, table)
	errs = append(errs, unclear, err, s.offer(offer))
	s.file = string(file.Text)
	return s, errors.Join(errs...)
}

// offer takes over which devices are offered and how.
func (s *settings) offer(r policy.Result) error {
	s.core.Policy, s.shape, s.warnings = r.Policy, r.Normalized, r.Warnings
	if r.MPS != "" && s.mpsRoot == "" {
		return &core.ConfigError{Key: r.MPS, Value: "mps", Remedy: "takes --mps-root, MPS_ROOT or flags.mpsRoot: the folder of the MPS control daemons, such as /run/nvidia/mps"}
	}
	return nil
}

// resolveWith is resolve with what a configuration file says.
func resolveWith(flags flagValues, lookupEnv func(string) (string, bool), file map[string]given, table []option) (settings, error) {
	s := settings{core: core.DefaultConfig(), health: healthconfig.Default(), said: map[string]string{}}
	var errs []error
	for _, o := range table {
		g := lookup(o, flags, lookupEnv, file)
		if err := apply(&s, o, g); err != nil {
			errs = append(errs, err)
		}
		if o.set != nil {
			s.said[o.name()] = g.Text
		}
	}
	errs = append(errs, healthChecks(&s.health.Health, lookupEnv))
	s.health.Apply(&s.core)
	s.findRoots(isFolder)
	if err := errors.Join(errs...); err != nil {
		return s, err
	}
	return s, s.core.Validate()
}

// lookup finds what an option was set to; Where is "" if it was not. An empty text counts where it is a value, and a
// key of the file without a value never does.
func lookup(o option, flags flagValues, lookupEnv func(string) (string, bool), file map[string]given) given {
	if f := flags[o.flag]; f != nil && f.set {
		return given{Text: f.text, Where: "--" + o.flag}
	}
	for _, name := range o.env {
		if v, ok := lookupEnv(name); ok && (v != "" || o.blank) {
			return given{Text: v, Where: name}
		}
	}
	if g, ok := file[o.key]; ok && o.key != "" && !g.Blank && (g.Text != "" || o.blank || o.kind != word) {
		return g
	}
	return given{Text: o.value}
}

// apply takes one setting over.
func apply(s *settings, o option, g given) error {
	if o.set != nil {
		if err := o.set(s, g.Text); err != nil {
			return &core.ConfigError{Key: g.Where, Value: g.Text, Remedy: err.Error()}
		}
		if o.flag == "fail-on-init-error" && g.Where != "" {
			s.notes = append(s.notes, g.Where+" has no effect: without a driver this agent waits for one")
		}
		return nil
	}
	switch {
	case g.Where == "" || g.Text == o.value:
		return nil
	case o.without != "":
		s.notes = append(s.notes, fmt.Sprintf("%s has no effect: this version does without %s", g.Where, o.without))
		return nil
	}
	if b, err := truth(g.Text); err == nil && o.kind == toggle && !b {
		return nil
	}
	remedy := "not supported by this version: remove it"
	if o.value != "" {
		remedy = fmt.Sprintf("not supported by this version: want %s", o.value)
	}
	return &core.ConfigError{Key: g.Where, Value: g.Text, Remedy: remedy}
}

// mpsMount is where NVIDIA's chart mounts the folder of the MPS control daemons into the plugin's container.
const mpsMount = "/mps"

// findRoots decides where this process looks for the driver, its device nodes and the MPS control daemons. In a
// container the host's folders are mounted somewhere else, or NVIDIA's runtime has put the library beside us.
func (s *settings) findRoots(isFolder func(string) bool) {
	root := s.driverRoot
	if s.containerRoot != "" && isFolder(s.containerRoot) {
		root, s.fallbackDriver = s.containerRoot, true
	}
	s.core.Roots.Driver = root
	switch {
	case s.devRoot != "" && s.devRoot != s.driverRoot:
		s.core.Roots.Dev = s.devRoot
	case isFolder(filepath.Join(root, "dev")):
		s.core.Roots.Dev = root
	}
	if s.devRoot == "" {
		s.devRoot = s.driverRoot
	}
	if s.mpsSeen = s.mpsRoot; s.mpsRoot != "" && isFolder(mpsMount) {
		s.mpsSeen = mpsMount
	}
}

// equal reports whether two settings mean the same, however they were written, and on which lines.
func (s settings) equal(o settings) bool {
	s.notes, s.said, o.notes, o.said = nil, nil, nil, nil
	s.warnings, s.file, o.warnings, o.file = nil, "", nil, ""
	s.core.Policy, o.core.Policy = s.shape, o.shape
	return reflect.DeepEqual(s, o)
}

// isOfferOf reports whether settings differ from others only in what is offered, which a running agent can adopt.
func (s settings) isOfferOf(o settings) bool {
	o.shape = s.shape
	o.core.Policy, o.core.MIG, o.core.Exclude, o.core.Packed = s.core.Policy, s.core.MIG, s.core.Exclude, s.core.Packed
	return s.equal(o)
}

// changes say in a word each what was set otherwise before.
func (s settings) changes(before settings) []string {
	var changes []string
	for _, name := range slices.Sorted(maps.Keys(s.said)) {
		if was, is := before.said[name], s.said[name]; was != is {
			changes = append(changes, fmt.Sprintf("%s from %q to %q", name, was, is))
		}
	}
	for _, section := range []struct {
		name    string
		changed bool
	}{
		{"resources", !reflect.DeepEqual(s.shape.Names, before.shape.Names)},
		{"sharing", !reflect.DeepEqual(s.shape.Shares, before.shape.Shares)},
		{"policy.include", !reflect.DeepEqual(s.shape.Include, before.shape.Include)},
		{"policy.exclude or policy.rules", !reflect.DeepEqual(s.shape.Rules, before.shape.Rules)},
	} {
		if section.changed {
			changes = append(changes, section.name)
		}
	}
	if len(changes) == 0 {
		changes = []string{"folders that are there now"} // see findRoots
	}
	return changes
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
