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
	listed := map[string]bool{}
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
		lines[i] = "| `" + name + "` | " + content + " | " + imports(t, name) + " |"
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

// imports are the packages of this module and the other modules that a package imports, in a line.
func imports(t *testing.T, name string) string {
	t.Helper()
	pkg := module + "internal/" + name
	if strings.HasPrefix(name, "cmd/") {
		pkg = module + name
	}
	var own, others []string
	for _, imp := range list(t, "-f", "{{join .Imports \"\\n\"}}", pkg) {
		if p, ok := strings.CutPrefix(imp, module+"internal/"); ok {
			own = append(own, p)
		} else if strings.Contains(imp, ".") {
			others = append(others, imp)
		}
	}
	var modules []string
	if len(others) > 0 {
		modules = list(t, append([]string{"-f", "{{with .Module}}{{.Path}}{{end}}"}, others...)...)
		slices.Sort(modules)
		modules = slices.Compact(modules)
	}
	slices.Sort(own)
	parts := []string{strings.Join(own, ", "), strings.Join(modules, ", ")}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "; ")
}
