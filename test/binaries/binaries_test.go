package binaries

import (
	"os"
	"os/exec"
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

func TestDir(t *testing.T) {
	dir, err := Dir()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"nomad-gpu", "k8s-gpu"} {
		out, err := exec.Command(filepath.Join(dir, name), "version").Output()
		if err != nil || !strings.Contains(string(out), Version) {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
}
