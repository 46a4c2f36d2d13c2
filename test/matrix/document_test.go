package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// The tables of docs/compatibility.md about versions that were run are those of the results: what stands between "<!-- table NAME -->"
// and "<!-- end -->". -update writes them.
func TestDocument(t *testing.T) {
	const path, begin, end = "../../docs/compatibility.md", "<!-- table ", "<!-- end -->"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	results, err := load("results.json")
	if err != nil {
		t.Fatal(err)
	}
	tables := map[string]string{kubelet.name: results.table(kubelet), dra.name: results.table(dra), nomad.name: results.table(nomad)}
	parts := strings.Split(string(text), begin)
	for i, part := range parts[1:] {
		name, rest, ok := strings.Cut(part, " -->\n")
		_, after, ended := strings.Cut(rest, end)
		table, known := tables[name]
		if !ok || !ended || !known {
			t.Fatalf("table %q: unknown, or without an end", name)
		}
		parts[i+1] = name + " -->\n" + table + end + after
		delete(tables, name)
	}
	if len(tables) > 0 {
		t.Errorf("%s lacks the tables %v", path, tables)
	}
	goldenfile.Compare(t, path, strings.Join(parts, begin))
}

// table has a row for each version that was run.
func (all Results) table(s *subject) string {
	var b strings.Builder
	b.WriteString("| version | tests | passed | failed | skipped | date |\n|---|---|---|---|---|---|\n")
	for _, r := range all {
		if r.Subject != s.name {
			continue
		}
		failed, skipped := "none", "none"
		if len(r.Failed) > 0 {
			failed = "`" + strings.Join(r.Failed, "`, `") + "`"
		}
		if r.Error != "" {
			failed = r.Error
		}
		if len(r.Skipped) > 0 {
			skipped = "`" + strings.Join(r.Skipped, "`, `") + "`"
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %s | %s | %s |\n", strings.TrimPrefix(r.Version, "v"), r.Tests(), r.Passed, failed, skipped, r.Date)
	}
	return b.String()
}
