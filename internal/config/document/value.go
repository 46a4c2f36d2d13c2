package document

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Value is a value of a document with its place. A method that can't read the value adds a problem to the document. null
// and ~ are as if the key were absent.
type Value struct {
	doc  *Document
	node *yaml.Node // nil = absent
	path string     // "policy.rules[0].replicas"; "" = the root
	line int        // of the key or list item; of the enclosing value if absent
}

// Path is the path of the value: "policy.rules[0].replicas".
func (v Value) Path() string { return v.path }

// Line is the line of the value's key, or of the list item.
func (v Value) Line() int { return v.line }

// Where is the place of the value as errors name it: "/etc/tandem.yaml:12: policy.rules[0].replicas".
func (v Value) Where() string {
	if v.path == "" {
		return fmt.Sprintf("%s:%d", v.doc.Path, v.line)
	}
	return fmt.Sprintf("%s:%d: %s", v.doc.Path, v.line, v.path)
}

// Failf adds a problem with the value; the text is the remedy.
func (v Value) Failf(format string, args ...any) {
	remedy := fmt.Sprintf(format, args...)
	var err error = &setting.Error{Key: v.Where(), Value: v.Text(), Remedy: remedy}
	if v.path == "" {
		err = errors.New(v.Where() + ": " + remedy)
	}
	v.doc.AddProblem(v.line, err)
}

// Text is the value in an error: a scalar, "[...]" or "{...}"; "" if it is absent.
func (v Value) Text() string {
	switch {
	case !v.Given():
		return ""
	case v.IsScalar():
		return v.node.Value
	case v.IsList():
		return "[...]"
	}
	return "{...}"
}

// Given reports whether there is a value other than null.
func (v Value) Given() bool { return v.node != nil && !isNull(v.node) }

// IsScalar reports whether there is a value that is a scalar.
func (v Value) IsScalar() bool { return v.Given() && v.node.Kind == yaml.ScalarNode }

// IsList reports whether there is a value that is a list.
func (v Value) IsList() bool { return v.Given() && v.node.Kind == yaml.SequenceNode }

// IsMapping reports whether there is a value that is a mapping.
func (v Value) IsMapping() bool { return v.Given() && v.node.Kind == yaml.MappingNode }

// IsEmpty reports whether a value and all that it contains is absent, empty or false.
func (v Value) IsEmpty() bool { return v.node == nil || isEmpty(v.node) }

// Items are the items of a list; none if it is absent.
func (v Value) Items() []Value {
	if !v.Given() {
		return nil
	}
	if !v.IsList() {
		v.Failf("want a list")
		return nil
	}
	var items []Value
	for i, n := range v.node.Content {
		item := Value{v.doc, n, v.path + "[" + strconv.Itoa(i) + "]", n.Line}
		if !item.Given() {
			item.Failf("want a value, or no item")
			continue
		}
		items = append(items, item)
	}
	return items
}

// Scalars are the scalars of a list that is not empty, or one scalar.
func (v Value) Scalars() []Value {
	if v.IsScalar() {
		return []Value{v}
	}
	items := v.Items()
	if v.IsList() && len(v.node.Content) == 0 {
		v.Failf("an empty list selects nothing: leave the key out")
	}
	return slices.DeleteFunc(items, func(v Value) bool {
		_, ok := v.Scalar()
		return !ok
	})
}

// Scalar is the text of a scalar; "" if it is absent. It is false for a list or a mapping.
func (v Value) Scalar() (text string, ok bool) {
	if v.Given() && !v.IsScalar() {
		v.Failf("want a single value")
		return "", false
	}
	return v.Text(), true
}

// OneOf is a scalar that is one of the choices; false for another value.
func (v Value) OneOf(choices ...string) (text string, ok bool) {
	text, ok = v.Scalar()
	if ok && !slices.Contains(choices, text) {
		v.Failf("want %s", Choice(choices))
		return "", false
	}
	return text, ok
}

// Bool is true or false; byDefault if the value is absent.
func (v Value) Bool(byDefault bool) bool {
	if !v.Given() {
		return byDefault
	}
	text, _ := v.OneOf("true", "false")
	return text == "true"
}

// Int is a decimal number from least to most; 0 for another value, with want as the remedy.
func (v Value) Int(least, most int, want string) int {
	text, ok := v.Scalar()
	if n, err := strconv.Atoi(text); err == nil && strconv.Itoa(n) == text && n >= least && n <= most {
		return n
	}
	if ok {
		v.Failf("want %s", want)
	}
	return 0
}

// Choice lists the choices of a value: "a, b or c".
func Choice(choices []string) string {
	last := len(choices) - 1
	if last == 0 {
		return choices[0]
	}
	return strings.Join(choices[:last], ", ") + " or " + choices[last]
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// isEmpty reports whether a value and all that it contains is null, empty or false.
func isEmpty(n *yaml.Node) bool {
	if n.Kind == yaml.ScalarNode {
		return isNull(n) || n.Value == "" || n.Value == "false"
	}
	for i, item := range n.Content {
		isKey := n.Kind == yaml.MappingNode && i%2 == 0
		if !isKey && !isEmpty(item) {
			return false
		}
	}
	return true
}

// keyText is a key of a mapping in one printable line.
func keyText(n *yaml.Node) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return "(not a scalar)"
	case n.Value == "" || strings.ContainsFunc(n.Value, func(r rune) bool { return !unicode.IsPrint(r) }):
		return strconv.Quote(n.Value)
	}
	return n.Value
}
