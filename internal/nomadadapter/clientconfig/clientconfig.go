// Package clientconfig reads the plugin block of a file of a Nomad client's configuration, so that an operator can check it before a
// restart. It reads HCL 1 and JSON with the library that Nomad has for these files (command/agent/config_parse.go).
package clientconfig

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/hcl/hcl/ast"
	"github.com/hashicorp/hcl/hcl/token"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// NoBlockError means that a file has no block of the plugin.
type NoBlockError struct{ problem *setting.Error }

func (e *NoBlockError) Error() string { return e.problem.Error() }

// Unwrap returns a *setting.Error.
func (e *NoBlockError) Unwrap() error { return e.problem }

// Read returns the keys of the config block of a plugin in the file at path. The errors are the reason why the file can't be read, its
// syntax error, a missing block (*NoBlockError), a repeated block or key, and a key outside of config, each with path and line.
func Read(path, plugin string) (config.Keys, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return config.Keys{}, fmt.Errorf("configuration of the Nomad client: %w", err)
	}
	root, err := Parse(path, text)
	if err != nil {
		return config.Keys{}, err
	}
	r := reader{path: path, plugin: plugin}
	block, err := r.block(root)
	if block == nil {
		return config.Keys{}, err
	}
	keys, err1 := r.keys(block)
	return keys, errors.Join(err, err1)
}

// reader reads one file.
type reader struct{ path, plugin string }

func (r reader) where(at token.Pos, key string) string { return Place(r.path, at.Line) + ": " + key }

// block is the content of the plugin's config block.
func (r reader) block(root *ast.ObjectList) (*ast.ObjectList, error) {
	plugins := Content(root, "plugin")
	if len(plugins.Filter(r.plugin).Items) == 0 {
		remedy := fmt.Sprintf("want plugin %q { config { ... } }", r.plugin)
		if others := names(plugins); others != nil {
			remedy += ", the name of the plugin's file; the file has " + strings.Join(others, ", ")
		}
		return nil, &NoBlockError{&setting.Error{Key: r.path + ": plugin", Remedy: remedy}}
	}
	plugin, err := r.one(plugins, r.plugin, "plugin")
	if err != nil {
		return nil, err
	}
	block, err := r.one(plugin, "config", "config")
	return block, errors.Join(err, r.outside(plugin))
}

// outside has the keys of the plugin block that Nomad ignores without a word: all but config and args.
func (r reader) outside(plugin *ast.ObjectList) error {
	var errs []error
	for _, item := range plugin.Items {
		if name := Name(item); name != "config" && name != "args" {
			errs = append(errs, &setting.Error{
				Key: r.where(item.Pos(), name), Value: shown(item.Val), Remedy: fmt.Sprintf("Nomad ignores keys of plugin %q outside of config { }: move it there", r.plugin),
			})
		}
	}
	return errors.Join(errs...)
}

// shown is a value in an error.
func shown(n ast.Node) string {
	if _, isBlock := n.(*ast.ObjectType); isBlock {
		return "{ ... }"
	}
	return fmt.Sprint(Value(n))
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
			return nil, &setting.Error{Key: r.where(item.Val.Pos(), label), Value: fmt.Sprint(Value(item.Val)), Remedy: "want a block"}
		}
	}
	return Content(list, name), nil
}

// names are the first keys of items, each once.
func names(list *ast.ObjectList) (names []string) {
	for _, item := range list.Items {
		if name := strconv.Quote(Name(item)); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// keys are the keys of a block with their places.
func (r reader) keys(block *ast.ObjectList) (config.Keys, error) {
	keys := config.Keys{Values: map[string]any{}, Where: map[string]string{}}
	var errs []error
	for _, item := range block.Items {
		name := Name(item)
		where := r.where(item.Pos(), name)
		if len(item.Keys) == 2 { // a mapping in JSON
			values, _ := keys.Values[name].(map[string]any)
			if values == nil {
				values = map[string]any{}
			}
			values[fmt.Sprint(item.Keys[1].Token.Value())] = Value(item.Val)
			keys.Values[name], keys.Where[name] = values, where
			continue
		}
		if _, twice := keys.Values[name]; twice {
			errs = append(errs, &setting.Error{Key: where, Remedy: "given twice"})
			continue
		}
		keys.Values[name], keys.Where[name] = Value(item.Val), where
	}
	return keys, errors.Join(errs...)
}
