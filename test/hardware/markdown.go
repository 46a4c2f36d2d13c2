package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/test/hardware/compare"
)

// Markdown is the section of docs/hardware.md for this run. It has no UUIDs and no serial numbers.
func (r *Report) Markdown() string {
	names := map[string]string{}
	return uuid.ReplaceAllStringFunc(r.section(), func(id string) string {
		if label := r.label(id); label != id {
			return label
		}
		if names[id] == "" {
			names[id] = fmt.Sprintf("MIG instance %d", len(names)+1)
		}
		return names[id]
	})
}

var uuid = regexp.MustCompile(`\b(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)

func (r *Report) section() string {
	var b strings.Builder
	fmt.Fprintf(&b, "### %s, %s\n\n", r.Date.Format("2006-01-02"), r.kinds())
	if r.Machine != "" {
		fmt.Fprintf(&b, "**%s: no real GPU.**\n\n", r.Machine)
	}
	fmt.Fprintf(&b, "Driver %s, CUDA %s, %s, %.0f s. ", r.Driver, r.CUDA, map[bool]string{true: "as root", false: "not as root"}[r.Root], r.Seconds)
	if n := r.Bad(); n > 0 {
		fmt.Fprintf(&b, "**%d checks failed.**\n\n", n)
	} else {
		fmt.Fprintf(&b, "No check failed.\n\n")
	}
	fmt.Fprintf(&b, "| part | check | result | |\n|---|---|---|---|\n")
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", c.Part, c.Name, c.Result, cell(c.Detail))
	}
	r.writeValues(&b)
	if len(r.Differences) > 0 {
		fmt.Fprintf(&b, "\nNVML's answers, compared with the simulated machine `%s`:\n\n", r.Model)
		fmt.Fprintf(&b, "| key | function | driver | simulated |\n|---|---|---|---|\n")
		for _, d := range r.Differences {
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", d.Key, d.Function, cell(d.Driver), cell(d.Simulated))
		}
	}
	return b.String()
}

// writeValues writes a line for each value: how many devices have which result.
func (r *Report) writeValues(b *strings.Builder) {
	type group struct {
		value  compare.Value
		source string
		result compare.Result
	}
	var order []group
	count := map[group]int{}
	example := map[group]compare.Row{}
	for _, row := range r.Values {
		g := group{row.Value, sources.Replace(row.Source), row.Result}
		if strings.HasPrefix(string(row.Value), connection) {
			g.value = connection + " GPUs"
		}
		if count[g]++; count[g] == 1 {
			order = append(order, g)
			example[g] = row
		}
	}
	slices.SortStableFunc(order, func(a, b group) int { return cmp.Compare(a.value, b.value) })
	fmt.Fprintf(b, "\n| value | shown by | number | first | nvidia-smi | result |\n|---|---|---|---|---|---|\n")
	for _, g := range order {
		row := example[g]
		ours, theirs := row.Ours, row.SMI
		if g.value == compare.Serial {
			ours, theirs = map[bool]string{true: "(shown)"}[ours != ""], map[bool]string{true: "(shown)"}[theirs != ""]
		}
		fmt.Fprintf(b, "| %s | %s | %d | %s | %s | %s%s |\n", g.value, g.source, count[g], cell(ours), cell(theirs), g.result, within(row))
	}
}

// connection is the beginning of the values of pairs of GPUs.
const connection = "connection of"

// sources shortens the names of sources that have the same values.
var sources = strings.NewReplacer(
	"nomad-gpu inspect alone, k8s-gpu inspect alone, nomad-gpu inspect, k8s-gpu inspect", "inspect of both",
	"nomad-gpu inspect, k8s-gpu inspect", "inspect of both running",
)

// cell is a text in a table.
func cell(text string) string {
	return strings.NewReplacer("\n", " ", "|", "\\|", "<", "&lt;").Replace(strings.TrimSpace(text))
}
