package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// create makes empty files in place of device nodes.
func create(t testing.TB, paths ...string) {
	t.Helper()
	for _, p := range paths {
		must(t, os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, nil, 0o600))
	}
}

func TestNodesWithoutDriverCall(t *testing.T) {
	m, s := start(t, "a100-mig", open)
	first := snapshot(t, s).Nodes
	before := total(calls(t, m))
	for _, name := range []string{"nvidia-uvm", "nvidia-caps/nvidia-cap9999", "nvidia9"} {
		path, node := filepath.Join(m.Root, "dev", name), "/dev/"+name
		_ = os.Remove(path)                                 // some exist already
		for _, present := range []bool{true, false, true} { // in quick succession
			if present {
				create(t, path)
			} else {
				must(t, os.Remove(path))
			}
			if got := s.Nodes(); slices.Contains(got, node) != present || !slices.IsSorted(got) {
				t.Errorf("%s, present %t: %v", node, present, got)
			}
		}
	}
	must(t, os.Remove(filepath.Join(m.Root, "dev/nvidia9")), os.RemoveAll(filepath.Join(m.Root, "dev/nvidia-caps")))
	create(t, filepath.Join(m.Root, "dev/sda"))
	for _, node := range s.Nodes() {
		if !slices.Contains(first, node) || filepath.Dir(node) != "/dev" {
			t.Errorf("%s is listed", node)
		}
	}
	if n := total(calls(t, m)) - before; n != 0 {
		t.Errorf("%d driver calls", n)
	}
}

// The kernel's clock for modification times advances every 1 to 10 ms: a node that is created just after the folder was listed
// may not change the time.
func TestNodeWithinMTimeGranularity(t *testing.T) {
	root := t.TempDir()
	dev := os.DirFS(root)
	var l nodeList
	create(t, filepath.Join(root, "nvidia0"))
	mtime := time.Now()
	must(t, os.Chtimes(root, mtime, mtime))
	l.current(dev)
	create(t, filepath.Join(root, "nvidia-uvm"))
	must(t, os.Chtimes(root, mtime, mtime))
	if got := l.current(dev); len(got) != 2 {
		t.Errorf("got %v", got)
	}
	old := mtime.Add(-time.Hour)
	must(t, os.Chtimes(root, old, old))
	l.current(dev)
	create(t, filepath.Join(root, "nvidia1"))
	must(t, os.Chtimes(root, old, old)) // as on a file system without modification times of folders
	if got := l.current(dev); len(got) != 2 {
		t.Errorf("a folder with an old mtime was listed: %v", got)
	}
	if got := l.relist(dev); len(got) != 3 {
		t.Errorf("relisted: %v", got)
	}
}

