package hashicorp

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/hcl/ast"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
)

// values are those of a list of items. The parser makes new items of one value, so the value is what is known by.
func (in Input) values(list *ast.ObjectList) importer.Value {
	all := importer.Value{ID: list}
	for _, item := range list.Items {
		all.In = append(all.In, in.valueOf(item, ""))
	}
	return all
}

func (in Input) valueOf(item *ast.ObjectItem, prefix string) importer.Value {
	key := prefix
	for _, k := range item.Keys {
		key = strings.TrimPrefix(fmt.Sprintf("%s.%v", key, k.Token.Value()), ".")
	}
	v := importer.Value{ID: item.Val, Where: clientconfig.Place(in.Path, item.Pos().Line) + ": " + key}
	for _, body := range bodies(item.Val) {
		for _, inner := range body.List.Items {
			v.In = append(v.In, in.valueOf(inner, key))
		}
	}
	return v
}

// bodies are the objects that a value is: in JSON a block may be a list.
func bodies(n ast.Node) (all []*ast.ObjectType) {
	switch n := n.(type) {
	case *ast.ObjectType:
		return []*ast.ObjectType{n}
	case *ast.ListType:
		for _, item := range n.List {
			all = append(all, bodies(item)...)
		}
	}
	return all
}

// others are notes about what the input has beside the blocks of the plugin: the Nomad agent's own settings, and those of its other plugins.
func (in Input) others(root *ast.ObjectList, blocks []block, account *importer.Account) (notes importer.Notes) {
	own := map[ast.Node]bool{}
	for _, b := range blocks {
		for _, item := range b.body.Items {
			own[item.Val] = true
		}
	}
	var visit func(v importer.Value) bool // whether the block of the plugin is in it
	visit = func(v importer.Value) bool {
		n, _ := v.ID.(ast.Node)
		if own[n] {
			return true
		}
		var beside []importer.Value
		for _, inner := range v.In {
			if !visit(inner) {
				beside = append(beside, inner)
			}
		}
		if len(beside) == len(v.In) {
			return false
		}
		for _, other := range beside {
			account.Set(other.ID, importer.NoEffect)
			if strings.HasSuffix(other.Where, ": plugin") && len(other.In) == 1 { // JSON: the label is below
				other = other.In[0]
			}
			notes.Add(importer.NoEffect, other.Where, "left out: it is of the Nomad agent or another plugin", "")
		}
		return true
	}
	visit(in.values(root))
	return notes
}

// outside notes the keys of the plugin block beside config and args, which Nomad ignores.
func (c *conversion) outside() {
	for _, item := range c.block.body.Items {
		if name := clientconfig.Name(item); !slices.Contains([]string{"config", "args"}, name) {
			c.note(importer.Differs, item.Val, c.at(item.Pos().Line, name), "left out: Nomad ignores keys of a plugin block outside of config", "put it into config { } if it was meant")
		}
	}
}

// note adds a note about a value.
func (c *conversion) note(effect importer.Effect, n ast.Node, at, text, remedy string) {
	c.account.Set(n, effect)
	c.notes.Add(effect, at, text, remedy)
}
