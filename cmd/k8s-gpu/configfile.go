package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// configVersion is the only version of the configuration file; a file without one has it.
const configVersion = "v1"

// readConfigFile reads the configuration file of NVIDIA's plugin. Unlike there, a key that nobody knows
// is an error. The result has every known key that the file sets.
func readConfigFile(path string, table []option) (map[string]given, []error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, []error{fmt.Errorf("configuration file: %w", err)}
	}
	return parseConfig(path, text, table)
}

// parseConfig reads the text of the configuration file at path.
func parseConfig(path string, text []byte, table []option) (map[string]given, []error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, []error{fmt.Errorf("%s: %s", path, strings.TrimPrefix(err.Error(), "yaml: "))}
	}
	f := file{path: path, kinds: map[string]kind{"version": word}, values: map[string]given{}}
	for _, o := range table {
		if o.key != "" {
			f.kinds[o.key] = o.kind
		}
	}
	if len(document.Content) > 0 { // an empty file has none
		f.section("", document.Content[0])
	}
	if v, ok := f.values["version"]; ok && v.value != configVersion {
		f.errs = append(f.errs, fmt.Errorf("%s = %q: want %s", v.where, v.value, configVersion))
	}
	return f.values, f.errs
}

// file is a configuration file while it is read.
type file struct {
	path   string
	kinds  map[string]kind // by key, such as "flags.plugin.passDeviceSpecs"
	values map[string]given
	errs   []error
}

func (f *file) where(n *yaml.Node, key string) string {
	if key == "" { // of the file as a whole
		return fmt.Sprintf("%s:%d", f.path, n.Line)
	}
	return fmt.Sprintf("%s:%d: %s", f.path, n.Line, key)
}

// section reads the mapping that stands under a prefix: "" or "flags." ....
func (f *file) section(prefix string, n *yaml.Node) {
	n = resolved(n)
	if n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		f.errs = append(f.errs, fmt.Errorf("%s: want a mapping", f.where(n, strings.TrimSuffix(prefix, "."))))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := prefix + name.Value
		if seen[key] {
			f.errs = append(f.errs, fmt.Errorf("%s: given twice", f.where(name, key)))
			continue
		}
		seen[key] = true
		if kind, ok := f.kinds[key]; ok {
			f.leaf(key, kind, name, resolved(value))
		} else if names := f.children(key + "."); len(names) > 0 {
			f.section(key+".", value)
		} else {
			f.errs = append(f.errs, fmt.Errorf("%s: unknown key: did you mean %s?",
				f.where(name, key), prefix+nearest(name.Value, f.children(prefix))))
		}
	}
}

// leaf reads the value of a known key.
func (f *file) leaf(key string, kind kind, name, value *yaml.Node) {
	text, err := textOf(value, kind)
	if err != nil {
		f.errs = append(f.errs, fmt.Errorf("%s: %w", f.where(name, key), err))
		return
	}
	f.values[key] = given{text, f.where(name, key)}
}

// textOf is a value as it would stand on the command line. A page is "" if it says nothing.
func textOf(n *yaml.Node, kind kind) (string, error) {
	switch {
	case kind == page:
		if saysNothing(n) {
			return "", nil
		}
		return "...", nil
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return "", nil
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case kind == list && n.Kind == yaml.SequenceNode:
		items, err := wordsOf(n)
		return strings.Join(items, ","), err
	case kind == mapping && n.Kind == yaml.MappingNode:
		items, err := wordsOf(n)
		var pairs []string
		for pair := range slices.Chunk(items, 2) {
			pairs = append(pairs, strings.Join(pair, "="))
		}
		return strings.Join(pairs, ","), err
	case kind == mapping:
		return "", errors.New("want a mapping")
	}
	return "", errors.New("want a single value")
}

// wordsOf are the items of a list; those of a mapping are its keys, each with its value after it.
func wordsOf(n *yaml.Node) ([]string, error) {
	var words []string
	for _, item := range n.Content {
		if item = resolved(item); item.Kind != yaml.ScalarNode {
			if n.Kind == yaml.MappingNode {
				return nil, errors.New("want a mapping of words")
			}
			return nil, errors.New("want a list of words")
		}
		words = append(words, item.Value)
	}
	return words, nil
}

// saysNothing reports whether a value is empty or false all the way down. Each node is looked at once: by
// aliases a value may contain itself, or be larger than what is written.
func saysNothing(n *yaml.Node) bool { return nothing(n, map[*yaml.Node]bool{}) }

func nothing(n *yaml.Node, seen map[*yaml.Node]bool) bool {
	n = resolved(n)
	if seen[n] {
		return true
	}
	seen[n] = true
	if n.Kind == yaml.ScalarNode {
		return n.Tag == "!!null" || n.Value == "" || n.Value == "false"
	}
	for i, item := range n.Content {
		name := n.Kind == yaml.MappingNode && i%2 == 0
		if !name && !nothing(item, seen) {
			return false
		}
	}
	return true
}

func resolved(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// children are the names that may stand under a prefix.
func (f *file) children(prefix string) []string {
	var names []string
	for key := range f.kinds {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			name, _, _ := strings.Cut(rest, ".")
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
