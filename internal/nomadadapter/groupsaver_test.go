package nomadadapter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
)

func constantBootID(string) (string, error) { return "boot 1", nil }

// newSavingFixture is a plugin that groups by NVLinks and keeps names in a folder.
func newSavingFixture(t *testing.T, dir string) *fixture {
	t.Helper()
	s := newFixture(t)
	s.PersistGroups(constantBootID)
	s.mustConfigure(t, map[string]any{"group_by": "nvlink", "state_dir": dir})
	return s
}

// firstFingerprint are the groups in the first fingerprint of a process on this machine; the process ends after it.
func firstFingerprint(t *testing.T, s *fixture, inv *core.Inventory) map[string]string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.Source.Set(inv)
	ch := fingerprints(ctx, t, s)
	got := groupByDevice(t, receive(t, ch).Devices)
	s.stopAndFlush()
	return got
}

func groupFileContent(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, groupFileName))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	twoPairs = linked(4, [2]int{0, 1}, [2]int{2, 3})
	onePair  = linked(4, [2]int{0, 1})
)

// A process that begins after a link was lost announces each GPU in the group in which Nomad knows it.
func TestRestartAfterALostLinkKeepsTheGroups(t *testing.T) {
	dir := t.TempDir()
	for i, reading := range []core.Snapshot{twoPairs, onePair, linked(4), twoPairs} {
		if diff := cmp.Diff(inIslands(0, 0, 2, 2), firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(reading))); diff != "" {
			t.Errorf("process %d (-want +got):\n%s", i, diff)
		}
	}
	info, err := os.Stat(filepath.Join(dir, groupFileName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// Names are on disk when Nomad learns them: a kill can come right after that.
func TestNamesAreOnDiskWhenTheyAreAnnounced(t *testing.T) {
	dir := t.TempDir()
	s := newSavingFixture(t, dir)
	s.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
	next := openFingerprint(t, s.Plugin)
	next()
	if text := groupFileContent(t, dir); !strings.Contains(text, islandName(0)) {
		t.Errorf("not on disk:\n%s", text)
	}
	s.Source.Set(nodeInventory(twoPairs))
	next()
	if text := groupFileContent(t, dir); !strings.Contains(text, islandName(2)) {
		t.Errorf("not on disk:\n%s", text)
	}
	was, err := os.Stat(filepath.Join(dir, groupFileName))
	if err != nil {
		t.Fatal(err)
	}
	s.Source.Set(nodeInventory(twoPairs, lost(1)))
	next()
	if is, err := os.Stat(filepath.Join(dir, groupFileName)); err != nil || !os.SameFile(was, is) {
		t.Error("the file was written though nothing changed")
	}
}

// A file that is not understood is kept aside, and does not keep the plugin from its work.
func TestBrokenFileOfNames(t *testing.T) {
	good := func(t *testing.T) string {
		dir := t.TempDir()
		firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(twoPairs))
		return groupFileContent(t, dir)
	}(t)
	for name, text := range map[string]string{
		"empty":           "",
		"cut off":         good[:len(good)/2],
		"text behind it":  good + "{}",
		"another version": strings.Replace(good, `"version": 1`, `"version": 2`, 1),
		"no version":      "{}",
		"not JSON":        "names",
		"one name twice":  strings.ReplaceAll(good, islandName(2), islandName(0)),
		"no name":         strings.ReplaceAll(good, islandName(2), ""),
		"another type":    strings.ReplaceAll(good, `"gpu"`, `"tpu"`),
		"a GPU twice":     strings.ReplaceAll(good, gpuID(1), gpuID(0)),
		"too large":       good + strings.Repeat(" ", maxGroupFile),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, groupFileName)
			write(t, path, text)
			s := newSavingFixture(t, dir)
			if diff := cmp.Diff(inIslands(0, 0, -1, -1), firstFingerprint(t, s, nodeInventory(onePair))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if aside, err := os.ReadFile(path + ".broken"); err != nil || string(aside) != text {
				t.Errorf("kept aside: %q, %v", aside, err)
			}
			if n := strings.Count(s.Log.String(), "invalid group name file, renamed"); n != 1 {
				t.Errorf("%d lines in the log, want 1:\n%s", n, s.Log.String())
			}
			if diff := cmp.Diff(inIslands(0, 0, -1, -1), firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(twoPairs))); diff != "" {
				t.Errorf("the next process (-want +got):\n%s", diff)
			}
		})
	}
}

