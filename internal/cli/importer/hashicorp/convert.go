package hashicorp

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// conversion makes the block of nomad-gpu for a block of nomad-device-nvidia.
type conversion struct {
	in    Input
	block block
	lines []string // of config
	notes importer.Notes

	account *importer.Account
}

func (c *conversion) at(line int, what string) string {
	if what == `plugin ""` {
		what = "config"
	}
	return clientconfig.Place(c.in.Path, line) + ": " + what
}

// set adds a key to the result, with a comment if it is not "".
func (c *conversion) set(name string, value any, comment string) {
	line := name + " = " + literal(value)
	if comment != "" {
		line += " # " + comment
	}
	c.lines = append(c.lines, line)
}

func (c *conversion) convert() {
	where := c.at(c.block.line, "plugin "+strconv.Quote(c.block.label))
	if c.block.label != "" && c.block.label != c.in.Plugin {
		c.notes.Add(importer.Needed, where, "Nomad starts the file of plugin_dir that has the name of the block",
			fmt.Sprintf("put nomad-gpu into %s as %s, and take the file %s out", cmp.Or(c.block.dir, "plugin_dir"), c.in.Plugin, c.block.label))
	}
	for _, item := range c.block.body.Filter("args").Items {
		c.note(importer.NoEffect, item.Val, c.at(c.block.args, "args"), "left out: neither plugin reads arguments from Nomad", "")
	}
	c.outside()
	for _, k := range c.block.keys {
		at := c.at(k.line, "config."+k.name)
		c.account.Set(k.node, importer.Taken)
		switch k.name {
		case "ignored_gpu_ids":
			c.ignored(k, at)
		case "fingerprint_period":
			c.period(k, at)
		case "mps":
			c.mps(k, at)
		default:
			if !slices.Contains(config.NomadKeys(), k.name) {
				c.note(importer.Unknown, k.node, at, "left out: nomad-device-nvidia has no such key, and Nomad refuses it", "")
				continue
			}
			c.set(k.name, k.value, "")
		}
	}
	if c.block.label == c.in.Plugin {
		return
	}
	c.notes.Add(importer.Differs, where, "tasks get device nodes beside NVIDIA_VISIBLE_DEVICES, and some attributes are corrected: power, clocks, display_state, persistence_mode, PCI IDs",
		"see docs/migration.md before you use them in constraints")
}

// ignored keeps the UUIDs. nomad-device-nvidia compares the texts with UUIDs, so that another one excludes nothing.
func (c *conversion) ignored(k key, at string) {
	items, isList := k.value.([]any)
	if !isList {
		c.set(k.name, k.value, "") // check reports it
		return
	}
	kept, left := []any{}, []string(nil)
	for _, item := range items {
		text := fmt.Sprint(item)
		if strings.HasPrefix(text, "GPU-") || strings.HasPrefix(text, "MIG-") {
			kept = append(kept, text)
			continue
		}
		left = append(left, strconv.Quote(text))
	}
	comment := ""
	if left != nil {
		comment = strings.Join(left, ", ") + " left out, see above"
		c.note(importer.NoEffect, k.node, at, strings.Join(left, ", ")+" left out: it is no UUID (GPU-... or MIG-...), so it excludes no device in nomad-device-nvidia",
			"give UUIDs as nvidia-smi -L prints them if devices were meant to be excluded")
	}
	c.set(k.name, kept, comment)
}

// period keeps the period, up to the shortest one of nomad-gpu.
func (c *conversion) period(k key, at string) {
	if d := parsePeriod(k.value); d > 0 && d < time.Second {
		c.note(importer.Differs, k.node, at, fmt.Sprintf("%v becomes 1s, the shortest period of nomad-gpu; events cause an enumeration at once", d), "")
		c.set(k.name, "1s", fmt.Sprintf("was %v", d))
		return
	}
	c.set(k.name, k.value, "")
}

