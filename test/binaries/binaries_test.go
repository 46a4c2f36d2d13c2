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
	var flags, version string
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), ":=")
		switch {
		case ok && strings.TrimSpace(name) == "build_flags":
			flags = strings.TrimSpace(value)
		case ok && strings.TrimSpace(name) == "VERSION":
			version = strings.TrimSpace(value)
		}
	}
	want := strings.ReplaceAll(flags, "$(VERSION)", version)
	own := Flags()
	if i := slices.Index(own, "-ldflags"); i >= 0 {
		own[i+1] = `"` + own[i+1] + `"`
	}
	if got := strings.Join(own, " "); got != want || want == "" {
		t.Errorf("flags %q, the Makefile has %q", got, want)
	}
}
