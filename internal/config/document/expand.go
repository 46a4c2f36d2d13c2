package document

import (
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"
)

// maxValues limits the values of a file; an alias counts as the values that replace it.
const maxValues = 100_000

var errTooManyValues = &syntaxError{text: fmt.Sprintf("more than %d values: are aliases nested?", maxValues)}

// Expand returns a copy of a value with aliases and merge keys (<<) replaced by their values, and without anchors. What replaces an alias has
// the line of the alias. Its error follows the path of the file.
func Expand(n *yaml.Node) (*yaml.Node, error) {
	e := expansion{left: maxValues, open: map[*yaml.Node]bool{}}
	return e.of(n)
}

type expansion struct {
	left int                 // values until the limit
	open map[*yaml.Node]bool // the values that contain the present one
}

func (e *expansion) of(n *yaml.Node) (*yaml.Node, error) {
	if e.left--; e.left < 0 {
		return nil, errTooManyValues
	}
	if n.Kind == yaml.AliasNode {
		expanded, err := e.of(n.Alias)
		if err != nil {
			return nil, err
		}
		expanded.Line = n.Line
		return expanded, nil
	}
	if e.open[n] {
		return nil, &syntaxError{n.Line, fmt.Sprintf("the value of anchor %q contains itself", n.Anchor)}
	}
	e.open[n] = true
	defer delete(e.open, n)
	expanded := *n
	expanded.Anchor, expanded.Content = "", nil
	for _, item := range n.Content {
		item, err := e.of(item)
		if err != nil {
			return nil, err
		}
		expanded.Content = append(expanded.Content, item)
	}
	if expanded.Kind == yaml.MappingNode {
		return &expanded, merge(&expanded)
	}
	return &expanded, nil
}

// merge replaces the merge keys of a mapping by their pairs. A key of the mapping itself has precedence, then the first
// mapping that has the key.
func merge(n *yaml.Node) error {
	var own, merged []*yaml.Node
	for pair := range slices.Chunk(n.Content, 2) {
		if pair[0].Tag != "!!merge" {
			own = append(own, pair...)
			continue
		}
		from := []*yaml.Node{pair[1]}
		if pair[1].Kind == yaml.SequenceNode {
			from = pair[1].Content
		}
		for _, m := range from {
			if m.Kind != yaml.MappingNode {
				return &syntaxError{pair[0].Line, "<<: want a mapping, or a list of mappings"}
			}
			merged = append(merged, m.Content...)
		}
	}
	seen := map[string]bool{}
	if len(merged) > 0 {
		for pair := range slices.Chunk(own, 2) {
			seen[keyText(pair[0])] = true
		}
	}
	for pair := range slices.Chunk(merged, 2) {
		if key := keyText(pair[0]); !seen[key] {
			seen[key] = true
			own = append(own, pair...)
		}
	}
	n.Content = own
	return nil
}
