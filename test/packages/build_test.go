//go:build packages

package packages

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// build makes the packages of a version in a folder, of this machine's architecture and with the programs of -packages.
func build(t *testing.T, version, folder string) {
	t.Helper()
	for _, made := range []string{"linux-" + runtime.GOARCH, "licenses"} {
		if err := os.Symlink(filepath.Join(*packages, made), filepath.Join(folder, made)); err != nil {
			t.Fatal(err)
		}
	}
	run(t, repository+"/tools/release/packages", version, folder, runtime.GOARCH)
}

// next has the packages of version 99.0.0, once they are built.
var next struct {
	sync.Once
	folder string
}

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(next.folder)
	os.Exit(code)
}

// nextPackages returns the folder of packages of version 99.0.0, with the same programs.
func nextPackages(t *testing.T) string {
	t.Helper()
	next.Do(func() {
		folder, err := os.MkdirTemp("", "packages")
		if err != nil {
			t.Fatal(err)
		}
		next.folder = folder
		build(t, "99.0.0", folder)
	})
	return next.folder
}

// A second build gives the same bytes.
func TestReproducible(t *testing.T) {
	again := t.TempDir()
	build(t, *version, again)
	for _, s := range all {
		for _, name := range []func(folder, name, version, arch string) string{debFile, rpmFile} {
			first, err := os.ReadFile(name(*packages, s.name, *version, runtime.GOARCH))
			if err != nil {
				t.Fatal(err)
			}
			second, err := os.ReadFile(name(again, s.name, *version, runtime.GOARCH))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(first, second) {
				t.Errorf("%s: two builds differ: %d and %d bytes", s.name, len(first), len(second))
			}
		}
	}
}

// What Debian's own checker finds, but for what deploy/packages/*/lintian justifies.
func TestLintian(t *testing.T) {
	argv := []string{"lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0"}
	for _, s := range all {
		argv = append(argv, debFile(*packages, s.name, *version, runtime.GOARCH))
	}
	if out := run(t, argv...); strings.Contains(out, "W:") || strings.Contains(out, "E:") {
		t.Error(out)
	}
}
