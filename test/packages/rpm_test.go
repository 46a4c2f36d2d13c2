//go:build packages

package packages

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestRPMLife installs, upgrades and removes the rpms in the root file system of a Debian with the presets of Fedora: without systemd as process
// 1, as in the build of an image.
func TestRPMLife(t *testing.T) {
	next := nextPackages(t)
	root := newDebian(t)
	rpm := func(argv ...string) string {
		t.Helper()
		return run(t, append([]string{"rpm", "--root", root, "--dbpath", "/var/lib/rpm"}, argv...)...)
	}
	change := func(action, folder, version string) string {
		t.Helper()
		argv := []string{action, "--nodeps", "--nosignature"}
		for _, s := range all {
			argv = append(argv, rpmFile(folder, s.name, version, runtime.GOARCH))
		}
		return rpm(argv...)
	}
	put := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(root+path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	check := func(path, want string) { // "" = no file
		t.Helper()
		if text, _ := os.ReadFile(root + path); string(text) != want {
			t.Errorf("%s has %q, want %q", path, text, want)
		}
	}
	for _, dir := range []string{"/lib", "/bin"} { // the paths of the packages are those of merged folders
		if _, err := os.Readlink(root + dir); err != nil {
			t.Fatal(err)
		}
	}
	put("/usr/lib/systemd/system-preset/99-default-disable.preset", "disable *\n")
	rpm("--initdb")

	quiet := func(what, out string) {
		t.Helper()
		if strings.Contains(out, "warning:") || strings.Contains(out, "scriptlet failed") {
			t.Errorf("%s: %s", what, out)
		}
	}
	quiet("installation", change("--install", *packages, *version))
	rpm("--verify", "--nodeps", "tandem-nomad-gpu", "tandem-k8s-gpu", "tandem-gpu-fleet")
	if _, err := os.Lstat(root + enabled); err == nil {
		t.Errorf("the service is enabled against the presets")
	}
	run(t, "chroot", root, "systemctl", "enable", unit)
	put(defaults, "LOG_LEVEL=debug\n")
	put("/etc/nomad.d/nomad-gpu.hcl", "# mine\n")
	put("/var/lib/tandem/k8s-gpu.json", "{}")

	quiet("upgrade", change("--upgrade", next, "99.0.0"))
	check(defaults, "LOG_LEVEL=debug\n")
	check("/etc/nomad.d/nomad-gpu.hcl", "# mine\n")
	if _, err := os.Lstat(root + enabled); err != nil {
		t.Errorf("an upgrade disables the service: %v", err)
	}

	if out := rpm("--erase", "tandem-nomad-gpu", "tandem-k8s-gpu", "tandem-gpu-fleet"); strings.Contains(out, "scriptlet failed") {
		t.Error(out)
	}
	check(defaults+".rpmsave", "LOG_LEVEL=debug\n")
	check("/etc/nomad.d/nomad-gpu.hcl.rpmsave", "# mine\n")
	check("/var/lib/tandem/k8s-gpu.json", "{}")
	for _, path := range []string{enabled, "/usr/bin/k8s-gpu", "/usr/bin/nomad-gpu", "/opt/nomad/data/plugins/nomad-gpu", "/usr/lib/systemd/system/" + unit, "/usr/lib/systemd/system/" + mpsUnit} {
		if _, err := os.Lstat(root + path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
}
