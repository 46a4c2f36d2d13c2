package config

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// version is the only version of the file, and the default.
const version = "v1"

// The keys of the file that both agents read, beside those of package policy.
const (
	keyMIGStrategy = "flags.migStrategy"
	keyMPSRoot     = "flags.mpsRoot"
)

// File is what a configuration file requests from one agent. The format is that of NVIDIA's k8s-device-plugin with
// extensions; unlike there, an unknown key is an error.
type File struct {
	policy.Result
	MIG     inventory.MIGStrategy // flags.migStrategy; "" = absent
	MPSRoot string                // flags.mpsRoot, an absolute path on the host; "" = absent
	Text    string                // of the file, as it was read; "" = there is no file

	values map[string]Value // the other values that are not null, by key
}

// readText reads the configuration file by read; nil = os.ReadFile.
func readText(path string, read func(string) ([]byte, error)) ([]byte, error) {
	if read == nil {
		read = os.ReadFile
	}
	text, err := read(path)
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	return text, nil
}

// ParseFile parses the text of the file at path for the agent of an orchestrator. Keys that do not concern devices must be
// known, but are not read. It returns every problem (errors.Join of *setting.Error with line and path of the key).
func ParseFile(path string, text []byte, to policy.Orchestrator) (File, error) {
	return parseAs(path, text, to, fileKinds(false))
}

// parseAs is ParseFile with keys of these kinds.
func parseAs(path string, text []byte, to policy.Orchestrator, kinds map[string]schema.Kind) (File, error) {
	f, err := parseFile(path, text, to, kinds)
	var s Kubernetes
	errs := []error{err}
	for _, o := range kubernetesOptions(&s, nil) {
		if v, ok := f.values[o.Key]; ok && o.counts(v) && !o.Hidden && kinds[o.Key] != schema.Opaque {
			errs = append(errs, o.apply(v)...)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return File{}, err
	}
	f.MIG, f.MPSRoot = s.Core.MIG, s.MPSRoot
	return f, nil
}

// fileKinds are the keys of the file, beside the sections of package policy, and how each is read: all, or only those that
// both agents read.
func fileKinds(all bool) map[string]schema.Kind {
	kinds := map[string]schema.Kind{}
	for _, s := range KubernetesSpecs() {
		switch {
		case s.Key == "":
		case all || s.Key == keyMIGStrategy || s.Key == keyMPSRoot:
			kinds[s.Key] = s.Kind
		default:
			kinds[s.Key] = schema.Opaque
		}
	}
	return kinds
}

// parseFile parses a file with these keys of these kinds beside the sections of package policy. With problems the result
// has what could be read.
func parseFile(path string, text []byte, to policy.Orchestrator, kinds map[string]schema.Kind) (File, error) {
	f := File{Text: string(text), values: map[string]Value{}}
	d := document.Parse(path, text)
	root := d.Root().Fields(slices.Concat(names(kinds, ""), []string{"version"}, schema.Names(policy.Sections()))...)
	if v := root.At("version"); v.Given() {
		if text, ok := v.Scalar(); ok && text != "" && text != version { // "" is the default, as for NVIDIA's plugin (parseConfigFrom)
			v.Failf("want %s", version)
		}
	}
	f.readValues(root, "", kinds)
	f.Result = policy.Compile(d, root, to)
	return f, d.Err()
}

// readValues reads the values of the keys that begin with a prefix: "" or "flags.".
func (f *File) readValues(fields document.Fields, prefix string, kinds map[string]schema.Kind) {
	for _, name := range names(kinds, prefix) {
		key, v := prefix+name, fields.At(name)
		if kind, ok := kinds[key]; !ok {
			f.readValues(v.Fields(names(kinds, key+".")...), key+".", kinds)
		} else if v.Given() {
			if value, ok := readValue(v, kind); ok {
				f.values[key] = value
			}
		}
	}
}

// names are the names that may follow a prefix of a key, sorted.
func names(kinds map[string]schema.Kind, prefix string) (names []string) {
	for key := range kinds {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			name, _, _ := strings.Cut(rest, ".")
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// readValue reads a value; false if it is of another kind. A list or mapping may be a scalar as on the command line.
func readValue(v document.Value, kind schema.Kind) (value Value, ok bool) {
	value, ok = Value{Where: v.Where()}, true
	pairs := []pair{}
	switch {
	case kind == schema.Opaque:
		if !v.IsEmpty() {
			value.Text = "..."
		}
		return value, true
	case kind == schema.List && v.IsList():
		for _, item := range v.Items() {
			text, isScalar := item.Scalar()
			pairs, ok = append(pairs, pair{key: text}), ok && isScalar
		}
		return valueOf(v.Where(), pairs), ok
	case kind == schema.Mapping && v.IsMapping():
		for _, p := range v.Pairs() {
			text, isScalar := p.Value.Scalar()
			pairs, ok = append(pairs, pair{p.Key, text}), ok && isScalar
		}
		return valueOf(v.Where(), pairs), ok
	case v.IsList() || v.IsMapping():
		v.Failf("%s", wanted(kind))
		return value, false
	}
	value.Text = v.Text()
	return value, true
}
