package nvidia_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/test/check"
)

// An unknown key is named, wherever in an input it is: by its own name, or as a part of the object in which it is.
func TestEachLeaf(t *testing.T) {
	files, err := filepath.Glob("testdata/[cep]*/*.yaml")
	check.NoError(t, err)
	asked := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		check.NoError(t, err)
		if _, err := nvidia.Import(nvidia.Input{Path: "in.yaml", Text: text}); err != nil {
			continue
		}
		for i := 0; ; i++ {
			changed, path, ok := withKey(t, text, i)
			if !ok {
				break
			}
			asked++
			r, err := nvidia.Import(nvidia.Input{Path: "in.yaml", Text: changed})
			if nothing := (*importer.NothingError)(nil); errors.As(err, &nothing) {
				r.Notes = nothing.Notes
			} else if err != nil {
				continue // an error is enough
			}
			if !slices.ContainsFunc(r.Notes, func(n importer.Note) bool { return names(n, path) }) {
				t.Errorf("%s: no note names %s\n%s", file, path, render(r, err))
			}
		}
	}
	if asked < 300 {
		t.Errorf("%d keys", asked)
	}
}

const strange = "strangeKey"

// names reports whether a note is about the key, or about an object that contains it.
func names(n importer.Note, path string) bool {
	if strings.Contains(n.Where, strange) || strings.Contains(n.Text, strange) {
		return true
	}
	_, key, _ := strings.Cut(n.Where, ": ")
	return strings.HasPrefix(path, key+".") || strings.HasPrefix(path, key+"[") || strings.Contains(n.Text, "no object of the plugin") || strings.HasPrefix(key, "container ")
}

// withKey adds a key to the mapping with a number, counted over all documents of a text, and returns the path of the key.
func withKey(t *testing.T, text []byte, number int) (changed []byte, path string, ok bool) {
	t.Helper()
	var out bytes.Buffer
	decoder, encoder := yaml.NewDecoder(bytes.NewReader(text)), yaml.NewEncoder(&out)
	var visit func(n *yaml.Node, at string)
	visit = func(n *yaml.Node, at string) {
		if n.Kind == yaml.MappingNode {
			if number == 0 {
				ok, path = true, strings.TrimPrefix(at+"."+strange, ".")
			}
			if number--; number == -1 {
				n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: strange}, &yaml.Node{Kind: yaml.ScalarNode, Value: "1"})
				return
			}
		}
		for i, in := range n.Content {
			switch {
			case n.Kind == yaml.SequenceNode:
				visit(in, at+"["+string(rune('0'+i%10))+"]")
			case n.Kind == yaml.MappingNode && i%2 == 1:
				visit(in, strings.TrimPrefix(at+"."+n.Content[i-1].Value, "."))
			case n.Kind == yaml.DocumentNode:
				visit(in, at)
			}
		}
	}
	for {
		var doc yaml.Node
		if decoder.Decode(&doc) != nil {
			break
		}
		visit(&doc, "")
		check.NoError(t, encoder.Encode(&doc))
	}
	return out.Bytes(), path, ok
}