// A good file that can't be read is left as it is. What it says counts when it can be read again: soon, for all; later,
// for what was not announced meanwhile.
func TestFileOfNamesThatCannotBeRead(t *testing.T) {
	for name, tc := range map[string]struct {
		failures int64 // of the readings, the first ones
		want     map[string]string
		then     map[string]string // in the next process
	}{
		"for a moment": {2, inIslands(0, 0, 2, 2), inIslands(0, 0, 2, 2)},
		"for longer":   {loadAttempts + 1, inIslands(0, 0, -1, -1), inIslands(0, 0, -1, -1)},
		"for ever":     {1 << 40, inIslands(0, 0, -1, -1), inIslands(0, 0, 2, 2)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits
			dir := t.TempDir()
			firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(twoPairs))
			good := groupFileContent(t, dir)
			s := newSavingFixture(t, dir)
			var readings atomic.Int64
			s.readFile = func(path string) ([]byte, error) {
				if readings.Add(1) <= tc.failures {
					return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EMFILE}
				}
				return readGroupFile(path)
			}
			s.Source.Set(nodeInventory(onePair))
			next := openFingerprint(t, s.Plugin)
			if diff := cmp.Diff(tc.want, groupByDevice(t, next())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if tc.failures > loadAttempts {
				if text := groupFileContent(t, dir); text != good {
					t.Errorf("the file was written unread:\n%s", text)
				}
				if all := s.Log.String(); strings.Count(all, "group name file not read, groups may get other names") != 1 || !strings.Contains(all, "too many open files") {
					t.Errorf("logged:\n%s", all)
				}
			}
			if tc.failures == loadAttempts+1 {
				s.Source.Set(nodeInventory(linked(5, [2]int{0, 1}, [2]int{2, 4}))) // something to write
				if got := groupByDevice(t, next()); got[gpuID(4)] != islandName(2) {
					t.Errorf("a GPU that came: %v", got)
				}
				if text := groupFileContent(t, dir); !strings.Contains(text, gpuID(4)) {
					t.Errorf("not written:\n%s", text)
				}
			}
			if _, err := os.Stat(filepath.Join(dir, groupFileName+".broken")); err == nil {
				t.Error("the file was kept aside")
			}
			s.stopAndFlush()
			if diff := cmp.Diff(tc.then, firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(linked(4)))); diff != "" {
				t.Errorf("the next process (-want +got):\n%s", diff)
			}
		})
	}
}

// Two processes run for a moment when an agent is restarted: what one wrote the other does not undo.
func TestTwoProcessesKeepNames(t *testing.T) {
	dir := t.TempDir()
	old, young := newSavingFixture(t, dir), newSavingFixture(t, dir)
	old.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
	openFingerprint(t, old.Plugin)()
	young.Source.Set(nodeInventory(twoPairs))
	openFingerprint(t, young.Plugin)()
	old.Source.Set(nodeInventory(onlyGPUs(linked(5, [2]int{0, 1}, [2]int{2, 3}), 0, 1, 4)))
	await(t, "a GPU that only the old process saw", func() bool {
		return strings.Contains(groupFileContent(t, dir), fmt.Sprintf("%q", gpuID(4)))
	})
	if text := groupFileContent(t, dir); !strings.Contains(text, islandName(2)) {
		t.Errorf("what the other process wrote is gone:\n%s", text)
	}
}

// Without a state directory, and while the plugin is disabled, nothing is kept and nothing is waited for.
func TestNamesThatAreNotKept(t *testing.T) {
	dir := t.TempDir()
	for name, keys := range map[string]map[string]any{
		"no state directory": {"state_dir": ""},
		"disabled":           {"state_dir": dir, "enabled": false},
	} {
		s := newFixture(t)
		s.PersistGroups(func(string) (string, error) { return "", errors.New("unknown") })
		s.mustConfigure(t, keys)
		s.Source.Set(nodeInventory(twoPairs))
		openFingerprint(t, s.Plugin)()
		if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
			t.Errorf("%s: %v, %v", name, files, err)
		}
	}
}

// What a process that was killed while it wrote has left is removed by the next.
func TestHalfWrittenFileOfNamesIsRemoved(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "."+groupFileName+"1234"), "{")
	firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(twoPairs))
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 || files[0].Name() != groupFileName {
		t.Errorf("%v, %v", files, err)
	}
}

// Another configuration in the same process: the names stay, and go to where they are kept from now on.
func TestNamesAreKeptWhereTheConfigurationSays(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	firstFingerprint(t, newSavingFixture(t, other), nodeInventory(onlyGPUs(linked(6, [2]int{4, 5}), 4, 5)))
	s := newSavingFixture(t, dir)
	s.Source.Set(nodeInventory(twoPairs))
	next := openFingerprint(t, s.Plugin)
	next()
	s.mustConfigure(t, map[string]any{"group_by": "nvlink", "state_dir": other})
	await(t, "the next source", func() bool { return len(s.Started()) == 2 })
	s.mu.Lock()
	src := s.sources[1]
	s.mu.Unlock()
	src.Set(nodeInventory(linked(6)))
	want := inIslands(0, 0, 2, 2, 4, 4)
	if diff := cmp.Diff(want, groupByDevice(t, next())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := groupFileContent(t, other); !strings.Contains(text, islandName(0)) || !strings.Contains(text, islandName(4)) {
		t.Errorf("not written:\n%s", text)
	}
}
