package ownership

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// smallDisk is the state directory on a file system of its own.
type smallDisk struct {
	testing.TB
	dir   string
	state string // the state directory
}

// mount mounts a file system with room for some files.
func mount(t testing.TB, flags uintptr) smallDisk {
	t.Helper()
	d := smallDisk{TB: t, dir: t.TempDir()}
	d.state = d.dir
	err := syscall.Mount("tmpfs", d.dir, "tmpfs", flags, "size=64k,nr_inodes=64,mode=0755")
	if errors.Is(err, syscall.EPERM) {
		t.Skip("mount is not permitted")
	}
	check.NoError(t, err)
	t.Cleanup(func() {
		if err := syscall.Unmount(d.dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return d
}

// remount changes the file system. It is busy while it is to be read-only and an agent has its lock file open.
func (d smallDisk) remount(flags uintptr, options string) error {
	return syscall.Mount("tmpfs", d.dir, "tmpfs", syscall.MS_REMOUNT|flags, options)
}

func (d smallDisk) path(name string) string { return filepath.Join(d.dir, name) }

// fill leaves no block: files can be made, and nothing can be written to them.
func (d smallDisk) fill() {
	d.Helper()
	if err := os.WriteFile(d.path("other"), make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		d.Fatalf("the disk is not full: %v", err)
	}
}

func (d smallDisk) free() {
	d.Helper()
	check.NoError(d, os.RemoveAll(d.path("other")))
}

// takeInodes leaves no inode: no file and no folder can be made.
func (d smallDisk) takeInodes() {
	d.Helper()
	check.NoError(d, os.Mkdir(d.path("other"), 0o700))
	for n := range 64 {
		path := filepath.Join(d.path("other"), string(rune('A'+n)))
		if err := os.WriteFile(path, nil, 0o600); errors.Is(err, syscall.ENOSPC) {
			return
		}
	}
	d.Fatal("the disk has inodes")
}

var allGPUs = []gpu.Placement{whole(0), whole(1), whole(2), whole(3)}

// mayOffer returns which of all GPUs an agent may offer by a view of the files.
func (v view) mayOffer() (may []gpu.Placement) {
	for _, p := range allGPUs {
		theirs := slices.ContainsFunc(v.overlaps, func(o inventory.PeerDevice) bool { return o.Earlier && o.At.Overlaps(p) })
		mine := v.own.Reason == "" || slices.ContainsFunc(v.own.At, func(at gpu.Placement) bool { return at.Covers(p) })
		if mine && !theirs {
			may = append(may, p)
		}
	}
	return may
}

// updates updates the files, which may fail, and checks what the agent may offer then.
func updates(t *testing.T, when string, s *store, may []gpu.Placement) view {
	t.Helper()
	v, err := s.update(t.Context(), want(allGPUs...))
	if _, notWritten := errors.AsType[writeError](err); err != nil && !notWritten {
		t.Fatalf("%s: %s: %v", when, s.agent, err)
	}
	if got := v.mayOffer(); !slices.Equal(got, may) {
		t.Errorf("%s: %s may offer %v, want %v: %+v, %v", when, s.agent, got, may, v.own, err)
	}
	return v
}

// An agent that was alone offers its GPUs while the disk is full. When there is room, its first file has these GPUs,
// whichever agent writes first, and also after a restart of each. The other agent offers nothing until it has read that
// file.
func TestFullDiskFirstFileHasWhatWasOffered(t *testing.T) {
	type agents struct{ alone, second *store }
	for name, then := range map[string]func(t *testing.T, start func(string) *store, a *agents){
		"the agent that was alone writes first": func(t *testing.T, _ func(string) *store, a *agents) {
			updates(t, "room", a.alone, allGPUs)
		},
		"the second agent writes first": func(t *testing.T, _ func(string) *store, a *agents) {
			updates(t, "room", a.second, nil)
			updates(t, "room", a.alone, allGPUs)
		},
		"the agent that was alone is restarted": func(t *testing.T, start func(string) *store, a *agents) {
			a.alone.close()
			updates(t, "room", a.second, nil)
			a.alone = start("nomad-gpu")
			unread := localDevices{unsure: func(gpu.Placement) bool { return true }}
			if _, err := a.alone.update(t.Context(), unread); err == nil {
				t.Error("a file was written before the GPUs were read")
			}
			updates(t, "the GPUs are not read", a.second, nil)
			updates(t, "restarted", a.alone, allGPUs)
		},
		"both are restarted, the second one first": func(t *testing.T, start func(string) *store, a *agents) {
			a.alone.close()
			a.second.close()
			a.second = start("k8s-gpu")
			updates(t, "restarted", a.second, nil)
			a.alone = start("nomad-gpu")
			updates(t, "restarted", a.alone, allGPUs)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := mount(t, 0)
			folder := d.path(FolderName)
			start := func(agent string) *store {
				s, _ := newStore(t, folder, agent, true)
				return s
			}
			check.NoError(t, os.Mkdir(folder, 0o700))
			d.fill()
			a := agents{start("nomad-gpu"), start("k8s-gpu")}
			updates(t, "alone", a.alone, allGPUs)
			v := updates(t, "second", a.second, nil)
			if len(v.faults) != 1 || !errors.Is(v.faults[0].err, errUnrecorded) {
				t.Errorf("the second agent has the faults %v", v.faults)
			}
			updates(t, "beside the second", a.alone, allGPUs)
			d.free()
			then(t, start, &a)
			updates(t, "at last", a.second, nil)
			updates(t, "at last", a.alone, allGPUs)
			if got := inFile(t, folder, "nomad-gpu"); !slices.Equal(got, allGPUs) {
				t.Errorf("recorded are %v", got)
			}
			if a.alone.isUnrecorded("nomad-gpu") {
				t.Error("the link stays")
			}
		})
	}
}

// With overlap = warn an agent offers what the other one offers, too. The other one, with refuse, must not.
func TestFullDiskBesideAnAgentThatWarns(t *testing.T) {
	d := mount(t, 0)
	check.NoError(t, os.Mkdir(d.path(FolderName), 0o700))
	d.fill()
	warns, _ := newStore(t, d.path(FolderName), "nomad-gpu", false)
	refuses, _ := newStore(t, d.path(FolderName), "k8s-gpu", true)
	updates(t, "alone", warns, allGPUs)
	updates(t, "full", refuses, nil)
	d.free()
	updates(t, "room", refuses, nil)
	updates(t, "room", warns, allGPUs)
	updates(t, "recorded", refuses, nil)
	warns.close()
	updates(t, "the other one has ended", refuses, nil)
}

// The same on a disk that takes no file.
func TestReadOnlyDiskBesideAnAgentThatWarns(t *testing.T) {
	d := mount(t, syscall.MS_RDONLY)
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, d.dir, on(inventory.OverlapWarn, 0, 1))
		k := kube(t, d.dir, on(inventory.OverlapRefuse, 1, 2))
		neverBoth(t, n, k, time.Minute)
		n.expectSchedulable(t, "read-only", 0, 1)
		check.NoError(t, d.remount(0, ""))
		neverBoth(t, n, k, 10*time.Second)
		n.expectSchedulable(t, "writable", 0, 1)
		k.expectSchedulable(t, "writable", 2)
	})
}

