package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// problem waits until no device is defined for a reason that has this text.
func (m *monitor) problem(t *testing.T, text string) core.State {
	t.Helper()
	return m.await(t, "a problem with "+text, func(s core.State) bool {
		return s.Host.CDI != nil && len(s.Host.CDI.Defined) == 0 && strings.Contains(s.Host.CDI.Problem, text)
	})
}

// Whatever is wrong with the folder is the reason that operators see, and is tried again until it is right.
func TestFolderProblems(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		damage, repair func(n *node) error
		want           string
	}{
		"no parent":           {func(n *node) error { return os.Remove(filepath.Dir(n.Folder)) }, func(n *node) error { return os.Mkdir(filepath.Dir(n.Folder), 0o755) }, "no such file or directory"},
		"a file in its place": {func(n *node) error { return os.WriteFile(n.Folder, nil, 0o644) }, func(n *node) error { return os.Remove(n.Folder) }, "not a folder"},
		"a folder in the file's place": {func(n *node) error { return os.MkdirAll(n.file()+"/x", 0o755) },
			func(n *node) error { return os.RemoveAll(n.file()) }, "file exists"},
		"not mounted": {func(n *node) error {
			n.FolderIsMount = true
			return errorsOf(os.Mkdir(n.Folder, 0o755), sameFileSystem(n.Folder, "/"))
		}, func(n *node) error { return syscall.Mount("none", n.Folder, "tmpfs", 0, "") }, "not mounted from the host"},
		"full": {mountTmpfs("size=4k,nr_inodes=2"), func(n *node) error {
			return syscall.Mount("none", n.Folder, "tmpfs", syscall.MS_REMOUNT, "size=1m,nr_inodes=100")
		}, "no space left"},
		"read-only": {mountTmpfs("ro"), func(n *node) error { return syscall.Mount("none", n.Folder, "tmpfs", syscall.MS_REMOUNT, "") }, "read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, m := newNode(t), newMonitor(required())
			t.Cleanup(func() { _ = syscall.Unmount(n.Folder, syscall.MNT_DETACH) })
			if err := tc.damage(n); err != nil {
				t.Skip("SKIPPED: ", err)
			}
			w, _ := n.run(t, m)
			m.read(coretest.GPUs(1))
			s := m.problem(t, tc.want)
			for u := range s.Allocatable.Units() {
				if u.Health.Schedulable() || !strings.Contains(u.Health.String(), tc.want) {
					t.Errorf("unit is %s", u.Health)
				}
			}
			if lines := problem.Lines(w.Problems()); len(lines) != 1 || !strings.Contains(lines[0], n.Folder) {
				t.Errorf("warnings %q", lines)
			}
			if once := ReadOnce(n.Options, s); name != "full" && name != "a folder in the file's place" && !strings.Contains(once.Problem+once.Reason, n.Folder) {
				t.Errorf("read once: %+v", once)
			}
			check.NoError(t, tc.repair(n))
			m.defined(t, ids(0)...)
			if lines := problem.Lines(w.Problems()); len(lines) != 0 {
				t.Errorf("warnings %q", lines)
			}
		})
	}
}

func mountTmpfs(options string) func(*node) error {
	return func(n *node) error {
		if err := os.Mkdir(n.Folder, 0o755); err != nil {
			return err
		}
		var flags uintptr
		if options == "ro" {
			flags, options = syscall.MS_RDONLY, ""
		}
		return syscall.Mount("none", n.Folder, "tmpfs", flags, options)
	}
}

