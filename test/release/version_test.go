// Package release tests what "make release" builds, and, without building it, what must be right before: one version, the hosted workflow,
// the oldest glibc. "make release-check" runs all of it.
package release

import (
	"debug/elf"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/binaries"
)

const root = "../../"

// oldestGlibc is the second number of the oldest glibc 2 that docs/releasing.md names.
const oldestGlibc = 34

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// makeVersion is that of the Makefile.
func makeVersion(t *testing.T) string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^VERSION := (\d+\.\d+\.\d+(?:-[0-9A-Za-z.]+)?)$`).FindStringSubmatch(read(t, root+"Makefile"))
	if found == nil {
		t.Fatal("the Makefile has no VERSION of the form 1.2.3 or 1.2.3-rc.1")
	}
	return found[1]
}

// Every file that names the version has that of the Makefile.
func TestOneVersion(t *testing.T) {
	want := makeVersion(t)
	for _, f := range []struct{ path, pattern string }{
		{"test/binaries/binaries.go", `Version = "(.*)"`},
		{"deploy/daemonset.yaml", `image: ghcr.io/tandem-gpu/k8s-gpu:(\S+)`},
		{"deploy/gpu-fleet/deployment.yaml", `image: ghcr.io/tandem-gpu/gpu-fleet:(\S+)`},
		{"deploy/nomad/gpu-fleet.nomad.hcl", `ghcr.io/tandem-gpu/gpu-fleet:(\S+)"`},
		{"deploy/daemonset.yaml", `k8s-gpu-(\S+)\.oci\.tar`},
		{"CHANGELOG.md", `(?m)^## (?:Unreleased \()?([0-9][^ )]*)`}, // the first heading
		{"docs/releasing.md", `tandem_(\S+)_linux_ARCH`},
		{"deploy/chart/Chart.yaml", `(?m)^version: "?([^"\n]+)`},
		{"deploy/chart/Chart.yaml", `(?m)^appVersion: "?([^"\n]+)`},
	} {
		found := regexp.MustCompile(f.pattern).FindStringSubmatch(read(t, root+f.path))
		if found == nil || found[1] != want {
			t.Errorf("%s: %s matches %q, VERSION of the Makefile is %s", f.path, f.pattern, found, want)
		}
	}
}

// The binaries run with the glibc of each distribution that docs/releasing.md names.
func TestOldestGlibc(t *testing.T) {
	for _, name := range []string{"nomad-gpu", "k8s-gpu"} {
		checkGlibc(t, binaries.Path(t, name))
	}
}

func checkGlibc(t *testing.T, path string) {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	symbols, err := file.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	if len(symbols) < 20 {
		t.Errorf("%s imports %d symbols: not a binary that links glibc", path, len(symbols))
	}
	for _, s := range symbols {
		minor, ok := strings.CutPrefix(s.Version, "GLIBC_2.")
		if !ok {
			continue
		}
		number, _, _ := strings.Cut(minor, ".")
		if n, err := strconv.Atoi(number); err != nil || n > oldestGlibc {
			t.Errorf("%s: %s needs %s, later than GLIBC_2.%d", filepath.Base(path), s.Name, s.Version, oldestGlibc)
		}
	}
}