// The link of an earlier boot is void, and the agent of this boot replaces it.
func TestLinkOfAnEarlierBoot(t *testing.T) {
	d := mount(t, 0)
	check.NoError(t, os.Mkdir(d.path(FolderName), 0o700))
	d.fill()
	a, _ := newStore(t, d.path(FolderName), "nomad-gpu", true)
	updates(t, "before the reboot", a, allGPUs)
	a.close()
	b, _ := newStore(t, d.path(FolderName), "k8s-gpu", true)
	b.boot = "next"
	updates(t, "the other agent has files", b, nil)
	a, _ = newStore(t, d.path(FolderName), "nomad-gpu", true)
	a.boot = "next"
	updates(t, "the other agent has files", a, nil)
	d.free()
	updates(t, "room", b, nil)
	updates(t, "room", a, allGPUs)
	if _, err := os.Lstat(a.path("nomad-gpu", unrecordedSuffix)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link of the earlier boot: %v", err)
	}
}

// The earlier process of an agent gave a GPU out and made no link, because it was of an earlier version. The first file
// has the GPUs of work, although the other agent has no file yet.
func TestFirstFileHasGPUsOfWork(t *testing.T) {
	folder := t.TempDir()
	other, _ := newStore(t, folder, "k8s-gpu", true)
	check.NoError(t, other.acquireLiveness()) // it runs, and has written nothing
	o := want(allGPUs...)
	o.held = func(id gpu.DeviceID) bool { return id == coretest.GPU(0) }
	next := nextDevices(agentFile{agent: "nomad-gpu"}, []agentFile{unreadFile("k8s-gpu")}, o, true, now)
	if got := placements(next); !slices.Equal(got, allGPUs[:1]) {
		t.Errorf("recorded are %v", got)
	}
}

