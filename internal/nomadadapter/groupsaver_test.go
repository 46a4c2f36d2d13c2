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
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// newSavingFixture returns a plugin with group_by = "nvlink" that saves names in dir.
func newSavingFixture(t *testing.T, dir string) *fixture {
	t.Helper()
	s := newFixture(t, nil)
	s.PersistGroups(func(string) (string, error) { return "boot 1", nil })
	s.mustConfigure(t, map[string]any{"group_by": "nvlink", "state_dir": dir})
	return s
}

// checkProcess checks the group of each device in the first fingerprint of a process, which ends after it.
func checkProcess(t *testing.T, dir string, snapshot gpu.Snapshot, want map[string]string) *fixture {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := newSavingFixture(t, dir)
	s.Source.Set(nodeInventory(snapshot))
	checkEqual(t, "groups", want, groupByDevice(t, receive(t, fingerprints(ctx, t, s)).Devices))
	s.stopAndFlush()
	return s
}

func groupFileContent(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, groupFileName))
	check.NoError(t, err)
	return string(text)
}

var (
	twoPairs = linked(4, [2]int{0, 1}, [2]int{2, 3})
	onePair  = linked(4, [2]int{0, 1})
)

// Names are on disk before Nomad gets them: the process may be killed right after that. Like the others that read the file after a fingerprint, this test
// runs in a bubble: there a disk that takes a second, for which a fingerprint does not wait, takes no time.
func TestNamesAreSavedBeforeTheFingerprint(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		s.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
		next := openFingerprint(t, s.Plugin)
		next()
		checkContains(t, groupFileContent(t, dir), islandName(0))
		s.Source.Set(nodeInventory(twoPairs))
		next()
		checkContains(t, groupFileContent(t, dir), islandName(2))
		was, err := os.Stat(filepath.Join(dir, groupFileName))
		check.NoError(t, err)
		s.Source.Set(nodeInventory(twoPairs, lost(1)))
		next()
		if is, err := os.Stat(filepath.Join(dir, groupFileName)); err != nil || !os.SameFile(was, is) {
			t.Error("the file was written though nothing changed")
		}
	})
}

// A file that someone has removed, with its folder, is written again although no name is new.
func TestRemovedGroupFileIsWrittenAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		s.PersistGroups(func(string) (string, error) { return "boot 1", nil })
		s.PersistPolicy("agent 1")
		s.mustConfigure(t, map[string]any{"group_by": "nvlink", "state_dir": dir, "policy_file": policyFile(t, "version: v1\n")})
		s.Source.Set(nodeInventory(twoPairs))
		openFingerprint(t, s.Plugin)()
		synctest.Wait() // for the policy
		was := groupFileContent(t, dir)
		policy, err := os.ReadFile(filepath.Join(dir, policyCacheName))
		check.NoError(t, err)
		check.NoError(t, os.RemoveAll(dir))
		time.Sleep(statefile.LookEvery + time.Second)
		synctest.Wait()
		if is := groupFileContent(t, dir); is != was {
			t.Errorf("written again: %s", is)
		}
		if is, err := os.ReadFile(filepath.Join(dir, policyCacheName)); err != nil || string(is) != string(policy) {
			t.Errorf("the policy is not written again: %s, %v", is, err)
		}
	})
}

// An invalid file is renamed, and the plugin works without it.
func TestInvalidGroupFile(t *testing.T) {
	goodDir := t.TempDir()
	checkProcess(t, goodDir, twoPairs, inIslands(0, 0, 2, 2))
	good := groupFileContent(t, goodDir)
	for name, text := range map[string]string{
		"empty":           "",
		"truncated":       good[:len(good)/2],
		"trailing text":   good + "{}",
		"another version": strings.Replace(good, `"version": 2`, `"version": 3`, 1),
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
			s := checkProcess(t, dir, onePair, inIslands(0, 0, -1, -1))
			if renamed, err := os.ReadFile(path + ".broken"); err != nil || string(renamed) != text {
				t.Errorf("renamed: %q, %v", renamed, err)
			}
			if n := strings.Count(s.Log.String(), "invalid group name file, renamed"); n != 1 {
				t.Errorf("%d lines in the log, want 1:\n%s", n, s.Log.String())
			}
			checkProcess(t, dir, twoPairs, inIslands(0, 0, -1, -1))

			write(t, path, text+" ")
			checkProcess(t, dir, onePair, inIslands(0, 0, -1, -1))
			for file, want := range map[string]string{path + ".broken": text, path + ".broken.1": text + " "} {
				if got, err := os.ReadFile(file); err != nil || string(got) != want {
					t.Errorf("after a second one, %s has %q, %v", filepath.Base(file), got, err)
				}
			}
		})
	}
}

