// Package hashicorp turns the plugin block of hashicorp/nomad-device-nvidia in a Nomad agent's configuration, in HCL 1 (which Nomad reads)
// or JSON, into a block of nomad-gpu that gives the same answers.
package hashicorp

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/hcl/hcl/ast"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
)

// FromHCL is the one format of an input; HCL includes JSON.
const FromHCL = "hcl"

// Input is a text and where it is from.
type Input struct {
	Path   string // for messages
	Text   []byte
	Plugin string // name of the file of nomad-gpu in plugin_dir, which is the label of the result: "nomad-gpu"
}

// Import returns a block for each plugin block of nomad-device-nvidia, which is recognised by its label or, with another label, by its
// keys. Every result is valid for nomad-gpu. An input that can't be read or has no such block is an error.
func Import(in Input) (importer.Result, error) {
	r := importer.Result{Kind: "plugin block of nomad-device-nvidia"}
	root, blocks, err := blocksOf(in)
	if err != nil {
		return r, err
	}
	var problems []string
	var account importer.Account
	rest := in.others(root, blocks, &account)
	all := in.values(root)
	for _, b := range blocks {
		c := conversion{in: in, block: b, account: &account}
		c.convert()
		if own := in.values(b.body); !account.Understood(own) {
			return r, &importer.NothingError{Path: in.Path, Kind: r.Kind, Notes: c.notes}
		}
		c.notes = append(c.notes, rest...)
		text := c.text(r.Kind)
		problems = append(problems, c.check(text)...)
		name := b.label
		if len(blocks) == 1 {
			name = ""
		}
		r.Files = append(r.Files, importer.File{Name: name, Text: text})
		r.Notes = append(r.Notes, c.notes...)
	}
	r.Notes, r.Taken = importer.Sorted(r.Notes), account.Leaves(all, importer.Taken)
	if len(problems) > 0 {
		return importer.Result{}, importer.Problems("not imported", problems)
	}
	return r, nil
}

// block is a plugin block.
type block struct {
	label string // "" = a file that has the block config only
	line  int
	keys  []key // of config, in order
	args  int   // line of args; 0 = it has none
	body  *ast.ObjectList
	dir   string // plugin_dir of the agent; "" = its default
}

// key is a key of the block config.
type key struct {
	name  string
	line  int
	value any // string, bool, int64, float64, []any, map[string]any
	node  ast.Node
}

// blocksOf parses the input, and returns all of it and its blocks of the plugin.
func blocksOf(in Input) (root *ast.ObjectList, blocks []block, err error) {
	root, err = clientconfig.Parse(in.Path, in.Text)
	if err != nil {
		return nil, nil, err
	}
	dir, _ := clientconfig.Value(firstValue(root, "plugin_dir")).(string)
	if len(root.Filter("plugin").Items) == 0 && len(root.Filter("config").Items) > 0 {
		b := block{line: 1}
		b.read(root)
		return root, []block{b}, nil
	}
	all := pluginBlocks(clientconfig.Content(root, "plugin"))
	var labels []string
	for _, b := range all {
		if labels = append(labels, b.label); b.label == in.Plugin || b.isNVIDIA() {
			b.dir = dir
			blocks = append(blocks, b)
		}
	}
	switch {
	case len(blocks) > 0:
		return root, blocks, nil
	case len(labels) > 0:
		return nil, nil, fmt.Errorf("%s: no plugin block of nomad-device-nvidia: the plugins are %s", in.Path, strings.Join(labels, ", "))
	}
	return nil, nil, fmt.Errorf("%s: no plugin block", in.Path)
}

// pluginBlocks are the plugin blocks by label, in order. The parser makes "nvidia.config" of JSON objects with one key.
func pluginBlocks(list *ast.ObjectList) (blocks []block) {
	for _, item := range list.Items {
		label := clientconfig.Name(item)
		i := slices.IndexFunc(blocks, func(b block) bool { return b.label == label })
		if i < 0 {
			i = len(blocks)
			blocks = append(blocks, block{label: label, line: item.Pos().Line})
		}
		rest := *item
		rest.Keys = item.Keys[1:]
		if body, isObject := item.Val.(*ast.ObjectType); isObject && len(rest.Keys) == 0 {
			blocks[i].read(body.List)
			continue
		}
		blocks[i].read(&ast.ObjectList{Items: []*ast.ObjectItem{&rest}})
	}
	return blocks
}

func firstValue(list *ast.ObjectList, name string) ast.Node {
	if items := list.Filter(name).Items; len(items) > 0 {
		return items[0].Val
	}
	return nil
}

// read reads the body of a block.
func (b *block) read(body *ast.ObjectList) {
	if b.body == nil {
		b.body = &ast.ObjectList{}
	}
	b.body.Items = append(b.body.Items, body.Items...)
	for _, item := range clientconfig.Content(body, "config").Items {
		b.keys = append(b.keys, key{clientconfig.Name(item), item.Pos().Line, clientconfig.Value(item.Val), item.Val})
	}
	if args := body.Filter("args").Items; len(args) > 0 {
		b.args = max(args[0].Val.Pos().Line, 1)
	}
}

// own are the keys of nomad-device-nvidia; the last is in its development version only.
var own = []string{"enabled", "ignored_gpu_ids", "fingerprint_period", "mps"}

// isNVIDIA reports whether a block is one of nomad-device-nvidia: its label is the name of the plugin's file, which is free.
func (b block) isNVIDIA() bool {
	if strings.Contains(strings.ToLower(b.label), "nvidia") {
		return true
	}
	known := func(k key) bool { return slices.Contains(own, k.name) }
	other := func(k key) bool { return !known(k) && !slices.Contains(config.NomadKeys(), k.name) }
	return slices.ContainsFunc(b.keys, func(k key) bool { return known(k) && k.name != "enabled" }) && !slices.ContainsFunc(b.keys, other)
}

// parsePeriod is the value of fingerprint_period; 0 if it is none.
func parsePeriod(v any) time.Duration {
	text, _ := v.(string)
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0
	}
	return d
}