// Each step ends with the change of a node, and is one event or several; what precedes it is none.
func TestNodesChanged(t *testing.T) {
	dev := t.TempDir()
	w, err := watchNodes(dev)
	must(t, err)
	defer w.close()
	at := func(name string) string { return filepath.Join(dev, name) }
	for _, step := range []struct {
		name string
		do   func() error
		want bool
	}{
		{"another node", func() error { return os.WriteFile(at("null"), nil, 0o666) }, false},
		{"a write to it", func() error { return os.WriteFile(at("null"), []byte("x"), 0o666) }, false},
		{"a node", func() error { return os.WriteFile(at("nvidia0"), nil, 0o666) }, true},
		{"a write to a GPU's node", func() error { return os.WriteFile(at("nvidia0"), []byte("x"), 0o666) }, false},
		{"a folder", func() error { return os.Mkdir(at("nvidia-caps"), 0o755) }, true},
		{"a node in it", func() error { return os.WriteFile(at("nvidia-caps/nvidia-cap1"), nil, 0o666) }, true},
		{"without the folder", func() error { return os.RemoveAll(at("nvidia-caps")) }, true},
		{"with it again", func() error { return os.Mkdir(at("nvidia-caps"), 0o755) }, true},
		{"a node in the new one", func() error { return os.WriteFile(at("nvidia-caps/nvidia-cap2"), nil, 0o666) }, true},
		{"a folder of IMEX channels", func() error { return os.Mkdir(at("nvidia-caps-imex-channels"), 0o755) }, true},
		{"a channel", func() error { return os.WriteFile(at("nvidia-caps-imex-channels/channel0"), nil, 0o666) }, true},
		{"renamed", func() error { return os.Rename(at("nvidia0"), at("nvidia1")) }, true},
	} {
		must(t, step.do())
		limit := time.Second
		if !step.want {
			limit = 20 * time.Millisecond
		}
		if got := watch.Await(t.Context(), w.changed, limit); got != step.want {
			t.Errorf("%s: event %t", step.name, got)
		}
		for step.want && watch.Await(t.Context(), w.changed, 20*time.Millisecond) { // further events of the same step
		}
	}
	w.close()
	must(t, os.WriteFile(at("nvidia2"), nil, 0o666))
	if watch.Await(t.Context(), w.changed, 20*time.Millisecond) {
		t.Error("an event after close")
	}
	if _, err := watchNodes(at("missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without /dev: %v", err)
	}
}

// Of IMEX channels only channel 0 is listed, if it is a character device.
func TestIMEXChannelNode(t *testing.T) {
	for mode, want := range map[fs.FileMode][]string{
		fs.ModeDevice | fs.ModeCharDevice | 0o666: {"/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia0"},
		fs.ModeDevice | 0o666:                     {"/dev/nvidia0"},
		0o666:                                     {"/dev/nvidia0"},
	} {
		var l nodeList
		got := l.current(fstest.MapFS{
			"nvidia0": {}, "nvidia-caps-imex-channels/channel0": {Mode: mode},
			"nvidia-caps-imex-channels/channel1": {Mode: fs.ModeDevice | fs.ModeCharDevice},
		})
		if !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", mode, got, want)
		}
	}
}

// BenchmarkNodes lists /dev of a machine with eight GPUs and 400 other nodes, if nothing has changed (the monitor lists it every
// second) and if something has.
func BenchmarkNodes(b *testing.B) {
	root := b.TempDir()
	for i := range 400 {
		create(b, filepath.Join(root, fmt.Sprintf("other%d", i)))
	}
	for i := range 8 {
		create(b, filepath.Join(root, fmt.Sprintf("nvidia%d", i)), filepath.Join(root, fmt.Sprintf("nvidia-caps/nvidia-cap%d", i)))
	}
	create(b, filepath.Join(root, "nvidiactl"), filepath.Join(root, "nvidia-uvm"))
	old := time.Now().Add(-time.Hour)
	must(b, os.Chtimes(root, old, old), os.Chtimes(filepath.Join(root, "nvidia-caps"), old, old))
	dev := os.DirFS(root)
	b.Run("unchanged", func(b *testing.B) {
		var l nodeList
		b.ReportAllocs()
		for b.Loop() {
			l.current(dev)
		}
	})
	b.Run("changed", func(b *testing.B) {
		var l nodeList
		b.ReportAllocs()
		for b.Loop() {
			l.relist(dev)
		}
	})
}

func TestParseMIGMinors(t *testing.T) {
	got := parseMIGMinors(strings.Join([]string{
		"config 1", "monitor 2",
		"gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu12/gi14/ci7/access 1758",
		"", "gpu0/gi0/ci0/access", "gpu0/gi0/ci0/access x", "gpu0/gi0/ci0/access -1", "gpu0/gi0/ci0/config 9",
		"gpu0/gi0/ci0/dec0/access 9", "gpu0/gi/access 9", "gpu0/gi99999/access 9", "access 9", "gpu1/gi2/access 5 6",
	}, "\n"))
	want := migCapabilities{{0, 0, gpu.Whole}: 3, {0, 0, 0}: 4, {12, 14, 7}: 1758}
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(migCapability{})); diff != "" {
		t.Error(diff)
	}
	gi, ci := got.of(12, gpu.Placement{GI: 14, CI: 7})
	if gi != 0 || ci != 1758 {
		t.Errorf("gi %d, ci %d", gi, ci)
	}
	if gi, ci := migCapabilities(nil).of(0, gpu.Placement{}); gi != 0 || ci != 0 {
		t.Errorf("without a list: gi %d, ci %d", gi, ci)
	}
}

