package clientconfig

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/hcl/hcl/ast"
	"github.com/hashicorp/hcl/hcl/parser"
)

// Parse parses a text in HCL 1 or JSON; path is for messages. As for Nomad, a key that HCL has twice in one block is an error. The values
// of all nodes can be read with Value.
func Parse(path string, text []byte) (*ast.ObjectList, error) {
	var root *ast.ObjectList
	err := guard(func() error {
		if err := checkDepth(text); err != nil {
			return err
		}
		file, err := hcl.ParseBytes(text)
		if err != nil {
			return err
		}
		ok := false
		if root, ok = file.Node.(*ast.ObjectList); !ok {
			return errors.New("want the configuration of a Nomad agent")
		}
		ast.Walk(root, func(n ast.Node) (ast.Node, bool) {
			switch n := n.(type) {
			case *ast.LiteralType:
				n.Token.Value()
			case *ast.ObjectKey:
				n.Token.Value()
			}
			return n, true
		})
		return nil
	})
	return root, inFile(path, err)
}

// Decode is Parse with the keys in place of nodes: each block is a list of mappings.
func Decode(path string, text []byte) (keys map[string]any, err error) {
	root, err := Parse(path, text)
	if err != nil {
		return nil, err
	}
	err = guard(func() error { return hcl.DecodeObject(&keys, root) })
	return keys, inFile(path, err)
}

// guard makes an error of a panic: the library panics at some texts that are no HCL, and at the value of a number that is too large.
func guard(read func() error) (err error) {
	defer func() {
		problem := recover()
		if problem == nil {
			return
		}
		err = fmt.Errorf("neither HCL nor JSON: %v", problem)
		if cause, ok := problem.(error); ok {
			if number, ok := errors.AsType[*strconv.NumError](cause); ok {
				err = fmt.Errorf("%s: want a number of at most 64 bits, or a text in quotes", number.Num)
			}
		}
	}()
	return read()
}

// inFile is an error with path and, if it is known, line.
func inFile(path string, err error) error {
	if at, ok := errors.AsType[*parser.PosError](err); ok {
		return fmt.Errorf("%s: %w", Place(path, at.Pos.Line), at.Err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Place is a place in a file: PATH:LINE. The parser has no lines of JSON.
func Place(path string, line int) string {
	if line == 0 {
		return path
	}
	return fmt.Sprintf("%s:%d", path, line)
}

// Content is what all objects with a name contain. Those of JSON may be in lists; an item may have several keys there.
func Content(list *ast.ObjectList, name string) *ast.ObjectList {
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

// Name is the first key of an item; "" if it has none.
func Name(item *ast.ObjectItem) string {
	if len(item.Keys) == 0 {
		return ""
	}
	return fmt.Sprint(item.Keys[0].Token.Value())
}

// Value is a value as Nomad decodes it: string, bool, int64, float64, []any or map[string]any.
func Value(n ast.Node) any {
	switch n := n.(type) {
	case *ast.ListType:
		items := []any{}
		for _, item := range n.List {
			items = append(items, Value(item))
		}
		return items
	case *ast.ObjectType:
		values := map[string]any{}
		for _, item := range n.List.Items {
			values[Name(item)] = Value(item.Val)
		}
		return values
	case *ast.LiteralType:
		return n.Token.Value()
	}
	return nil
}
