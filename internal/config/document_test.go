package config

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// The tables of the documents are those of the code: what stands between "<!-- table NAME -->" and "<!-- end -->". -update writes them.
func TestDocuments(t *testing.T) {
	used := map[string]bool{}
	for _, path := range []string{"/docs/configuration.md", "/docs/policy.md"} {
		text, err := os.ReadFile(repository + path)
		check.NoError(t, err)
		const begin, end = "<!-- table ", "<!-- end -->"
		parts := strings.Split(string(text), begin)
		for i, part := range parts[1:] {
			name, rest, ok := strings.Cut(part, " -->\n")
			_, after, ok2 := strings.Cut(rest, end)
			table, known := tables()[name]
			if !ok || !ok2 || !known {
				t.Fatalf("%s: table %q: unknown, or without an end", path, name)
			}
			parts[i+1] = name + " -->\n" + table + end + after
			used[name] = used[name] || path == "/docs/configuration.md"
		}
		goldenfile.Compare(t, repository+path, strings.Join(parts, begin))
	}
	for name := range tables() {
		if !used[name] {
			t.Errorf("docs/configuration.md has no table %s", name)
		}
	}
}

// tables are the tables by name.
func tables() map[string]string {
	own := func(specs []Spec) []Spec { // not of both agents
		return slices.DeleteFunc(specs, func(s Spec) bool { return strings.HasPrefix(s.Key, "health.") })
	}
	all := map[string]string{
		"both":  specTable("| `nomad-gpu` | `k8s-gpu`: file, flag, variable |", HealthSpecs(), bothSpellings),
		"nomad": specTable("| key | flag of the commands |", own(NomadSpecs()), nomadSpellings),
		"k8s":   specTable("| flag, variable | key of the file |", own(KubernetesSpecs()), kubernetesSpellings),
	}
	for _, section := range policy.Sections() {
		keyTables(all, section.Name, section.Keys)
	}
	return all
}

// specTable is a table of options; spellings are the cells of the first columns, with a separator after each.
func specTable(head string, specs []Spec, spellings func(Spec) string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s default | values | meaning |\n|%s---|---|---|\n", head, strings.Repeat("---|", strings.Count(head, "|")-1))
	for _, s := range specs {
		values := s.String()
		if s.Blank && s.Default != "" {
			values += " or `\"\"`"
		}
		s.Usage = strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(s.Usage)
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", spellings(s), code(s.Default), values, s.meaning())
	}
	return b.String()
}

func code(texts ...string) string {
	var cells []string
	for _, text := range texts {
		if text != "" {
			cells = append(cells, "`"+text+"`")
		}
	}
	return strings.Join(cells, "<br>")
}

func bothSpellings(s Spec) string {
	return code(s.HCL) + " | " + code(s.Key, "--"+s.Flag, variable(s.Flag))
}

func nomadSpellings(s Spec) string { return code(s.HCL) + " | " + code(flagsOf(s)...) }

func kubernetesSpellings(s Spec) string {
	return code(append(flagsOf(s), s.Env...)...) + " | " + code(s.Key)
}

func flagsOf(s Spec) (flags []string) {
	for _, name := range append([]string{s.Flag}, s.Aliases...) {
		if name != "" {
			flags = append(flags, "--"+name)
		}
	}
	return flags
}

// keyTables adds the tables of keys of the file, those of a mapping or of a list of mappings with what is below them. A selector has
// one table.
func keyTables(tables map[string]string, path string, keys []schema.Key) {
	var b strings.Builder
	b.WriteString("| key | default | values | meaning |\n|---|---|---|---|\n")
	for _, k := range keys {
		usage := k.Usage
		if k.Required {
			usage += ". Required"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", code(k.Name), code(k.Default), k.Type, usage)
		of, below := k.Type, path+"."+k.Name
		if of.Kind == schema.List {
			of, below = *of.Item, below+"[]"
		}
		if of.Name != "" {
			below = of.Name
		}
		if of.Kind == schema.Object {
			keyTables(tables, below, of.Keys)
		}
	}
	tables[path] = b.String()
}
