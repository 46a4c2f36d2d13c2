// Package clientconfig reads the plugin block of a file of a Nomad client's configuration, so that an operator can check it before a
// restart. It reads HCL 1 and JSON with the library that Nomad has for these files (command/agent/config_parse.go).
package clientconfig

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/hcl/hcl/ast"
	"github.com/hashicorp/hcl/hcl/parser"
	"github.com/hashicorp/hcl/hcl/token"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/setting"
)

// Read returns the keys of the config block of a plugin in the file at path. The errors are the reason why the file can't be read, its
// syntax error, and a missing or repeated block or key, each with path and line.
func Read(path, plugin string) (config.Keys, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return config.Keys{}, fmt.Errorf("configuration of the Nomad client: %w", err)
	}
	file, err := parse(text)
	if at, ok := errors.AsType[*parser.PosError](err); ok {
		return config.Keys{}, fmt.Errorf("%s:%d: %w", path, at.Pos.Line, at.Err)
	}
	if err != nil {
		return config.Keys{}, fmt.Errorf("%s: %w", path, err)
	}
	r := reader{path: path, plugin: plugin}
	block, err := r.block(file.Node.(*ast.ObjectList)) // of HCL and of JSON
	if err != nil {
		return config.Keys{}, err
	}
	return r.keys(block)
}

// parse parses HCL 1 or JSON. The parser panics at some texts that are neither.
func parse(text []byte) (file *ast.File, err error) {
	defer func() {
		if problem := recover(); problem != nil {
			err = fmt.Errorf("neither HCL nor JSON: %v", problem)
		}
	}()
	return hcl.ParseBytes(text)
}

// reader reads one file.
type reader struct{ path, plugin string }

func (r reader) where(at token.Pos, key string) string {
	if at.Line == 0 { // JSON
		return r.path + ": " + key
	}
	return fmt.Sprintf("%s:%d: %s", r.path, at.Line, key)
}

// block is the content of the plugin's config block.
func (r reader) block(root *ast.ObjectList) (*ast.ObjectList, error) {
	plugins := contentOf(root, "plugin")
	if len(plugins.Filter(r.plugin).Items) == 0 {
		remedy := fmt.Sprintf("want plugin %q { config { ... } }", r.plugin)
		if others := names(plugins); others != nil {
			remedy += ", the name of the plugin's file; the file has " + strings.Join(others, ", ")
		}
		return nil, &setting.Error{Key: r.path + ": plugin", Remedy: remedy}
	}
	plugin, err := r.one(plugins, r.plugin, "plugin")
	if err != nil {
		return nil, err
	}
	return r.one(plugin, "config", "config")
}

// one is the content of the one block with a name, or none; label is the name of the block in errors.
func (r reader) one(list *ast.ObjectList, name, label string) (*ast.ObjectList, error) {
	blocks := 0
	for _, item := range list.Filter(name).Items {
		if len(item.Keys) > 0 {
			continue // JSON has one item for each value below
		}
		if blocks++; blocks > 1 {
			return nil, &setting.Error{Key: r.where(item.Val.Pos(), label), Value: name, Remedy: "given twice: want one block"}
		}
		if _, isLiteral := item.Val.(*ast.LiteralType); isLiteral {
			return nil, &setting.Error{Key: r.where(item.Val.Pos(), label), Value: fmt.Sprint(value(item.Val)), Remedy: "want a block"}
		}
	}
	return contentOf(list, name), nil
}

// contentOf is what all objects with a name contain. Those of JSON may be in lists.
func contentOf(list *ast.ObjectList, name string) *ast.ObjectList {
	content := &ast.ObjectList{}
	var add func(ast.Node)
	add = func(n ast.Node) {
		switch n := n.(type) {
		case *ast.ObjectType:
			content.Items = append(content.Items, n.List.Items...)
		case *ast.ListType:
			for _, item := range n.List {
				add(item)
			}
		}
	}
	for _, item := range list.Filter(name).Items {
		if len(item.Keys) > 0 {
			content.Add(item)
		} else {
			add(item.Val)
		}
	}
	return content
}

// names are the first keys of items, each once.
func names(list *ast.ObjectList) (names []string) {
	for _, item := range list.Items {
		if name := fmt.Sprintf("%q", nameOf(item)); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func nameOf(item *ast.ObjectItem) string {
	name, _ := item.Keys[0].Token.Value().(string)
	return name
}

// keys are the keys of a block with their places.
func (r reader) keys(block *ast.ObjectList) (config.Keys, error) {
	keys := config.Keys{Values: map[string]any{}, Where: map[string]string{}}
	var errs []error
	for _, item := range block.Items {
		name := nameOf(item)
		where := r.where(item.Pos(), name)
		if len(item.Keys) == 2 { // a mapping in JSON
			values, _ := keys.Values[name].(map[string]any)
			if values == nil {
				values = map[string]any{}
			}
			values[fmt.Sprint(item.Keys[1].Token.Value())] = value(item.Val)
			keys.Values[name], keys.Where[name] = values, where
			continue
		}
		if _, twice := keys.Values[name]; twice {
			errs = append(errs, &setting.Error{Key: where, Remedy: "given twice"})
			continue
		}
		keys.Values[name], keys.Where[name] = value(item.Val), where
	}
	return keys, errors.Join(errs...)
}

// value is a value as Nomad gives it to a plugin.
func value(n ast.Node) any {
	switch n := n.(type) {
	case *ast.ListType:
		items := []any{}
		for _, item := range n.List {
			items = append(items, value(item))
		}
		return items
	case *ast.ObjectType:
		values := map[string]any{}
		for _, item := range n.List.Items {
			values[nameOf(item)] = value(item.Val)
		}
		return values
	case *ast.LiteralType:
		if n.Token.Type == token.NUMBER || n.Token.Type == token.FLOAT {
			return n.Token.Text // as it is written
		}
		return n.Token.Value()
	}
	return nil
}
