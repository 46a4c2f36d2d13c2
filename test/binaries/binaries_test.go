package binaries

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The tests run what "make build" builds.
func TestFlagsAreThoseOfTheMakefile(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]string{} // of variables
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":="); ok {
			values[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
	}
	want := strings.NewReplacer("$(VERSION)", values["VERSION"], "$(tags)", values["tags"]).Replace(values["build_flags"])
	own := Flags()
	if i := slices.Index(own, "-ldflags"); i >= 0 {
		own[i+1] = `"` + own[i+1] + `"`
	}
	if got := strings.Join(own, " "); got != want || want == "" {
		t.Errorf("flags %q, the Makefile has %q", got, want)
	}
}