// startAll starts an agent with all GPUs of the tests.
func (d smallDisk) startAll(t *testing.T, name string, work *record) *agent {
	t.Helper()
	api := map[string]inventory.API{"nomad-gpu": inventory.Nomad, "k8s-gpu": inventory.DevicePlugin}[name]
	cfg := on(inventory.OverlapRefuse, 0, 1, 2, 3)
	return start(t, setup{name: name, stateDir: d.state, cfg: cfg, serve: func(w *Watcher) {
		w.Serve([]inventory.API{api}, Readers{api: work.read})
	}})
}

// On a disk that takes no file, no link and no folder, the first agent offers its GPUs and the second one none. The
// problems of the second one and the health of its GPUs have the reason. It keeps away while the first one is restarted,
// also if both are, and until the first one has recorded its GPUs.
func TestDiskThatTakesNoFile(t *testing.T) {
	for name, fault := range map[string]struct {
		begin func(*testing.T) smallDisk
		end   func(smallDisk) error
	}{
		"an empty read-only state directory": {
			func(t *testing.T) smallDisk { return mount(t, syscall.MS_RDONLY) },
			func(d smallDisk) error { return d.remount(0, "") },
		},
		"a missing state directory": {
			func(t *testing.T) smallDisk {
				d := mount(t, syscall.MS_RDONLY)
				d.state = d.path("lib/tandem")
				return d
			},
			func(d smallDisk) error { return d.remount(0, "") },
		},
		"a missing state directory, no inode": {
			func(t *testing.T) smallDisk {
				d := mount(t, 0)
				d.state = d.path("tandem")
				d.takeInodes()
				return d
			},
			func(d smallDisk) error { return os.RemoveAll(d.path("other")) },
		},
		"no inode": {
			func(t *testing.T) smallDisk { d := mount(t, 0); d.takeInodes(); return d },
			func(d smallDisk) error { return os.RemoveAll(d.path("other")) },
		},
		"no inode, with a folder": {
			func(t *testing.T) smallDisk {
				d := mount(t, 0)
				check.NoError(t, os.Mkdir(d.path(FolderName), 0o700))
				d.takeInodes()
				return d
			},
			func(d smallDisk) error { return os.RemoveAll(d.path("other")) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := fault.begin(t)
			synctest.Test(t, func(t *testing.T) {
				var jobs, pods record
				n := d.startAll(t, "nomad-gpu", &jobs)
				pass(time.Minute)
				n.expectSchedulable(t, "alone", 0, 1, 2, 3)
				jobs.set(coretest.GPU(0), "job a (allocation 1)")
				k := d.startAll(t, "k8s-gpu", &pods)
				neverBoth(t, n, k, time.Minute)
				k.expectSchedulable(t, "second")
				if lines := strings.Join(problem.Lines(k.watcher.Problems()), "\n"); !strings.Contains(lines, "take no new work") {
					t.Errorf("problems of the second agent: %s", lines)
				}
				for u := range k.Current().Units() {
					if !strings.Contains(u.Health.Detail, "perhaps") {
						t.Errorf("the health of a GPU of the second agent: %+v", u.Health)
						break
					}
				}
				n.end()
				pass(10 * time.Minute)
				k.expectSchedulable(t, "the first has ended")
				n = d.startAll(t, "nomad-gpu", &jobs)
				neverBoth(t, n, k, 5*time.Second)
				n.expectSchedulable(t, "the first is back", 0, 1, 2, 3)
				n.end()
				k.end()
				k = d.startAll(t, "k8s-gpu", &pods)
				pass(10 * time.Second)
				n = d.startAll(t, "nomad-gpu", &jobs)
				neverBoth(t, n, k, time.Minute)
				n.expectSchedulable(t, "both are back", 0, 1, 2, 3)
				check.NoError(t, fault.end(d))
				neverBoth(t, n, k, time.Minute)
				n.expectSchedulable(t, "the disk works", 0, 1, 2, 3)
				k.expectSchedulable(t, "the disk works")
				for _, a := range []*agent{n, k} {
					a.expectWarnings(t, "the disk works", 0)
				}
				if held, err := filelock.IsHeld(d.dir); held || err != nil {
					t.Errorf("the lock of the state directory stays: %v, %v", held, err)
				}
			})
		})
	}
}

