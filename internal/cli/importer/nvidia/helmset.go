package nvidia

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// helmSet is one value that a helm command gives.
type helmSet struct {
	flag      string // "--set", "--set-string", "--set-file", "-f"
	key, text string // "-f" has no key
}

var errNoValue = errors.New("has no value")

// helmSets are the values that a command gives, those of files first, as Helm reads them.
func helmSets(c command) (sets []helmSet, err error) {
	var files []helmSet
	for i := 2; i < len(c.words); i++ {
		flag, text, joined := strings.Cut(c.words[i], "=")
		switch flag {
		case "-f", "--values", "--set", "--set-string", "--set-file":
		default:
			continue
		}
		if !joined {
			if i++; i == len(c.words) {
				return nil, fmt.Errorf("%s %w", flag, errNoValue)
			}
			text = c.words[i]
		}
		if flag == "-f" || flag == "--values" {
			files = append(files, helmSet{flag: "-f", text: text})
			continue
		}
		for _, item := range splitSets(text) {
			key, value, ok := strings.Cut(item, "=")
			if !ok {
				return nil, fmt.Errorf("%s %s: %w", flag, item, errNoValue)
			}
			sets = append(sets, helmSet{flag, key, value})
		}
	}
	return slices.Concat(files, sets), nil
}

// splitSets splits "a=1,b={2,3}" at the commas that separate values.
func splitSets(text string) (items []string) {
	depth, begin := 0, 0
	for i, r := range text {
		switch {
		case r == '{':
			depth++
		case r == '}':
			depth--
		case r == ',' && depth == 0 && (i == 0 || text[i-1] != '\\'):
			items = append(items, text[begin:i])
			begin = i + 1
		}
	}
	return append(items, text[begin:])
}

// setValue sets a value at a key such as "devicePlugin.env[0].name".
func setValue(root *node, key, text string, line int, isString bool) {
	n := root
	parts := strings.Split(strings.ReplaceAll(key, `\.`, "\x00"), ".")
	for i, part := range parts {
		part = strings.ReplaceAll(part, "\x00", ".")
		name, index, isItem := strings.Cut(strings.TrimSuffix(part, "]"), "[")
		last := i == len(parts)-1
		if !isItem {
			if last {
				n.putKey(name, helmValue(text, line, isString))
				return
			}
			n = n.childMapping(name, line)
			continue
		}
		at, err := strconv.ParseUint(index, 10, 8)
		if err != nil {
			return
		}
		n = n.childItem(name, int(at), line)
		if last {
			*n = node(*helmValue(text, line, isString))
		}
	}
}

// putKey sets the value of a key that may have dots.
func (n *node) putKey(key string, value *yaml.Node) {
	n.remove(key)
	n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key, Line: value.Line}, value)
}

func (n *node) childMapping(name string, line int) *node {
	if child := n.value(name).mapping(); child != nil {
		return child
	}
	child := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: line}
	n.putKey(name, child)
	return (*node)(child)
}

// childItem is an item of a list, a mapping if it is new.
func (n *node) childItem(name string, at, line int) *node {
	items := n.value(name)
	if items == nil || items.Kind != yaml.SequenceNode {
		items = &node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: line}
		n.putKey(name, (*yaml.Node)(items))
	}
	for len(items.Content) <= at {
		items.Content = append(items.Content, &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: line})
	}
	return (*node)(items.Content[at])
}

// helmValue is a value as Helm reads it: --set knows bools, numbers and null.
func helmValue(text string, line int, isString bool) *yaml.Node {
	n := scalar(strings.ReplaceAll(text, `\,`, ","))
	n.Line, n.Tag = line, "!!str"
	switch _, err := strconv.ParseInt(text, 10, 64); {
	case isString:
	case text == "true" || text == "false":
		n.Tag = "!!bool"
	case text == "null":
		n.Tag = "!!null"
	case err == nil:
		n.Tag = "!!int"
	}
	return n
}