// mps is a block that nomad-device-nvidia's development version has.
func (c *conversion) mps(k key, at string) {
	remedy := "share GPUs by MPS in a policy file (docs/policy.md), for the device type nvidia/gpu-mps; mps_root is the folder of the daemons"
	if m, _ := k.value.(map[string]any); fmt.Sprint(m["enabled"]) == "false" {
		remedy = ""
	}
	effect := importer.Differs
	if remedy == "" {
		effect = importer.NoEffect
	}
	c.note(effect, k.node, at, "left out: nomad-gpu reads sharing from its policy file", remedy)
}

// text is the block of nomad-gpu.
func (c *conversion) text(kind string) []byte {
	var b strings.Builder
	b.WriteString(importer.Header(fmt.Sprintf("Imported from %s: %s.", c.at(c.block.line, "plugin "+strconv.Quote(c.block.label)), kind), c.notes))
	if len(c.lines) == 0 {
		fmt.Fprintf(&b, "plugin %q {\n  config {}\n}\n", c.in.Plugin)
		return []byte(b.String())
	}
	fmt.Fprintf(&b, "plugin %q {\n  config {\n", c.in.Plugin)
	for _, line := range aligned(c.lines) {
		b.WriteString("    " + line + "\n")
	}
	b.WriteString("  }\n}\n")
	return []byte(b.String())
}

// aligned gives the equals signs of lines one column, as "nomad fmt" does.
func aligned(lines []string) []string {
	width := 0
	for _, line := range lines {
		name, _, _ := strings.Cut(line, " = ")
		width = max(width, len(name))
	}
	out := make([]string, len(lines))
	for i, line := range lines {
		name, value, _ := strings.Cut(line, " = ")
		out[i] = fmt.Sprintf("%-*s = %s", width, name, value)
	}
	return out
}

// literal is a value in HCL.
func literal(v any) string {
	switch v := v.(type) {
	case string:
		return strconv.Quote(v)
	case []any:
		items := make([]string, len(v))
		for i, item := range v {
			items[i] = literal(item)
		}
		return "[" + strings.Join(items, ", ") + "]"
	case map[string]any:
		var pairs []string
		for _, key := range slices.Sorted(maps.Keys(v)) {
			pairs = append(pairs, strconv.Quote(key)+" = "+literal(v[key]))
		}
		return "{ " + strings.Join(pairs, ", ") + " }"
	}
	return fmt.Sprint(v)
}

// check reads the result as nomad-gpu does, and returns every problem with its place in the input.
func (c *conversion) check(text []byte) (problems []string) {
	_, blocks, err := blocksOf(Input{Path: "result", Text: text, Plugin: c.in.Plugin})
	if err != nil || len(blocks) != 1 {
		return []string{fmt.Sprintf("%s: %v", c.at(c.block.line, c.block.label), err)}
	}
	_, _, err = config.NewBlock(blocks[0].values()).Read()
	for _, e := range importer.Split(err) {
		problem := e.Error()
		if s, ok := errors.AsType[*setting.Error](e); ok {
			for _, k := range c.block.keys {
				if k.name == s.Key {
					problem = c.at(k.line, problem)
				}
			}
		}
		problems = append(problems, problem)
	}
	return problems
}

// values are the keys of the block with their values.
func (b block) values() map[string]any {
	keys := map[string]any{}
	for _, k := range b.keys {
		keys[k.name] = k.value
	}
	return keys
}

// Keys are the keys of nomad-gpu's block for the plugin block of a Nomad agent's configuration, after an import.
func Keys(in Input) (map[string]any, error) {
	r, err := Import(in)
	if err != nil {
		return nil, err
	}
	if len(r.Files) != 1 {
		return nil, fmt.Errorf("%s: %d plugin blocks of GPUs: want one", in.Path, len(r.Files))
	}
	_, blocks, err := blocksOf(Input{Path: in.Path, Text: r.Files[0].Text, Plugin: in.Plugin})
	if err != nil {
		return nil, err
	}
	return blocks[0].values(), nil
}