// Every user can lock the state directory. That withholds no GPU for long from an agent that can write.
func TestLockOfTheStateDirectoryByAnotherUser(t *testing.T) {
	dir := t.TempDir()
	lock, err := filelock.Wait(t.Context(), dir)
	check.NoError(t, err)
	defer func() { _ = lock.Close() }()
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
		pass(10 * time.Second)
		n.expectSchedulable(t, "an agent may be about to write")
		n.expectWarnings(t, "an agent may be about to write", 1)
		pass(unseenAtMost)
		n.expectSchedulable(t, "none was", 0, 1)
	})
}

// The state directory is removed while agents run: each writes its files again with the next pass, and no GPU changes
// hands.
func TestStateDirectoryRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
		pass(5 * time.Second)
		k := kube(t, dir, on(inventory.OverlapRefuse, 1, 2))
		pass(5 * time.Second)
		check.NoError(t, os.RemoveAll(dir))
		neverBoth(t, n, k, 2*time.Second)
		folder := filepath.Join(dir, FolderName)
		if a, b := inFile(t, folder, "nomad-gpu"), inFile(t, folder, "k8s-gpu"); len(a) != 2 || len(b) != 1 {
			t.Errorf("recorded are %v and %v", a, b)
		}
		n.expectSchedulable(t, "removed", 0, 1)
		k.expectSchedulable(t, "removed", 2)
	})
}

// The second agent makes the missing state directory, which the disk takes again, before the first one has seen that:
//
//	nomad-gpu  locks the directory above ............................... file with all GPUs
//	k8s-gpu      makes the state directory, finds that lock: offers nothing
func TestStateDirectoryMadeByTheSecondAgent(t *testing.T) {
	d := mount(t, 0)
	d.state = d.path("tandem")
	d.takeInodes()
	synctest.Test(t, func(t *testing.T) {
		var jobs, pods record
		n := d.startAll(t, "nomad-gpu", &jobs)
		pass(time.Minute + defaultTimings.poll/2)
		n.expectSchedulable(t, "missing", 0, 1, 2, 3)
		check.NoError(t, os.RemoveAll(d.path("other")))
		k := d.startAll(t, "k8s-gpu", &pods)
		neverBoth(t, n, k, time.Minute)
		n.expectSchedulable(t, "made", 0, 1, 2, 3)
		k.expectSchedulable(t, "made")
	})
}
