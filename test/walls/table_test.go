package walls

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// row is a package in the table of docs/architecture.md.
var row = regexp.MustCompile("^\\| `([^`]+)` \\| (.*) \\| ([^|]*) \\|$")

// The table in docs/architecture.md has every product package, with what it imports. -update writes the third column.
func TestArchitectureTable(t *testing.T) {
	const path = "../../docs/architecture.md"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	all, listed := allLinked(t), map[string]bool{}
	for i, line := range lines {
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		name, content := m[1], m[2]
		if listed[name] {
			t.Errorf("docs/architecture.md:%d: a second row for %s", i+1, name)
		}
		listed[name] = true
		lines[i] = "| `" + name + "` | " + content + " | " + imports(t, all, name) + " |"
		if lines[i] != line && !*goldenfile.Update {
			t.Errorf("docs/architecture.md:%d:\n%s\nwant\n%s\nrun go test ./test/walls -update", i+1, line, lines[i])
		}
	}
	for _, pkg := range list(t, module+"cmd/...", module+"internal/...") {
		name := strings.TrimPrefix(strings.TrimPrefix(pkg, module), "internal/")
		if !strings.HasSuffix(name, "test") && !listed[name] {
			t.Errorf("docs/architecture.md has no row for %s", name)
		}
	}
	if *goldenfile.Update {
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// linked is a package of the product, or one that it links.
type linked struct {
	module  string // "" = of the standard library
	imports []string
}

// allLinked are those packages, by import path.
func allLinked(t *testing.T) map[string]linked {
	t.Helper()
	all := map[string]linked{}
	for _, line := range list(t, "-deps", "-f", `{{.ImportPath}};{{with .Module}}{{.Path}}{{end}};{{join .Imports " "}}`, module+"cmd/...", module+"internal/...") {
		f := strings.Split(line, ";")
		all[f[0]] = linked{f[1], strings.Fields(f[2])}
	}
	return all
}

// imports are the packages of this module and the other modules that a package imports, in a line.
func imports(t *testing.T, all map[string]linked, name string) string {
	t.Helper()
	pkg, found := all[module+"internal/"+name]
	if !found {
		pkg, found = all[module+name]
	}
	if !found {
		t.Errorf("docs/architecture.md has a row for %s, which is no package", name)
	}
	var own, modules []string
	for _, imp := range pkg.imports {
		if p, ok := strings.CutPrefix(imp, module+"internal/"); ok {
			own = append(own, p)
		} else if of := all[imp].module; of != "" {
			modules = append(modules, of)
		}
	}
	slices.Sort(own)
	slices.Sort(modules)
	parts := []string{strings.Join(own, ", "), strings.Join(slices.Compact(modules), ", ")}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "; ")
}
