// Package configfile reads the configuration file of NVIDIA's k8s-device-plugin, in which both agents are
// configured. What a value means is up to them; that every key is known, given once and has a value of the right
// kind is seen to here. Unlike there, a key that nobody knows is an error.
package configfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// version is the only one of the file; a file without one has it.
const version = "v1"

// Kind is what stands under a key.
type Kind uint8

// The kinds of values.
const (
	Scalar  Kind = iota
	Toggle       // true or false
	List         // words
	Mapping      // of words to words
	Opaque       // something that is not looked into
	Section      // something that is handed over as it is
)

// Value is the text of a value, as it would stand on a command line, and where its key stands: "/c.yaml:3: flags.x".
// Blank is one that is not there ("migStrategy:", or null, or ~): the key is as if it were not in the file.
type Value struct {
	Text, Where string
	Blank       bool
}

// File is what a file says.
type File struct {
	Path     string
	Text     []byte                // as it was read
	Values   map[string]Value      // by key, such as "flags.migStrategy"
	Sections map[string]*yaml.Node // the values of kind Section; without aliases and merge keys
}

// Read reads the file at path. Known are the keys that may stand in it. The file has what could be read in spite
// of the errors, each of which is one problem in one line.
func Read(path string, known map[string]Kind) (File, []error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return File{Path: path}, []error{fmt.Errorf("configuration file: %w", err)}
	}
	return Parse(path, text, known)
}

// Parse is Read of a file with this text.
func Parse(path string, text []byte, known map[string]Kind) (File, []error) {
	f := File{Path: path, Text: text, Values: map[string]Value{}, Sections: map[string]*yaml.Node{}}
	root, err := document(text)
	if err == nil && root != nil {
		root, err = expand(root)
	}
	if err != nil {
		return f, []error{fmt.Errorf("%s%w", path, err)}
	}
	w := walk{File: f, kinds: map[string]Kind{"version": Scalar}}
	for key, kind := range known {
		w.kinds[key] = kind
	}
	if root != nil {
		w.section("", root)
	}
	if v := w.Values["version"]; v.Text != "" && v.Text != version { // as in NVIDIA's parseConfigFrom, "" is the default

		w.errs = append(w.errs, fmt.Errorf("%s = %q: want %s", v.Where, v.Text, version))
	}
	return w.File, w.errs
}

// document is the one document of a text; nil if it is empty.
func document(text []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var first *yaml.Node
	for {
		var next yaml.Node
		switch err := decoder.Decode(&next); {
		case errors.Is(err, io.EOF):
			return first, nil
		case err != nil:
			return nil, &problem{text: strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "yaml: ")), " ")}
		case len(next.Content) == 0 || IsNull(next.Content[0]):
		case first != nil:
			return nil, &problem{next.Line, "another document begins: want one"}
		default:
			first = next.Content[0]
		}
	}
}

// problem is what is wrong with a file as a whole.
type problem struct {
	line int // 0 = the text says it
	text string
}

func (p *problem) Error() string {
	if p.line == 0 {
		return ": " + p.text
	}
	return fmt.Sprintf(":%d: %s", p.line, p.text)
}

// walk is a file while its keys are read.
type walk struct {
	File
	kinds map[string]Kind
	errs  []error
}

func (w *walk) where(n *yaml.Node, key string) string {
	if key == "" { // of the file as a whole
		return fmt.Sprintf("%s:%d", w.Path, n.Line)
	}
	return fmt.Sprintf("%s:%d: %s", w.Path, n.Line, key)
}

// section reads the mapping that stands under a prefix: "" or "flags." ....
func (w *walk) section(prefix string, n *yaml.Node) {
	if IsNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		w.errs = append(w.errs, fmt.Errorf("%s: want a mapping", w.where(n, strings.TrimSuffix(prefix, "."))))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := prefix + KeyText(name)
		if seen[key] {
			w.errs = append(w.errs, fmt.Errorf("%s: given twice", w.where(name, key)))
			continue
		}
		seen[key] = true
		if kind, ok := w.kinds[key]; ok {
			w.leaf(key, kind, name, value)
		} else if names := w.children(key + "."); len(names) > 0 {
			w.section(key+".", value)
		} else {
			w.errs = append(w.errs, fmt.Errorf("%s: unknown key: did you mean %s?",
				w.where(name, key), prefix+Nearest(name.Value, w.children(prefix))))
		}
	}
}

// leaf reads the value of a known key.
func (w *walk) leaf(key string, kind Kind, name, value *yaml.Node) {
	if kind == Section {
		w.Sections[key] = value
		return
	}
	text, err := textOf(value, kind)
	if err != nil {
		w.errs = append(w.errs, fmt.Errorf("%s: %w", w.where(name, key), err))
		return
	}
	w.Values[key] = Value{Text: text, Where: w.where(name, key), Blank: IsNull(value)}
}

// textOf is a value as it would stand on the command line. A page is "" if it says nothing.
func textOf(n *yaml.Node, kind Kind) (string, error) {
	switch {
	case kind == Opaque:
		if nothing(n) {
			return "", nil
		}
		return "...", nil
	case IsNull(n):
		return "", nil
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case kind == List && n.Kind == yaml.SequenceNode:
		items, err := wordsOf(n)
		return strings.Join(items, ","), err
	case kind == Mapping && n.Kind == yaml.MappingNode:
		items, err := wordsOf(n)
		var pairs []string
		for pair := range slices.Chunk(items, 2) {
			pairs = append(pairs, strings.Join(pair, "="))
		}
		return strings.Join(pairs, ","), err
	case kind == Mapping:
		return "", errors.New("want a mapping")
	}
	return "", errors.New("want a single value")
}

// wordsOf are the items of a list; those of a mapping are its keys, each with its value after it.
func wordsOf(n *yaml.Node) ([]string, error) {
	var words []string
	for _, item := range n.Content {
		if item.Kind != yaml.ScalarNode {
			if n.Kind == yaml.MappingNode {
				return nil, errors.New("want a mapping of words")
			}
			return nil, errors.New("want a list of words")
		}
		words = append(words, item.Value)
	}
	return words, nil
}

// children are the names that may stand under a prefix.
func (w *walk) children(prefix string) []string {
	var names []string
	for key := range w.kinds {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			name, _, _ := strings.Cut(rest, ".")
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
