package statefile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

func TestReadsWhatWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "agent.json")
	check.NoError(t, os.Mkdir(filepath.Dir(path), 0o755))
	check.NoError(t, os.WriteFile(path, nil, 0o644)) // the mode of an earlier file does not matter
	for _, text := range []string{"first", "", "the second"} {
		check.NoError(t, Write(path, []byte(text)))
		got, err := Read(path, len(text), 0)
		check.NoError(t, err)
		if !bytes.Equal(got, []byte(text)) {
			t.Errorf("%q, want %q", got, text)
		}
	}
	info, err := os.Stat(path)
	check.NoError(t, err)
	if info.Mode() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
}

func TestReadRefusesWhatNoAgentWrote(t *testing.T) {
	dir := t.TempDir()
	fifo, link, large := filepath.Join(dir, "fifo"), filepath.Join(dir, "link"), filepath.Join(dir, "large")
	check.NoError(t, syscall.Mkfifo(fifo, 0o600))
	check.NoError(t, os.Symlink("/dev/zero", link))
	check.NoError(t, os.WriteFile(large, make([]byte, 11), 0o600))
	for _, c := range []struct {
		path  string
		flags int
	}{{fifo, SharedDir}, {link, 0}, {large, 0}, {dir, 0}} {
		if _, err := Read(c.path, 10, c.flags); !IsContent(err) {
			t.Errorf("%s: %v", c.path, err)
		}
	}
	if _, err := Read(link, 10, SharedDir); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a symbolic link: %v", err)
	}
	if _, err := Read(filepath.Join(dir, "missing"), 10, 0); !errors.Is(err, fs.ErrNotExist) || IsContent(err) {
		t.Errorf("a missing file: %v", err)
	}
}

// Only the temporary files of that file are removed.
func TestRemoveTemporary(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "agent.json")
	for _, name := range []string{".agent.json123", ".agent.json4", ".agent.json.broken", ".other.json5"} {
		check.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	check.NoError(t, Write(path, nil))
	RemoveTemporary(path)
	left, err := os.ReadDir(dir)
	check.NoError(t, err)
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	if want := []string{".agent.json.broken", ".other.json5", "agent.json"}; len(names) != 3 || names[0] != want[0] || names[1] != want[1] || names[2] != want[2] {
		t.Errorf("%q, want %q", names, want)
	}
}

// Of the files that are set aside under one suffix the first ones and the latest remain.
func TestFilesThatAreSetAsideDoNotReplaceEachOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.json")
	var names []string
	for n := range 7 {
		check.NoError(t, os.WriteFile(path, []byte{byte('0' + n)}, 0o600))
		name, err := SetAside(path, "broken")
		check.NoError(t, err)
		names = append(names, filepath.Base(name))
	}
	want := []string{"agent.json.broken", "agent.json.broken.1", "agent.json.broken.2", "agent.json.broken.3", "agent.json.broken.4", "agent.json.broken.4", "agent.json.broken.4"}
	if !slices.Equal(names, want) {
		t.Errorf("names %q", names)
	}
	for n, content := range map[int]string{0: "0", 3: "3", 4: "6"} {
		if text, err := os.ReadFile(filepath.Join(filepath.Dir(path), want[n])); err != nil || string(text) != content {
			t.Errorf("%s has %q, %v", want[n], text, err)
		}
	}
	if kept, err := Kept(path, "broken"); err != nil || len(kept) != 5 || filepath.Base(kept[4]) != want[4] {
		t.Errorf("kept %q, %v", kept, err)
	}
	if kept, err := Kept(filepath.Join(path+".broken", "below a file"), "broken"); err != nil || len(kept) > 0 {
		t.Errorf("kept %q, %v", kept, err)
	}
	if _, err := SetAside(path, "broken"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
}