// The list of capabilities (/proc/driver/nvidia-caps) may be missing in a container, with a driver before R450, or with
// capabilities in procfs only (module parameter nv_cap_enable_devfs=0): instances then have no device nodes. The list is
// read when it appears.
func TestNoCapabilities(t *testing.T) {
	m := simdriver.Start(t, "a30")
	list := filepath.Join(m.Root, "proc/driver/nvidia-caps")
	must(t, os.Rename(list, list+".gone"))
	s := open(t, m)
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Profile == "" {
			t.Errorf("%+v", d)
		}
	}
	must(t, os.Rename(list+".gone", list))
	found := instances(snapshot(t, s), 1)
	if len(found) != 3 || found[0].GICap != 147 || found[0].CICap != 148 {
		t.Errorf("%+v", found)
	}
	// The list is by minor number: without it, the instances of a GPU have no device nodes.
	must(t, m.Set(1, "unsupported", "nvmlDeviceGetMinorNumber"))
	s = open(t, m)
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Minor != -1 {
			t.Errorf("%+v", d)
		}
	}
}

// String formats a capability as the kernel module does.
func (c migCapability) String() string {
	if c.ci == gpu.Whole {
		return fmt.Sprintf("gpu%d/gi%d/access", c.minor, c.gi)
	}
	return fmt.Sprintf("gpu%d/gi%d/ci%d/access", c.minor, c.gi, c.ci)
}

// The PCIe root of a GPU is the first folder below /sys/devices in the path to which sysfs links the GPU; "" if there is none.
func TestPCIeRoot(t *testing.T) {
	sys := t.TempDir()
	folder := filepath.Join(sys, "bus/pci/devices")
	must(t, os.MkdirAll(filepath.Join(folder, "0000:09:00.0"), 0o755)) // no link
	links := map[string]string{
		"0000:04:00.0":  "../../../devices/pci0000:00/0000:00:01.0/0000:04:00.0",
		"0000:05:00.0":  "../../../devices/pci0000:00/0000:05:00.0",
		"10000:e1:00.0": "../../../devices/pci0000:e0/0000:e0:0e.0/pci10000:e0/10000:e1:00.0", // behind a VMD
		"0000:06:00.0":  "../../../devices/platform/soc/pci0004:00/0000:06:00.0",
		"0000:07:00.0":  "../../../devices/pci0000:00",
		"0000:08:00.0":  "../../../devices/pci0000:00/0000:04:00.0",
	}
	for name, target := range links {
		must(t, os.Symlink(target, filepath.Join(folder, name)))
	}
	s := &Session{sys: os.DirFS(sys)}
	for pci, want := range map[gpu.PCIAddress]string{
		"0000:04:00.0": "pci0000:00", "0000:05:00.0": "pci0000:00", "10000:e1:00.0": "pci0000:e0",
		"0000:06:00.0": "", "0000:07:00.0": "", "0000:08:00.0": "", "0000:09:00.0": "", "0000:0a:00.0": "", "": "", "../x": "",
	} {
		if got := s.pcieRoot(pci); got != want {
			t.Errorf("%q is on %q, want %q", pci, got, want)
		}
	}
}

