package problem_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const (
	operations = "../../../docs/operations.md"
	head       = "<!-- problems: generated from internal/util/problem by `go test ./internal/util/problem -update`; do not edit -->\n"
	end        = "<!-- end of problems -->\n"
)

// The table of codes in docs/operations.md is that of the code. -update writes it.
func TestDocument(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "problem.go", nil, parser.ParseComments)
	check.NoError(t, err)
	var table strings.Builder
	table.WriteString("| code | what it means |\n|---|---|\n")
	seen := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		code := strings.Trim(spec.Values[0].(*ast.BasicLit).Value, `"`)
		if seen[code] || spec.Comment.Text() == "" {
			t.Errorf("%s: a second constant, or no comment", code)
		}
		seen[code] = true
		fmt.Fprintf(&table, "| `%s` | %s |\n", code, strings.TrimSpace(spec.Comment.Text()))
		return true
	})
	text, err := os.ReadFile(operations)
	check.NoError(t, err)
	before, rest, found := strings.Cut(string(text), head)
	_, after, closed := strings.Cut(rest, end)
	if !found || !closed || len(seen) == 0 {
		t.Fatalf("%s has no place for the table, or there are no codes", operations)
	}
	goldenfile.Compare(t, operations, before+head+table.String()+end+after)
}

// A line has the remedy behind the text.
func TestLines(t *testing.T) {
	lines := problem.Lines([]problem.Problem{{Code: problem.HTTP, Text: "no HTTP at :9410", Remedy: "choose another port"}, {Code: problem.HTTP, Text: "no HTTP"}})
	if got := strings.Join(lines, "\n"); got != "no HTTP at :9410: choose another port\nno HTTP" {
		t.Errorf("%q", got)
	}
}
