package nvidia

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// set records the effect of a value, and of those in it that have none so far.
func (s *source) set(n *node, effect importer.Effect) {
	s.account.Set(n, effect)
	for _, in := range n.Content {
		if !s.account.Has((*node)(in)) {
			s.set((*node)(in), effect)
		}
	}
	for _, d := range s.embedded[n] {
		s.set(d, effect)
	}
}

// take records that values have their meaning in the result, or that they are of known keys and set nothing.
func (s *source) take(nodes ...*node) {
	for _, n := range nodes {
		if n != nil {
			s.set(n, importer.Taken)
		}
	}
}

// silence records that values have no effect, and adds no note.
func (s *source) silence(nodes ...*node) {
	for _, n := range nodes {
		if n != nil {
			s.set(n, importer.NoEffect)
		}
	}
}

// note adds a note about a value; key is its key, or what it is.
func (s *source) note(effect importer.Effect, n *node, key, text, remedy string) {
	if n != nil {
		s.set(n, effect)
	}
	s.notes.Add(effect, s.at(n, key), text, remedy)
}

// rest adds a note about each of the largest values in n that have no recorded effect so far; key is that of n. A key that sets nothing needs none,
// if it is known.
func (s *source) rest(effect importer.Effect, n *node, key, text, remedy string) {
	if n == nil {
		return
	}
	for _, v := range s.account.Open(s.valueOf(n, key)) {
		open, _ := v.ID.(*node)
		s.set(open, effect)
		switch {
		case open == n && len(n.Content) == 0 && n.Kind == yaml.MappingNode: // no values
			s.set(n, importer.Taken)
		case open.given() || effect == importer.Unknown:
			s.notes.Add(effect, v.Where, open.brief()+" left out: "+text, remedy)
		}
	}
}

// values are those of the input.
func (s *source) values() importer.Value {
	all := importer.Value{ID: s}
	for _, d := range s.docs {
		all.In = append(all.In, s.valueOf(d, ""))
	}
	for _, c := range s.configs {
		if c.root != nil && !slices.Contains(s.docs, c.root) {
			all.In = append(all.In, s.valueOf(c.root, ""))
		}
	}
	return all
}

// valueOf is a value with a key. That of a text which is a document itself has its values.
func (s *source) valueOf(n *node, key string) importer.Value {
	v := importer.Value{ID: n, Where: s.at(n, key)}
	add := func(in *yaml.Node, key string) { v.In = append(v.In, s.valueOf((*node)(in), key)) }
	for _, d := range s.embedded[n] {
		add((*yaml.Node)(d), key)
	}
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			add(n.Content[i+1], strings.TrimPrefix(key+"."+n.Content[i].Value, "."))
		}
	case yaml.SequenceNode:
		for i, item := range n.Content {
			add(item, fmt.Sprintf("%s[%d]", key, i))
		}
	default: // a scalar has no values, and aliases are replaced
	}
	return v
}

// text parses the text of a scalar, as a document of its own.
func (s *source) text(n *node, key string) ([]*node, error) {
	line := n.Line
	if n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) == 0 {
		line--
	}
	docs, err := parse(s.at(n, key), []byte(n.text()))
	for _, d := range docs {
		d.move(line)
	}
	if err == nil {
		s.embedded[n] = docs
	}
	return docs, err
}

// move adds to the lines of a node and of those in it.
func (n *node) move(lines int) {
	n.Line += lines
	for _, in := range n.Content {
		(*node)(in).move(lines)
	}
}