// FuzzKernelFiles: whatever sysfs, procfs and /dev contain, a NUMA node is the number in its file or -1, the minor numbers of
// a capability are those of its lines, and every node exists.
func FuzzKernelFiles(f *testing.F) {
	f.Add("0000:3b:00.0", "1\n", "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n", "Tegra\n", "nvidia0")
	f.Add("../../..", "-1", "gpu0/gi4294967295/access 3", "", "nvidia-caps/nvidia-cap7")
	f.Add("", "99999999999999999999", "\x00", "\xff", "nvidia[")
	f.Add("0000:3b:00.0", "0x1", "gpu0/gi0/access 1048576", "Tegra194", "nvidia-caps")
	f.Add("", "", "config 1\nmonitor 2\ngpu-1/gi0/access 3\ngpu0/gi0/access 99999999999999999999", "", "")
	f.Fuzz(func(t *testing.T, pci, numa, minors, family, node string) {
		sys, dev := fstest.MapFS{"devices/soc0/family": {Data: []byte(family)}}, fstest.MapFS{}
		if p := path.Join("bus/pci/devices", pci, "numa_node"); strings.HasPrefix(p, "bus/pci/devices/") {
			sys[p] = &fstest.MapFile{Data: []byte(numa)}
		}
		if path.Clean("/"+node) == "/"+node && node != "" {
			dev[node] = &fstest.MapFile{}
		}
		s := &Session{sys: sys, dev: dev, proc: fstest.MapFS{"driver/nvidia-caps/mig-minors": {Data: []byte(minors)}}}

		if got := s.numaNode(gpu.PCIAddress(pci)); got < -1 || got >= 0 {
			if n, err := strconv.Atoi(strings.TrimSpace(numa)); err != nil || n != got {
				t.Errorf("NUMA node %d of %q", got, numa)
			}
		}
		var formatted strings.Builder
		for c, n := range s.capabilities() {
			if n < 0 || n >= 1<<20 || c.minor < 0 || c.gi == gpu.Whole {
				t.Errorf("%+v is %d", c, n)
			}
			fmt.Fprintln(&formatted, c, n)
		}
		if diff := gocmp.Diff(s.capabilities(), parseMIGMinors(formatted.String()), gocmp.AllowUnexported(migCapability{})); diff != "" {
			t.Error("formatted and parsed again:", diff)
		}
		for _, n := range s.Nodes() {
			if name := strings.TrimPrefix(n, "/dev/"); name != node || !strings.HasPrefix(path.Base(name), "nvidia") {
				t.Errorf("node %s, and %q is there", n, node)
			}
		}
		if isTegra(sys) && !strings.Contains(strings.ToLower(family), "tegra") {
			t.Errorf("%q is no Tegra", family)
		}
	})
}

// Folders that the kernel module adds or removes are a change once, as are several within procfsInterval.
func TestProcfsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proc := fstest.MapFS{"driver/nvidia/gpus/0000:01:00.0": {Mode: fs.ModeDir}}
		var w procfsWatch
		expect := func(what string, want bool) {
			t.Helper()
			time.Sleep(procfsInterval) // inside the bubble: fake time
			if got := w.changed(proc); got != want || w.changed(proc) {
				t.Errorf("%s: changed %t", what, got)
			}
		}
		expect("the first listing", false)
		expect("no change", false)
		for _, path := range []string{"gpus/0000:02:00.0", "capabilities/gpu0/mig/gi1", "capabilities/gpu0/mig/gi1/ci0"} {
			proc["driver/nvidia/"+path] = &fstest.MapFile{Mode: fs.ModeDir}
			expect(path+" is added", true)
			expect("and then", false)
			delete(proc, "driver/nvidia/"+path)
			expect(path+" is removed", true)
		}
		proc["driver/nvidia/version"] = &fstest.MapFile{}
		expect("another file", false)
		proc["driver/nvidia/gpus/0000:03:00.0"] = &fstest.MapFile{}
		time.Sleep(procfsInterval - 1)
		if w.changed(proc) {
			t.Error("listed before procfsInterval")
		}
	})
}