// A valid file that can't be read is not changed. Its names apply when it can be read again: all of them if that is before
// the first fingerprint, else those of groups that were not announced meanwhile.
func TestUnreadableGroupFile(t *testing.T) {
	for name, tc := range map[string]struct {
		failures int64 // number of reads that fail
		later    bool  // it can be read after the first fingerprint
		want     map[string]string
		then     map[string]string // in the next process
	}{
		"briefly": {2, false, inIslands(0, 0, 2, 2), inIslands(0, 0, 2, 2)},
		"longer":  {1 << 40, true, inIslands(0, 0, -1, -1), inIslands(0, 0, -1, -1)},
		"always":  {1 << 40, false, inIslands(0, 0, -1, -1), inIslands(0, 0, 2, 2)},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				checkProcess(t, dir, twoPairs, inIslands(0, 0, 2, 2))
				good := groupFileContent(t, dir)
				s := newSavingFixture(t, dir)
				var reads atomic.Int64
				var readable atomic.Bool
				s.readFile = func(path string) ([]byte, error) {
					if reads.Add(1) <= tc.failures && !readable.Load() {
						return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EMFILE}
					}
					return readGroupFile(path)
				}
				s.Source.Set(nodeInventory(onePair))
				next := openFingerprint(t, s.Plugin)
				checkEqual(t, "groups", tc.want, groupByDevice(t, next()))
				if tc.failures > loadAttempts {
					if text := groupFileContent(t, dir); text != good {
						t.Errorf("the file was replaced without being read:\n%s", text)
					}
					if all := s.Log.String(); strings.Count(all, "group name file not read, groups may get other names") != 1 || !strings.Contains(all, "too many open files") {
						t.Errorf("logged:\n%s", all)
					}
				}
				if tc.later {
					readable.Store(true)
					s.Source.Set(nodeInventory(linked(5, [2]int{0, 1}, [2]int{2, 4}))) // a new name to save
					if got := groupByDevice(t, next()); got[gpuID(4)] != islandName(2) {
						t.Errorf("a GPU that was added: %v", got)
					}
					checkContains(t, groupFileContent(t, dir), gpuID(4))
				}
				if _, err := os.Stat(filepath.Join(dir, groupFileName+".broken")); err == nil {
					t.Error("the file was renamed")
				}
				s.stopAndFlush()
				checkProcess(t, dir, linked(4), tc.then)
			})
		})
	}
}

// Two processes can run briefly when an agent restarts: neither removes the names that the other one saved.
func TestTwoProcessesSaveNames(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		older, newer := newSavingFixture(t, dir), newSavingFixture(t, dir)
		older.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
		openFingerprint(t, older.Plugin)()
		newer.Source.Set(nodeInventory(twoPairs))
		openFingerprint(t, newer.Plugin)()
		older.Source.Set(nodeInventory(onlyGPUs(linked(5, [2]int{0, 1}, [2]int{2, 3}), 0, 1, 4)))
		check.Until(t, "a GPU that only the older process found", func() bool {
			return strings.Contains(groupFileContent(t, dir), fmt.Sprintf("%q", gpuID(4)))
		})
		checkContains(t, groupFileContent(t, dir), islandName(2))
	})
}

// Without a state directory, and while the plugin is disabled, names are not saved.
func TestNamesAreNotSaved(t *testing.T) {
	dir := t.TempDir()
	for name, keys := range map[string]map[string]any{
		"no state directory": {"state_dir": ""},
		"disabled":           {"state_dir": dir, "enabled": false},
	} {
		s := newFixture(t, nodeInventory(twoPairs))
		s.PersistGroups(func(string) (string, error) { return "", errors.New("unknown") })
		s.mustConfigure(t, keys)
		openFingerprint(t, s.Plugin)()
		if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
			t.Errorf("%s: %v, %v", name, files, err)
		}
	}
}

// The temporary file of a process that was killed during a save is removed by the next process.
func TestTemporaryGroupFileIsRemoved(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "."+groupFileName+"1234"), "{")
	checkProcess(t, dir, twoPairs, inIslands(0, 0, 2, 2))
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 || files[0].Name() != groupFileName {
		t.Errorf("%v, %v", files, err)
	}
}

// With another state_dir in the same process the names stay, and are saved there too.
func TestNamesAfterAChangeOfStateDir(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		checkProcess(t, other, onlyGPUs(linked(6, [2]int{4, 5}), 4, 5), map[string]string{gpuID(4): islandName(4), gpuID(5): islandName(4)})
		s := newSavingFixture(t, dir)
		s.Source.Set(nodeInventory(twoPairs))
		next := openFingerprint(t, s.Plugin)
		next()
		s.mustConfigure(t, map[string]any{"group_by": "nvlink", "state_dir": other})
		check.Until(t, "the next source", func() bool { return len(s.Started()) == 2 })
		s.source(1).Set(nodeInventory(linked(6)))
		want := inIslands(0, 0, 2, 2, 4, 4)
		checkEqual(t, "groups", want, groupByDevice(t, next()))
		checkContains(t, groupFileContent(t, other), islandName(0), islandName(4))
	})
}