// A disk that is full or read-only later leaves devices as they were: the file that is there still defines them.
func TestWriteFailsLater(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	if err := mountTmpfs("")(n); err != nil {
		t.Skip("SKIPPED: ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(n.Folder, syscall.MNT_DETACH) })
	n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	if err := syscall.Mount("none", n.Folder, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Skip("SKIPPED: ", err)
	}
	m.read(coretest.GPUs(3))
	s := m.await(t, "the new device is not defined", func(s core.State) bool { return strings.Contains(s.Host.CDI.Problem, "read-only") })
	if !slices.Equal(s.Host.CDI.Defined, ids(0, 1)) {
		t.Errorf("%+v", s.Host.CDI)
	}
	for u := range s.Allocatable.Units() {
		if want := u.Device.ID != coretest.GPU(2); u.Health.Schedulable() != want {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
	check.NoError(t, syscall.Mount("none", n.Folder, "tmpfs", syscall.MS_REMOUNT, ""))
	m.defined(t, ids(0, 1, 2)...)
}

// If the folder is emptied, removed, or removed and made again, the file is back within a few seconds.
func TestFolderEmptied(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	there := func() bool { _, err := cdi.ReadSpec(n.file(), 0); return err == nil }
	for range 2 {
		for name, do := range map[string]func() error{
			"file removed":     func() error { return os.Remove(n.file()) },
			"folder removed":   func() error { return os.RemoveAll(n.Folder) },
			"folder made anew": func() error { return errorsOf(os.RemoveAll(n.Folder), os.Mkdir(n.Folder, 0o755)) },
			"folder moved":     func() error { return os.Rename(n.Folder, n.Folder+"-old") },
			"file damaged":     func() error { return os.WriteFile(n.file(), []byte("{"), 0o644) },
		} {
			if err := do(); err != nil && !os.IsExist(err) { // the writer may be faster
				t.Fatalf("%s: %v", name, err)
			}
			check.Until(t, name, there)
			_ = os.RemoveAll(n.Folder + "-old")
		}
	}
	m.defined(t, ids(0)...)
}

// sameFileSystem fails unless two paths are on one.
func sameFileSystem(a, b string) error {
	var x, y syscall.Stat_t
	if err := errorsOf(syscall.Stat(a, &x), syscall.Stat(b, &y)); err != nil {
		return err
	}
	if x.Dev != y.Dev {
		return fmt.Errorf("%s and %s are on different file systems", a, b)
	}
	return nil
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// In the same folder, runtimes refuse a name that two files define. Such a device is not defined, until the other file is gone.
func TestConflict(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	w, _ := n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	other := filepath.Join(n.Folder, "fork.json")
	write(t, other, `{"cdiVersion": "0.3.0", "kind": "`+vendor+`/gpu", "devices": [{"name": "`+string(coretest.GPU(1))+`", "containerEdits": {"env": ["A=B"]}}]}`, 0o644)
	s := m.defined(t, ids(0)...)
	u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(1)))
	if !strings.Contains(u.Health.String(), other+" defines device \""+string(coretest.GPU(1))) {
		t.Errorf("GPU 1 is %s", u.Health)
	}
	if lines := problem.Lines(w.Problems()); len(lines) != 1 || !strings.Contains(lines[0], other) || !strings.Contains(lines[0], n.file()) {
		t.Errorf("warnings %q", lines)
	}
	write(t, n.Folder+"/other.yaml", "cdiVersion: 0.3.0\nkind: nvidia.com/gpu\ndevices: [{name: "+string(coretest.GPU(0))+", containerEdits: {env: [A=B]}}]\n", 0o644) // another kind
	check.NoError(t, os.Remove(other))
	m.defined(t, ids(0, 1)...)
	if lines := problem.Lines(w.Problems()); len(lines) != 0 {
		t.Errorf("warnings %q", lines)
	}
}

// A name that two files define matters only if containers get devices by it.
func TestConflictOfIndices(t *testing.T) {
	n, m := newNode(t), newMonitor(required())
	write(t, filepath.Join(n.Folder, "fork.json"), `{"cdiVersion": "0.5.0", "kind": "`+vendor+`/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=B"]}}]}`, 0o644)
	m.read(coretest.GPUs(2))
	for _, n.Indices = range []bool{false, true} {
		want := ids(0, 1)
		if n.Indices {
			want = ids(1)
		}
		w := New(n.Options)
		if out := w.pass(t.Context(), m.State()); !slices.Equal(out.cdi.Defined, want) || len(problem.Lines(w.Problems())) != 1 {
			t.Errorf("indices %t: %v defined, warnings %q", n.Indices, out.cdi.Defined, problem.Lines(w.Problems()))
		}
	}
}

// What another process writes into the file is replaced at once, and operators get a warning. During a pause because of many such changes,
// the devices are defined that its file defines.
func TestContest(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	w, stop := n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	stranger := `{"cdiVersion": "0.3.0", "kind": "` + vendor + `/gpu", "devices": [{"name": "` + string(coretest.GPU(0)) + `", "containerEdits": {"env": ["A=B"]}}]}`
	write(t, n.file(), stranger, 0o644)
	check.Until(t, "written again", func() bool { text, err := os.ReadFile(n.file()); return err == nil && len(text) > 1000 })
	check.Until(t, "warned", func() bool {
		lines := problem.Lines(w.Problems())
		return len(lines) == 1 && strings.HasPrefix(lines[0], "CDI: "+n.file()+" was changed by another process")
	})
	m.defined(t, ids(0, 1)...)
	stop()

	now := time.Now()
	w = New(n.Options)
	if out := w.pass(t.Context(), m.State()); out.failed {
		t.Fatalf("%+v", out.cdi)
	}
	w.conflict = writeConflict{path: n.file(), count: 4, last: now, until: now.Add(time.Hour)}
	write(t, n.file(), stranger, 0o644)
	out := w.pass(t.Context(), m.State())
	if !out.failed || !slices.Equal(out.cdi.Defined, ids(0)) || !strings.Contains(out.cdi.Problem, "changed by another process again and again") {
		t.Errorf("%+v", out.cdi)
	}
	w.conflict.until = now
	if out := w.pass(t.Context(), m.State()); out.failed || len(out.cdi.Defined) != 2 {
		t.Errorf("%+v", out.cdi)
	}
}

// Two writers that answer each other wake the runtimes less and less.
func TestContestPauses(t *testing.T) {
	var c writeConflict
	now := time.Unix(1_800_000_000, 0)
	answered := 0
	for range 600 { // a change each second
		if c.record("file", now) == nil {
			answered++
		}
		now = now.Add(time.Second)
	}
	if answered < 10 || answered > 20 || len(c.warnings(now)) != 1 {
		t.Errorf("%d of 600 changes were answered; warnings %q", answered, c.warnings(now))
	}
	now = now.Add(conflictForget + time.Minute)
	if lines := c.warnings(now); len(lines) > 0 {
		t.Errorf("warnings %q", lines)
	}
	for range conflictFree {
		if c.record("file", now) != nil {
			t.Error("a change long after the others was not answered at once")
		}
	}
}
