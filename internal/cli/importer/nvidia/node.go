package nvidia

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config/document"
)

// node is a YAML value that can be changed; a nil node is absent.
type node yaml.Node

// parse returns the documents of a text, with aliases and merge keys replaced by what they mean.
func parse(path string, text []byte) ([]*node, error) {
	var docs []*node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var next yaml.Node
		switch err := decoder.Decode(&next); {
		case errors.Is(err, io.EOF):
			return docs, nil
		case err != nil:
			return nil, fmt.Errorf("%s: %s", path, strings.TrimPrefix(err.Error(), "yaml: "))
		case len(next.Content) == 0 || next.Content[0].Tag == "!!null":
			continue
		}
		expanded, err := document.Expand(next.Content[0])
		if err != nil {
			return nil, fmt.Errorf("%s%w", path, err)
		}
		docs = append(docs, (*node)(expanded))
	}
}

// mapping is the node if it is one.
func (n *node) mapping() *node { return n.of(yaml.MappingNode) }

// sequence is the node if it is one that has items.
func (n *node) sequence() *node {
	if s := n.of(yaml.SequenceNode); s != nil && len(s.Content) > 0 {
		return s
	}
	return nil
}

func (n *node) of(kind yaml.Kind) *node {
	if n == nil || n.Kind != kind {
		return nil
	}
	return n
}

// items are those of a sequence.
func (n *node) items() (items []*node) {
	if s := n.sequence(); s != nil {
		for _, c := range s.Content {
			items = append(items, (*node)(c))
		}
	}
	return items
}

// keys are those of a mapping, in order.
func (n *node) keys() (keys []string) {
	if m := n.mapping(); m != nil {
		for pair := range slices.Chunk(m.Content, 2) {
			keys = append(keys, pair[0].Value)
		}
	}
	return keys
}

// get is the value at a path such as "flags.plugin"; nil if it is absent or null.
func (n *node) get(path string) *node {
	key, rest, nested := strings.Cut(path, ".")
	m := n.mapping()
	if m == nil {
		return nil
	}
	for pair := range slices.Chunk(m.Content, 2) {
		if pair[0].Value != key || pair[1].Tag == "!!null" {
			continue
		}
		if nested {
			return (*node)(pair[1]).get(rest)
		}
		return (*node)(pair[1])
	}
	return nil
}

// find is the value at a path; unlike get, also null.
func (n *node) find(path string) *node {
	key, rest, nested := strings.Cut(path, ".")
	value := n.value(key)
	if !nested || value == nil {
		return value
	}
	return value.find(rest)
}

// text is the text of a scalar; "" for another value.
func (n *node) text() string {
	if s := n.of(yaml.ScalarNode); s != nil && s.Tag != "!!null" {
		return s.Value
	}
	return ""
}

// isString and isBool report whether a value is what Helm's typeIs reports.
func (n *node) isString() bool { return n.of(yaml.ScalarNode) != nil && n.Tag == "!!str" }
func (n *node) isBool() bool   { return n.of(yaml.ScalarNode) != nil && n.Tag == "!!bool" }

// given reports whether a value is there and not empty.
func (n *node) given() bool {
	switch {
	case n == nil:
		return false
	case n.Kind == yaml.ScalarNode:
		return n.Tag != "!!null" && n.Value != ""
	}
	return len(n.Content) > 0
}

// brief is the value in one line, shortened.
func (n *node) brief() string {
	if n == nil {
		return ""
	}
	flow := *n
	flow.Style = yaml.FlowStyle
	flow.HeadComment, flow.LineComment, flow.FootComment = "", "", ""
	text, err := yaml.Marshal((*yaml.Node)(&flow))
	if err != nil {
		return "..."
	}
	short := strings.Join(strings.Fields(string(text)), " ")
	if len(short) > 60 {
		short = short[:57] + "..."
	}
	return short
}

// remove removes a key of a mapping.
func (n *node) remove(key string) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			n.Content = slices.Delete(n.Content, i, i+2)
			return
		}
	}
}

// put sets the value at a path of a mapping, and creates the mappings of the path.
func (n *node) put(path string, value *yaml.Node) {
	key, rest, nested := strings.Cut(path, ".")
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value != key {
			continue
		}
		if nested && n.Content[i+1].Kind == yaml.MappingNode {
			(*node)(n.Content[i+1]).put(rest, value)
			return
		}
		n.Content = slices.Delete(n.Content, i, i+2) // null, or to be replaced
		break
	}
	if nested {
		m := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		(*node)(m).put(rest, value)
		value = m
	}
	n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, value)
}

// scalar returns a value for a text: plain where YAML reads it as the same text, quoted otherwise.
func scalar(text string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: text}
	if text == "" {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}

// list returns a list in one line.
func list(items []string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
	for _, item := range items {
		n.Content = append(n.Content, scalar(item))
	}
	return n
}
