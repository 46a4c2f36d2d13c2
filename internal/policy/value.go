package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
)

// value is something in a file, with the path that leads to it. One that is not there has no node.
type value struct {
	*reading
	node *yaml.Node
	path string // "policy.rules[0].replicas"
	line int    // of its key
}

// reading is a file while it is read.
type reading struct {
	file string // its path
	errs []problem
}

// problem is what is wrong on a line.
type problem struct {
	line int
	err  *core.ConfigError
}

// err is all that is wrong, in the order of the file.
func (r *reading) err() error {
	slices.SortStableFunc(r.errs, func(a, b problem) int { return a.line - b.line })
	errs := make([]error, len(r.errs))
	for i, p := range r.errs {
		errs[i] = p.err
	}
	return errors.Join(errs...)
}

// where is the place of a value, as errors name it: "/etc/tandem.yaml:12: policy.rules[0].replicas".
func (v value) where() string { return fmt.Sprintf("%s:%d: %s", v.file, v.line, v.path) }

// fail notes that a value is wrong, and what to write instead.
func (v value) fail(format string, args ...any) {
	v.errs = append(v.errs, problem{v.line, &core.ConfigError{Key: v.where(), Value: v.text(), Remedy: fmt.Sprintf(format, args...)}})
}

// text is the value in an error.
func (v value) text() string {
	switch {
	case !v.given():
		return ""
	case v.node.Kind == yaml.ScalarNode:
		return v.node.Value
	case v.node.Kind == yaml.SequenceNode:
		return "[...]"
	}
	return "{...}"
}

// given reports whether anything stands there.
func (v value) given() bool { return v.node != nil && !configfile.IsNull(v.node) }

func (v value) isList() bool { return v.given() && v.node.Kind == yaml.SequenceNode }

// fields are the values of a mapping, by key.
type fields struct {
	of     value
	values map[string]value
}

// at is the value of a key.
func (f fields) at(key string) value {
	if v, ok := f.values[key]; ok {
		return v
	}
	return value{f.of.reading, nil, f.of.path + "." + key, f.of.line}
}

// given are the values of those keys that say something.
func (f fields) given(keys ...string) []value {
	var given []value
	for _, key := range keys {
		if v := f.at(key); v.given() {
			given = append(given, v)
		}
	}
	return given
}

// fields reads a mapping that may have the known keys.
func (v value) fields(known ...string) fields {
	f := fields{of: v, values: map[string]value{}}
	if !v.given() {
		return f
	}
	if v.node.Kind != yaml.MappingNode {
		v.fail("want a mapping with %s", list(known, "or"))
		return f
	}
	for pair := range slices.Chunk(v.node.Content, 2) {
		key := configfile.KeyText(pair[0])
		at := value{v.reading, pair[1], v.path + "." + key, pair[0].Line}
		_, twice := f.values[key]
		switch {
		case !slices.Contains(known, key):
			at.fail("unknown key: did you mean %s?", configfile.Nearest(key, known))
		case twice:
			at.fail("given twice")
		default:
			f.values[key] = at
		}
	}
	return f
}

// items are those of a list; none if nothing is given.
func (v value) items() []value {
	if !v.given() {
		return nil
	}
	if !v.isList() {
		v.fail("want a list")
		return nil
	}
	items := make([]value, len(v.node.Content))
	for i, n := range v.node.Content {
		items[i] = value{v.reading, n, v.path + "[" + strconv.Itoa(i) + "]", n.Line}
		if !items[i].given() {
			items[i].fail("want a value, or no item")
		}
	}
	return slices.DeleteFunc(items, func(v value) bool { return !v.given() })
}

// words are those of a list that must not be empty, or the one that stands alone.
func (v value) words() []value {
	if !v.given() {
		return nil
	}
	if v.node.Kind == yaml.ScalarNode {
		return []value{v}
	}
	items := v.items()
	if v.isList() && len(v.node.Content) == 0 {
		v.fail("an empty list selects nothing: leave the key out")
	}
	return slices.DeleteFunc(items, func(v value) bool { return !v.isWord() })
}

// isWord notes if a value is not a single one.
func (v value) isWord() bool {
	if v.given() && v.node.Kind != yaml.ScalarNode {
		v.fail("want a single value")
		return false
	}
	return v.given()
}

// word is a single value; "" if it is none.
func (v value) word() string {
	if !v.isWord() {
		return ""
	}
	return v.node.Value
}

// among is one of some words, and false if it is not.
func (v value) among(words ...string) (string, bool) {
	word := v.word()
	if slices.Contains(words, word) {
		return word, true
	}
	if v.isPlain() {
		v.fail("want %s", list(words, "or"))
	}
	return "", false
}

// isPlain reports whether a value can be judged: what is no single value was judged.
func (v value) isPlain() bool { return !v.given() || v.node.Kind == yaml.ScalarNode }

// truth is true or false; other if nothing is given.
func (v value) truth(other bool) bool {
	if !v.given() {
		return other
	}
	word, _ := v.among("true", "false")
	return word == "true"
}

// whole is a number from least to most; 0 if it is none.
func (v value) whole(least, most int, want string) int {
	word := v.word()
	n, err := strconv.Atoi(word)
	if err == nil && strconv.Itoa(n) == word && n >= least && n <= most {
		return n
	}
	if v.isPlain() {
		v.fail("want %s", want)
	}
	return 0
}

// list says words in a sentence: "a, b or c".
func list(words []string, and string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " " + and + " " + words[last]
}
