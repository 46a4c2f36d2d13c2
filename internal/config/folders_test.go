package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

// What an agent writes to as user 0, and what containers get, is refused in a folder of the operating system, by whatever spelling.
func TestSystemFoldersAreRefused(t *testing.T) {
	var folder, file string
	for _, path := range []string{
		"/", "//", "/etc", "/etc/", "/usr/share/tandem", "/proc/1", "/sys/fs/cgroup", "/lib64/x", "/bin", "/var", "/var/lib", "/var/run/../run", "/run", "/tmp", "/home",
		"/dev/shm", "/boot/x", "/etc/kubernetes/manifests", "/etc/cron.d", "/etc/systemd/system", "/etc/cdi/../cron.d", "/etc/cdi2", "/etc/kubernetes",
		"/var/spool/cron", "/run/systemd/system", "/var/run/udev/rules.d",
	} {
		if err := ownFolder(&folder, "/x", nil).set(Value{Text: path}); err == nil || !strings.Contains(err.Error(), "belongs to the operating system") {
			t.Errorf("%s: %v", path, err)
		}
		if err := inOwnFolder(&file, "/x/y").set(Value{Text: path + "/file"}); err == nil {
			t.Errorf("%s: a file in it is accepted", path)
		}
	}
	for _, path := range []string{
		"/var/lib/tandem", "/tandem", "/data/tandem", "/opt/tandem", "/etc/cdi", "/run/cdi", "/var/run/cdi", "/var/kubelet", "/dev/shm/test", "/library", "/mps",
		"/etc/tandem/state", "/etc/kubernetes/node-feature-discovery/features.d", "/run/systemd2", "/etcetera",
	} {
		if err := ownFolder(&folder, "/x", nil).set(Value{Text: path}); err != nil || folder != path {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A state directory is missing, empty, or has what agents write there. One with other programs' files alone is theirs.
func TestFolderOfAnotherProgramIsRefused(t *testing.T) {
	dir := t.TempDir()
	var field string
	stateDir := ownFolder(&field, "/var/lib/tandem", inStateDir)
	state := func(name string) error {
		return stateDir.set(Value{Text: filepath.Join(dir, name)})
	}
	for name, entries := range map[string][]string{
		"missing": nil, "empty": {""}, "a mount point": {"lost+found/", ".snapshot/"}, "a policy file before the first start": {"policy.yaml"},
		"one file of an agent": {"passwd", "nomad-gpu.json"},
	} {
		fill(t, filepath.Join(dir, name), entries)
		if err := state(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	fill(t, filepath.Join(dir, "kubernetes"), []string{"pki/", "admin.conf"})
	if err := state("kubernetes"); err == nil || !strings.HasSuffix(err.Error(), "/kubernetes has files of other programs, such as admin.conf") {
		t.Error(err)
	}
}

// What agents leave in their state directories are names of this kind.
func TestNamesInStateDirectories(t *testing.T) {
	entries, err := filepath.Glob("../../test/golden/testdata/state-*/*")
	if err != nil || len(entries) < 5 {
		t.Fatal(entries, err)
	}
	for _, e := range entries {
		if !inStateDir(filepath.Base(e)) {
			t.Error(e)
		}
	}
}

// fill makes a folder with entries: files, and folders with a slash.
func fill(t *testing.T, folder string, entries []string) {
	t.Helper()
	for _, e := range entries {
		check.NoError(t, os.MkdirAll(filepath.Join(folder, filepath.Dir(e)), 0o755))
		if filepath.Base(e) == e {
			check.NoError(t, os.WriteFile(filepath.Join(folder, e), nil, 0o600))
		}
	}
}
