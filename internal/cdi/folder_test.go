package cdi

import (
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
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// problem waits until no device is defined for a reason that has this text.
func (m *monitor) problem(t *testing.T, text string) core.State {
	t.Helper()
	return m.await(t, "a problem with "+text, func(s core.State) bool {
		return s.Host.CDI != nil && len(s.Host.CDI.Defined) == 0 && strings.Contains(s.Host.CDI.Problem, text)
	})
}

// Case 17: whatever is wrong with the folder is the reason that operators see, and is tried again until it is right.
func TestFolderProblems(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		damage, repair func(n *node) error
		want           string
	}{
		"the parent is missing": {func(n *node) error { return os.Remove(filepath.Dir(n.Folder)) }, func(n *node) error { return os.Mkdir(filepath.Dir(n.Folder), 0o755) }, "no such file or directory"},
		"a file in its place":   {func(n *node) error { return os.WriteFile(n.Folder, nil, 0o644) }, func(n *node) error { return os.Remove(n.Folder) }, "not a folder"},
		"a folder in the file's place": {func(n *node) error { return os.MkdirAll(n.file()+"/x", 0o755) },
			func(n *node) error { return os.RemoveAll(n.file()) }, "file exists"},
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
			for u := range s.Inventory.Units() {
				if u.Health.Schedulable() || !strings.Contains(u.Health.String(), tc.want) {
					t.Errorf("unit is %s", u.Health)
				}
			}
			if lines := w.Warnings(); len(lines) != 1 || !strings.Contains(lines[0], n.Folder) {
				t.Errorf("warnings %q", lines)
			}
			if once := ReadOnce(n.Options, s); name != "full" && name != "a folder in the file's place" && !strings.Contains(once.Problem+once.Reason, n.Folder) {
				t.Errorf("read once: %+v", once)
			}
			if err := tc.repair(n); err != nil {
				t.Fatal(err)
			}
			m.defined(t, ids(0)...)
			if lines := w.Warnings(); len(lines) != 0 {
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
	for u := range s.Inventory.Units() {
		if want := u.Device.ID != coretest.GPU(2); u.Health.Schedulable() != want {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
	if err := syscall.Mount("none", n.Folder, "tmpfs", syscall.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	m.defined(t, ids(0, 1, 2)...)
}

// Cases 17 and 33: whoever empties the folder, removes it or removes and makes it again, the file is back within a few seconds.
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
			eventually(t, name, there)
			_ = os.RemoveAll(n.Folder + "-old")
		}
	}
	m.defined(t, ids(0)...)
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Case 18: in the same folder, runtimes refuse a name that two files define. Such a device is not defined, until the other file is gone.
func TestConflict(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	w, _ := n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	other := filepath.Join(n.Folder, "fork.json")
	write(t, other, `{"cdiVersion": "0.3.0", "kind": "`+vendor+`/gpu", "devices": [{"name": "`+string(coretest.GPU(1))+`", "containerEdits": {"env": ["A=B"]}}]}`, 0o644)
	s := m.defined(t, ids(0)...)
	u, _ := s.Inventory.Unit(inventory.UnitID(coretest.GPU(1)))
	if !strings.Contains(u.Health.String(), other+" defines device \""+string(coretest.GPU(1))) {
		t.Errorf("GPU 1 is %s", u.Health)
	}
	if lines := w.Warnings(); len(lines) != 1 || !strings.Contains(lines[0], other) || !strings.Contains(lines[0], n.file()) {
		t.Errorf("warnings %q", lines)
	}
	write(t, n.Folder+"/other.yaml", "cdiVersion: 0.3.0\nkind: nvidia.com/gpu\ndevices: [{name: "+string(coretest.GPU(0))+", containerEdits: {env: [A=B]}}]\n", 0o644) // another kind
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	m.defined(t, ids(0, 1)...)
	if lines := w.Warnings(); len(lines) != 0 {
		t.Errorf("warnings %q", lines)
	}
}

// What another process writes into the file is answered at once, and operators are told. During a pause because of many such changes,
// the devices are defined that its file defines.
func TestContest(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	w, stop := n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	stranger := `{"cdiVersion": "0.3.0", "kind": "` + vendor + `/gpu", "devices": [{"name": "` + string(coretest.GPU(0)) + `", "containerEdits": {"env": ["A=B"]}}]}`
	write(t, n.file(), stranger, 0o644)
	eventually(t, "written again", func() bool { text, err := os.ReadFile(n.file()); return err == nil && len(text) > 1000 })
	eventually(t, "warned", func() bool {
		lines := w.Warnings()
		return len(lines) == 1 && strings.HasPrefix(lines[0], n.file()+" was changed by another process")
	})
	m.defined(t, ids(0, 1)...)
	stop()

	now := time.Now()
	w = New(n.Options)
	if out := w.pass(t.Context(), m.State()); out.failed {
		t.Fatalf("%+v", out.cdi)
	}
	w.contest = contest{path: n.file(), count: 4, last: now, until: now.Add(time.Hour)}
	write(t, n.file(), stranger, 0o644)
	out := w.pass(t.Context(), m.State())
	if !out.failed || !slices.Equal(out.cdi.Defined, ids(0)) || !strings.Contains(out.cdi.Problem, "changed by another process again and again") {
		t.Errorf("%+v", out.cdi)
	}
	w.contest.until = now
	if out := w.pass(t.Context(), m.State()); out.failed || len(out.cdi.Defined) != 2 {
		t.Errorf("%+v", out.cdi)
	}
}

// Two writers that answer each other wake the runtimes less and less.
func TestContestPauses(t *testing.T) {
	var c contest
	now := time.Unix(1_800_000_000, 0)
	answered := 0
	for range 600 { // a change each second
		if c.enter("file", now) == nil {
			answered++
		}
		now = now.Add(time.Second)
	}
	if answered < 10 || answered > 20 || len(c.warnings(now)) != 1 {
		t.Errorf("%d of 600 changes were answered; warnings %q", answered, c.warnings(now))
	}
	now = now.Add(contestForget + time.Minute)
	if lines := c.warnings(now); len(lines) > 0 {
		t.Errorf("warnings %q", lines)
	}
	if c.enter("file", now) != nil || c.enter("file", now) != nil {
		t.Error("a change long after the others was not answered at once")
	}
}

// Case 27: the host's paths, wherever this process has the roots; and nodes of GPUs for graphics.
func TestOtherRoots(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(inventory.Injection{CDI: inventory.CDIAuto})
	n.DriverRoot, n.DevRoot, n.Auto = "/run/nvidia/driver", "/run/nvidia/driver", true
	n.HookPath = "/run/nvidia/driver/usr/bin/nvidia-ctk"
	n.run(t, m)
	m.read(coretest.GPUs(1))
	s := m.defined(t, ids(0)...)
	if !s.Host.CDI.Usable || !strings.Contains(s.Host.CDI.Reason, n.HookPath) {
		t.Errorf("%+v", s.Host.CDI)
	}
	made := n.spec(t)
	for _, mount := range made.ContainerEdits.Mounts {
		if mount.HostPath != "/run/nvidia/driver"+mount.ContainerPath {
			t.Errorf("mount %+v", mount)
		}
	}
	for _, node := range slices.Concat(made.ContainerEdits.DeviceNodes, deviceOf(t, made, "0").ContainerEdits.DeviceNodes) {
		if node.HostPath != "/run/nvidia/driver"+node.Path {
			t.Errorf("node %+v", node)
		}
	}
	if len(made.ContainerEdits.Hooks) != 2 { // of a program of unknown age
		t.Errorf("hooks %v", made.ContainerEdits.Hooks)
	}
	plan, err := s.Inventory.Reserve(inventory.UnitID(coretest.GPU(0)))
	if want := vendor + "/gpu=" + string(coretest.GPU(0)); err != nil || !slices.Equal(plan.CDI, []string{want}) {
		t.Errorf("plan %v, %v", plan.CDI, err)
	}
}

// auto without a hook program is not usable, and the listed strategy is, with a warning.
func TestHookProgramMissing(t *testing.T) {
	t.Parallel()
	for _, auto := range []bool{true, false} {
		n, m := newNode(t), newMonitor(inventory.Injection{CDI: inventory.CDIAuto})
		n.Auto, n.HookPath = auto, "/usr/bin/nvidia-cdi-hook"
		w, _ := n.run(t, m)
		m.read(coretest.GPUs(1))
		s := m.defined(t, ids(0)...)
		if s.Host.CDI.Usable == auto || auto && !strings.Contains(s.Host.CDI.Reason, "hook program /usr/bin/nvidia-cdi-hook is not on the host") {
			t.Errorf("auto %v: %+v", auto, s.Host.CDI)
		}
		if lines := w.Warnings(); len(lines) == 0 != auto {
			t.Errorf("auto %v: warnings %q", auto, lines)
		}
		if !auto {
			continue
		}
		plan, err := s.Inventory.Reserve(inventory.UnitID(coretest.GPU(0)))
		if err != nil || plan.CDI != nil {
			t.Errorf("plan %v, %v", plan.CDI, err)
		}
		write(t, n.root+n.HookPath, "", 0o755) // and a file of its package makes the folder change
		write(t, n.Folder+"/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: all, containerEdits: {env: [A=B]}}]\n", 0o644)
		m.await(t, "usable", func(s core.State) bool { return s.Host.CDI.Usable })
	}
}

// Without hooks, the libraries are mounted under the names by which programs load them.
func TestWithoutHooks(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.DisabledHooks = []string{"all"}
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	e := n.spec(t).ContainerEdits
	var targets []string
	for _, mount := range e.Mounts {
		targets = append(targets, filepath.Base(mount.ContainerPath))
	}
	for _, want := range []string{"libcuda.so", "libcuda.so.1", "libcuda.so." + version, "libnvidia-ml.so.1"} {
		if !slices.Contains(targets, want) {
			t.Errorf("no %s in %v", want, targets)
		}
	}
	if len(e.Hooks) > 0 {
		t.Errorf("hooks %v", e.Hooks)
	}
}

// Cases 6 and 7: other devices have files of their own, if the host has the devices; the order of names is that of NVIDIA's plugin.
func TestOtherDevices(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.GDS, n.MOFED, n.GDRCopy, n.IMEXChannels = true, true, true, []int{0}
	w, _ := n.run(t, m)
	stale := filepath.Join(n.Folder, vendor+"-gds.json")
	write(t, stale, "{}", 0o644)
	m.read(coretest.GPUs(1))
	s := m.defined(t, ids(0)...)
	if len(s.Host.CDI.Others) > 0 || len(w.Warnings()) > 0 {
		t.Errorf("%v, %q", s.Host.CDI.Others, w.Warnings())
	}
	if _, err := os.Stat(stale); err == nil {
		t.Error("the file of devices that are not there remains")
	}
	for _, name := range []string{"nvidia-fs0", "infiniband/uverbs0", "gdrdrv"} {
		path := filepath.Join(n.root, "dev", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
			t.Skip("SKIPPED: ", err)
		}
	}
	reading := coretest.GPUs(1)
	reading.Nodes = append(reading.Nodes, gpu.IMEXChannelNode)
	m.read(gpu.NewSnapshot(reading))
	s = m.await(t, "a channel", func(s core.State) bool { return len(s.Host.CDI.Others) == 4 })
	want := []string{vendor + "/imex-channel=0", vendor + "/gdrcopy=all", vendor + "/gds=all", vendor + "/mofed=all"}
	if !slices.Equal(s.Host.CDI.Others, want) {
		t.Errorf("%v", s.Host.CDI.Others)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.Folder), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range want {
		if cache.GetDevice(name) == nil {
			t.Errorf("%s is not defined", name)
		}
	}
	if imex := cache.GetDevice(want[0]).GetSpec(); len(imex.ContainerEdits.Env) > 0 || imex.Version != "0.5.0" {
		t.Errorf("IMEX: %+v", imex.Spec)
	}
}
