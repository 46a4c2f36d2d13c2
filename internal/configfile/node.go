package configfile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// IsNull reports whether a value is none: what stands under "key:".
func IsNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// nothing reports whether a value is empty or false all the way down.
func nothing(n *yaml.Node) bool {
	if n.Kind == yaml.ScalarNode {
		return IsNull(n) || n.Value == "" || n.Value == "false"
	}
	for i, item := range n.Content {
		name := n.Kind == yaml.MappingNode && i%2 == 0
		if !name && !nothing(item) {
			return false
		}
	}
	return true
}

// KeyText is a key of a mapping in one printable word.
func KeyText(n *yaml.Node) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return "(not a word)"
	case n.Value == "" || strings.ContainsFunc(n.Value, func(r rune) bool { return !unicode.IsPrint(r) }):
		return strconv.Quote(n.Value)
	}
	return n.Value
}

// largest is how many values a file may have, with each alias counted as what it stands for.
const largest = 100_000

var errLargest = &problem{text: fmt.Sprintf("more than %d values: are aliases nested?", largest)}

// expand returns a value with everything that aliases and merge keys (<<) stand for in their place. What an alias
// brings stands, for messages, in the line of the alias.
func expand(n *yaml.Node) (*yaml.Node, error) {
	e := expansion{left: largest, open: map[*yaml.Node]bool{}}
	return e.of(n)
}

type expansion struct {
	left int
	open map[*yaml.Node]bool // those within which the present one stands
}

func (e *expansion) of(n *yaml.Node) (*yaml.Node, error) {
	if e.left--; e.left < 0 {
		return nil, errLargest
	}
	if n.Kind == yaml.AliasNode {
		whole, err := e.of(n.Alias)
		if err != nil {
			return nil, err
		}
		whole.Line = n.Line
		return whole, nil
	}
	if e.open[n] {
		return nil, &problem{n.Line, fmt.Sprintf("the value of anchor %q contains itself", n.Anchor)}
	}
	e.open[n] = true
	defer delete(e.open, n)
	whole := *n
	whole.Content = nil
	for _, item := range n.Content {
		item, err := e.of(item)
		if err != nil {
			return nil, err
		}
		whole.Content = append(whole.Content, item)
	}
	if whole.Kind == yaml.MappingNode {
		return &whole, merge(&whole)
	}
	return &whole, nil
}

// merge replaces the merge keys of a mapping by what they bring. The mapping's own keys win over those, and of
// several mappings the first.
func merge(n *yaml.Node) error {
	var own, brought []*yaml.Node
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
				return &problem{pair[0].Line, "<<: want a mapping, or a list of mappings"}
			}
			brought = append(brought, m.Content...)
		}
	}
	if len(brought) == 0 {
		n.Content = own
		return nil
	}
	seen := map[string]bool{}
	for pair := range slices.Chunk(own, 2) {
		seen[KeyText(pair[0])] = true
	}
	for pair := range slices.Chunk(brought, 2) {
		if key := KeyText(pair[0]); !seen[key] {
			seen[key] = true
			own = append(own, pair...)
		}
	}
	n.Content = own
	return nil
}

// Nearest is the name that what was written most likely means: one that it is a part of, or the one that takes the
// fewest changes of a letter to get to. Of several it is the first. There must be one.
func Nearest(written string, names []string) string {
	written = strings.ToLower(written)
	return slices.MinFunc(names, func(a, b string) int { return distance(written, a) - distance(written, b) })
}

// distance is 1 to a name of which s is a part, and Levenshtein's to others. It is blind to the case of name.
func distance(s, name string) int {
	name = strings.ToLower(name)
	if len(s) > 2 && s != name && strings.Contains(name, s) {
		return 1
	}
	from, to := []rune(s), []rune(name)
	row := make([]int, len(to)+1)
	for j := range row {
		row[j] = j
	}
	for i := range from {
		diagonal := row[0]
		row[0] = i + 1
		for j := range to {
			change := diagonal
			if from[i] != to[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(to)]
}
