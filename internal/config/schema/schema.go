// Package schema describes settings as data: which values a key has, and what they mean. The lists of known keys, the documentation
// and the JSON Schema of the configuration file are made from the same descriptions.
package schema

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Kind is the kind of a value.
type Kind uint8

// The kinds.
const (
	Scalar  Kind = iota
	Bool         // true or false
	Number       // a whole number
	List         // of values
	Mapping      // of any keys to scalars
	Object       // a mapping with known keys
	Opaque       // any value of the configuration file, which is not read
)

// Type is which values a key has. The zero Type is any scalar.
type Type struct {
	Kind    Kind
	Values  []string // the scalars that are allowed; of a mapping, its values
	Pattern string   // a regular expression of further scalars; of a mapping, of its keys. "" = none, unless Values is nil, too
	Words   string   // what Pattern allows, for the documentation: "an absolute path"

	Min, Max int      // of a number, or of the length of a list; Max 0 = without a limit
	Item     *Type    // of a list
	Keys     []Key    // of an object
	Name     string   // of an object that is the value of several keys, which the documentation has once
	Some     []string // of an object: at least one of these keys has a value; nil = none is required
	Cases    []Case   // of an object
	Or       []Type   // in place of all others but Words: one of these

	Lenient bool // of the command line's kind: a list or mapping may be a text with commas, and a bool what strconv.ParseBool reads
	Blank   bool // "" is allowed, too
}

// Key is a key of an object.
type Key struct {
	Name     string
	Default  string // as a scalar of the file; "" = none
	Usage    string // the meaning, in one line
	Required bool
	Type
}

// Case is what holds for an object in which a key has one of some values.
type Case struct {
	Key    string
	Values []string // "" = the key is absent
	Then   []Key    // without usage: keys that are required then, have fewer values, or are Absent
}

// Absent is the type of a key that has no value.
var Absent = Type{Or: []Type{}}

// Names are the names of keys.
func Names(keys []Key) []string {
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.Name
	}
	return names
}

// OneOf is the type of these scalars.
func OneOf(values ...string) Type { return Type{Values: values} }

// Match is the type of the scalars that match a regular expression; words are what it allows.
func Match(pattern, words string) Type { return Type{Pattern: pattern, Words: words} }

// Int is the type of the whole numbers from least to most; most 0 = without a limit.
func Int(least, most int) Type { return Type{Kind: Number, Min: least, Max: most} }

// ListOf is the type of lists with at least so many items.
func ListOf(item Type, least int) Type { return Type{Kind: List, Item: &item, Min: least} }

// OneOrMore is the type of one value, or of a list of them that is not empty.
func OneOrMore(item Type) Type {
	return Type{Or: []Type{item, ListOf(item, 1)}, Words: item.String() + ", or a list"}
}

// ObjectOf is the type of mappings with these keys.
func ObjectOf(keys ...Key) Type { return Type{Kind: Object, Keys: keys} }

// String is the type in words: "`none`, `single` or `mixed`".
func (t Type) String() string {
	switch {
	case t.Or != nil:
		return t.Words
	case t.Kind == Bool:
		return "`true` or `false`"
	case t.Kind == Number && t.Max > 0:
		return fmt.Sprintf("%d to %d", t.Min, t.Max)
	case t.Kind == Number:
		return fmt.Sprintf("%d or more", t.Min)
	case t.Kind == List && t.Item.Kind == Object:
		return "a list of " + cmp.Or(t.Item.Name, "mapping") + "s"
	case t.Kind == List:
		return "a list of " + t.Item.String()
	case t.Kind == Mapping:
		return t.Words + " to " + t.choices()
	case t.Kind == Object:
		return "a " + cmp.Or(t.Name, "mapping")
	case t.Kind == Opaque:
		return "anything"
	}
	return t.choices()
}

// Scalars are the listed scalars of the type, of its items and of its alternatives, each once. A mapping has none.
func (t Type) Scalars() []string {
	var all []string
	if t.Kind == Scalar {
		all = t.Values
	}
	inner := t.Or
	if t.Item != nil {
		inner = append(inner[:len(inner):len(inner)], *t.Item)
	}
	for _, i := range inner {
		for _, s := range i.Scalars() {
			if !slices.Contains(all, s) {
				all = append(all[:len(all):len(all)], s)
			}
		}
	}
	return all
}

// choices are the scalars in words.
func (t Type) choices() string {
	var parts []string
	for _, v := range t.Values {
		parts = append(parts, "`"+v+"`")
	}
	switch {
	case t.Words != "" && t.Kind != Mapping:
		parts = append(parts, t.Words)
	case t.Values == nil:
		parts = append(parts, "text")
	}
	last := len(parts) - 1
	if last == 0 {
		return parts[0]
	}
	return strings.Join(parts[:last], ", ") + " or " + parts[last]
}
