package simdriver_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	gib   = uint64(1) << 30
	whole = uint64(nvml.DEVICE_MEMORY_LIMIT_MAX)
)

// limited is a machine with limits in an ordinary tree of control groups.
type limited struct {
	driver
	mount string
	gpu0  nvml.Device
}

func openLimited(t *testing.T, backend string, more ...string) limited {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root may set limits")
	}
	base, err := simdriver.Text("h100x8")
	ok(t, err)
	mount := filepath.Join(t.TempDir(), "cgroup")
	text, err := simdriver.WithLimits(base, backend, mount, more...)
	ok(t, err)
	d := initialise(t, simdriver.StartText(t, text))
	return limited{d, mount, d.gpu(0)}
}

// group makes a control group, with the backend's controller or without.
func (l limited) group(path string, controllers ...string) string {
	l.t.Helper()
	at, err := simdriver.MakeGroup(l.mount, path, controllers...)
	ok(l.t, err)
	return at
}

func (l limited) set(group string, soft, hard uint64, expected nvml.Return) {
	l.t.Helper()
	want(l.t, "Set", l.gpu0.SetMemoryLimits_v1(group, soft, hard), expected)
}

// is checks what Get returns.
func (l limited) is(group string, soft, hard, used uint64) {
	l.t.Helper()
	got := of(l.gpu0.GetMemoryLimits_v1(group)).get(l.t, "Get")
	if got.SoftLimit != soft || got.HardLimit != hard || got.CurrentUsed != used {
		l.t.Errorf("Get: soft %d, hard %d, used %d; want %d, %d, %d", got.SoftLimit, got.HardLimit, got.CurrentUsed, soft, hard, used)
	}
}

func (l limited) isNot(group string, expected nvml.Return) {
	l.t.Helper()
	of(l.gpu0.GetMemoryLimits_v1(group)).returns(l.t, "Get", expected)
}

func (l limited) allocate(group string, bytes uint64) simdriver.Allocation {
	l.t.Helper()
	a, err := l.m.Allocate(0, group, bytes)
	ok(l.t, err)
	return a
}

func (l limited) refuses(group string, bytes uint64) {
	l.t.Helper()
	if _, err := l.m.Allocate(0, group, bytes); !errors.Is(err, simdriver.ErrOutOfMemory) {
		l.t.Errorf("%d bytes in %s: %v, want no memory", bytes, group, err)
	}
}

// fence 1: charge, refusal over hard, release, no charge before the limit, Set below use, the nearest entry alone, shadowing, imports, creators that have ended.
func TestLimitsMisc(t *testing.T) {
	l := openLimited(t, simdriver.Misc)
	pod := l.group("/pod", "misc")
	a, b := l.group("/pod/a", "misc"), l.group("/pod/b", "misc")

	l.isNot(a, nvml.ERROR_NOT_SUPPORTED) // there is no entry, here or above
	early := l.allocate(a, 5*gib)        // no entry: it is charged to none
	l.set(a, 0, gib, nvml.SUCCESS)       // a first Set below use
	l.is(a, 0, gib, 0)
	ok(t, early.Free()) // nothing is released that was not charged
	l.is(a, 0, gib, 0)

	first := l.allocate(a, gib/2)
	l.refuses(a, gib/2+1)
	l.allocate(b, 70*gib) // the neighbour has no limit
	l.is(a, 0, gib, gib/2)
	l.set(a, 0, gib/4, nvml.ERROR_INVALID_ARGUMENT) // below use, and there is an entry
	l.is(a, 0, gib, gib/2)
	l.set(a, gib/4, 2*gib, nvml.SUCCESS)
	second := l.allocate(a, gib) // beyond soft is no error

	ok(t, first.Import())
	ok(t, first.Free(), second.Free())
	l.is(a, gib/4, 2*gib, gib/2) // the exporter has ended, the importer not
	ok(t, first.Free())
	l.is(a, gib/4, 2*gib, 0)
	l.allocate("", 90*gib) // the creator has ended
	l.is(a, gib/4, 2*gib, 0)

	// T4: the nearest entry counts, and it alone.
	l.set(pod, 0, 4*gib, nvml.SUCCESS)
	l.allocate(b, 3*gib)
	l.is(b, 0, 4*gib, 3*gib)
	l.allocate(a, 2*gib) // a's own entry: no sum over levels
	l.refuses(b, 2*gib)
	l.set(b, 0, whole, nvml.SUCCESS) // an entry that shadows the pod's, and no removal of one
	l.is(b, 0, whole, 0)
	l.allocate(b, 50*gib)
	l.is(pod, 0, 4*gib, 3*gib)

	of(l.gpu(1).GetMemoryLimits_v1(a)).returns(t, "another GPU", nvml.ERROR_NOT_FOUND)
}

// T2, T3: the group of a process that is charged is the nearest one in which the controller is on, while Set and Get take the group that they get.
func TestLimitsControllerOff(t *testing.T) {
	l := openLimited(t, simdriver.Misc, "memacct_controller = hugetlb")
	raw := l.group("/nomad.slice/share.slice/raw.scope", "misc")
	l.set(raw, 0, gib, nvml.SUCCESS)
	l.is(raw, 0, gib, 0)
	l.allocate(raw, 30*gib)
	l.is(raw, 0, gib, 0)
	l.group("/nomad.slice/share.slice", "hugetlb")
	l.set(filepath.Join(l.mount, "nomad.slice/share.slice"), 0, 2*gib, nvml.SUCCESS)
	l.refuses(raw, 3*gib)
	l.group("/nomad.slice/share.slice/raw.scope", "cpu", "hugetlb")
	l.refuses(raw, 2*gib)
	l.allocate(raw, gib)
	l.is(raw, 0, gib, gib)
}

// fence 26 of the rules: the order of checks, and what is no group.
func TestLimitsRefused(t *testing.T) {
	for _, backend := range []string{simdriver.Misc, simdriver.DMem} {
		t.Run(backend, func(t *testing.T) {
			l := openLimited(t, backend)
			a := l.group("/a", backend)
			l.set(a, 2*gib, gib, nvml.ERROR_INVALID_ARGUMENT)
			l.set(a, 0, 1<<44-1, nvml.ERROR_INVALID_ARGUMENT) // more than the GPU has
			l.set(l.mount, 0, gib, nvml.ERROR_NOT_SUPPORTED)  // root
			l.set(filepath.Join(l.mount, "none"), 0, gib, nvml.ERROR_OPERATING_SYSTEM)
			l.set(t.TempDir(), 0, gib, nvml.ERROR_OPERATING_SYSTEM) // no control group
			l.isNot(filepath.Join(a, "cgroup.procs"), nvml.ERROR_OPERATING_SYSTEM)
			ok(t, l.m.Set(0, "memory", "none"))
			l.set(a, 0, gib, nvml.ERROR_NOT_FOUND)
		})
	}
	t.Run("none", func(t *testing.T) {
		l := openLimited(t, "none")
		l.set(l.group("/a", "misc"), 0, gib, nvml.ERROR_NOT_SUPPORTED)
		l.isNot(l.mount, nvml.ERROR_NOT_SUPPORTED)
	})
	t.Run("before 615", func(t *testing.T) {
		l := openLimited(t, simdriver.Misc, "driver = 595.58.03")
		l.set(l.group("/a", "misc"), 0, gib, nvml.ERROR_FUNCTION_NOT_FOUND)
	})
}

// fence 30, the simulator's half: an entry outlives its group, and a group with the same address has it, with limit and charge.
func TestLimitsOfReusedAddress(t *testing.T) {
	l := openLimited(t, simdriver.Misc)
	old, other := l.group("/a", "misc"), l.group("/b", "misc")
	l.set(old, 0, gib, nvml.SUCCESS)
	held := l.allocate(old, gib/2)
	ok(t, os.RemoveAll(old))
	l.isNot(other, nvml.ERROR_NOT_SUPPORTED)
	old = l.group("/a", "misc") // the path is no address
	l.isNot(old, nvml.ERROR_NOT_SUPPORTED)
	ok(t, os.RemoveAll(old))
	ok(t, l.m.ReuseGroup(old, other))
	l.is(other, 0, gib, gib/2)
	l.refuses(other, gib)
	ok(t, held.Free())
	l.is(other, 0, gib, 0)
}

// fence 30: with reuse_groups each new group has the address of one that has ended, so that the driver's table does not grow.
func TestLimitsReuseAddresses(t *testing.T) {
	l := openLimited(t, simdriver.Misc, "reuse_groups = yes")
	a := l.group("/a", "misc")
	l.set(a, 0, gib, nvml.SUCCESS)
	for range 20 {
		ok(t, os.RemoveAll(a))
		a = l.group("/a", "misc")
		l.is(a, 0, gib, 0)
	}
	l.isNot(l.group("/b", "misc"), nvml.ERROR_NOT_SUPPORTED) // a is there: another address
}

// fence 33 and rules 29 and 30: with dmem everything is charged from the start and on each level, a maximum below use is not taken, and what a removed group
// has added to the groups above it stays.
func TestLimitsDMem(t *testing.T) {
	l := openLimited(t, simdriver.DMem)
	pod := l.group("/pod", "dmem")
	a, b := l.group("/pod/a", "dmem"), l.group("/pod/b", "dmem")
	off := l.group("/pod/off", "memory")
	l.isNot(off, nvml.ERROR_NOT_FOUND)
	l.set(off, 0, gib, nvml.ERROR_NOT_FOUND)

	l.is(a, 0, whole, 0)
	l.set(pod, 0, 8*gib, nvml.SUCCESS)
	first := l.allocate(a, 5*gib)
	l.set(a, 0, gib, nvml.SUCCESS) // and not taken
	l.is(a, 0, whole, 5*gib)
	l.set(a, gib, 6*gib, nvml.SUCCESS)
	l.is(a, gib, 6*gib, 5*gib)
	l.refuses(a, 2*gib)
	l.allocate(b, 2*gib)
	l.refuses(b, 2*gib) // over the pod's
	l.is(pod, gib, 8*gib, 7*gib)

	const region = "nvidia/00000000:1b:00.0/vidmem"
	for _, c := range []struct{ file, line string }{
		{pod + "/dmem.max", region + " 8589934592\n"}, {b + "/dmem.max", region + " max\n"}, {pod + "/dmem.min", region + " 1073741824\n"}, {l.mount + "/dmem.current", region + " 7516192768\n"},
	} {
		text, err := os.ReadFile(c.file)
		ok(t, err)
		same(t, c.file, string(text), c.line)
	}
	capacity, err := os.ReadFile(filepath.Join(l.mount, "dmem.capacity"))
	ok(t, err)
	same(t, "capacity", string(capacity[:len(region)+12]), region+" 85520809984")

	ok(t, os.RemoveAll(a)) // its own limits end with it, its part above does not, nor its memory
	l.is(pod, gib, 8*gib, 7*gib)
	ok(t, first.Free())
	l.is(pod, gib, 8*gib, 2*gib)
}

// fence 1, 36: a GPU that was removed, reset or initialised by another incarnation of the driver has no limits; in MIG mode nothing is charged.
func TestLimitsEndWithTheDriversState(t *testing.T) {
	for _, backend := range []string{simdriver.Misc, simdriver.DMem} {
		t.Run(backend, func(t *testing.T) {
			l := openLimited(t, backend)
			a := l.group("/a", backend)
			none := map[string]func(){
				simdriver.Misc: func() { l.t.Helper(); l.isNot(a, nvml.ERROR_NOT_SUPPORTED) },
				simdriver.DMem: func() { l.t.Helper(); l.is(a, 0, whole, 0) },
			}[backend]
			pci, err := l.m.Get(0, "pci")
			ok(t, err)
			keys := []string{"uuid = " + l.m.UUID(0), "pci = " + pci}
			for what, do := range map[string]func() error{
				"reset":   func() error { return l.m.Reset(0) },
				"removed": func() error { return errors.Join(l.m.Remove(0), l.m.Add(0, keys...)) },
			} {
				l.set(a, 0, gib, nvml.SUCCESS)
				l.allocate(a, gib)
				ok(t, do())
				t.Log(what)
				l.gpu0 = of(l.DeviceGetHandleByUUID(l.m.UUID(0))).get(t, "handle")
				none()
			}
			l.set(a, 0, gib, nvml.SUCCESS)
			ok(t, l.m.SetMIG(0))
			l.allocate(a, 60*gib)
			l.is(a, 0, gib, 0)
			ok(t, l.m.Unload(), l.m.Load())
			want(t, "shutdown", l.Shutdown(), nvml.SUCCESS)
			want(t, "init", l.Init(), nvml.SUCCESS)
			l.gpu0 = l.gpu(0)
			none()
		})
	}
}

// A library has the functions that one of its version has: an old driver's has none about limits, and NVIDIA's programs end there with a linker's message.
func TestLibraryBeforeLimits(t *testing.T) {
	m, err := simdriver.Install(t.Context(), t.TempDir(), "t4")
	ok(t, err)
	has := func(what string, expected bool) {
		t.Helper()
		lib := dl.New(libraryPath(m), dl.RTLD_LAZY|dl.RTLD_LOCAL)
		ok(t, lib.Open())
		for _, name := range []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"} {
			same(t, what+" "+name, lib.Lookup(name) == nil, expected)
		}
		ok(t, lib.Lookup("nvmlDeviceGetMemoryInfo_v2"), lib.Close())
	}
	has("installed", false)
	ok(t, m.SetDriver("615.71.09"))
	has("upgraded", true)
	ok(t, m.Without("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"))
	has("without", false)
	ok(t, m.SetDriver("620.1"))
	has("upgraded again", true)
	ok(t, m.SetDriver("595.58.03"))
	has("downgraded", false)
}

// realMount is a mount point of control groups of version 2 in which hugetlb, which stands in for misc, can be enabled; it skips the test where there is none.
func realMount(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var s syscall.Statfs_t
		if syscall.Statfs(mount, &s) != nil || s.Type != 0x63677270 { // CGROUP2_SUPER_MAGIC
			continue
		}
		if on, err := os.ReadFile(filepath.Join(mount, "cgroup.subtree_control")); err == nil && strings.Contains(string(on), "hugetlb") {
			return mount
		}
	}
	t.Skip("SKIPPED: no control groups of version 2 with hugetlb in cgroup.subtree_control of the root")
	return ""
}

// The rules hold for the kernel's control groups, too: the root, a controller that is off, a process's own group, a group made anew.
func TestLimitsOfRealGroups(t *testing.T) {
	l := openLimited(t, simdriver.Misc, "memacct_controller = hugetlb", "cgroup_mount = "+realMount(t))
	l.mount = realMount(t)
	slice, err := os.MkdirTemp(l.mount, "simdriver-")
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	scope := filepath.Join(slice, "scope")
	t.Cleanup(func() { ok(t, os.Remove(scope), os.Remove(slice)) })
	ok(t, os.Mkdir(scope, 0o755))
	l.set(l.mount, 0, gib, nvml.ERROR_NOT_SUPPORTED)
	l.set(scope, 0, gib, nvml.SUCCESS)
	l.allocate(scope, 2*gib) // T2: the controller is off in it
	l.is(scope, 0, gib, 0)
	ok(t, os.WriteFile(filepath.Join(slice, "cgroup.subtree_control"), []byte("+hugetlb"), 0o644))
	l.refuses(scope, 2*gib)
	l.allocate(scope, gib/2)

	group, err := os.Open(scope)
	ok(t, err)
	cmd := sceneCommand(t, l.m, "total")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	out, err := cmd.CombinedOutput()
	ok(t, err, group.Close())
	same(t, "what a process of the group sees", string(out), "of 1024 MiB are free 512\n")

	ok(t, os.Remove(scope), os.Mkdir(scope, 0o755))
	l.isNot(scope, nvml.ERROR_NOT_SUPPORTED)
}

// totalScene prints the memory of the first GPU.
func totalScene(library string) int {
	_, dev := firstGPU(library)
	memory, ret := dev.GetMemoryInfo_v2()
	fmt.Printf("of %d MiB are free %d\n", memory.Total>>20, memory.Free>>20)
	return int(ret)
}

// In a container that has the machine read-only, limits can be read.
func TestLimitsOfReadOnlyMachine(t *testing.T) {
	l := openLimited(t, simdriver.Misc)
	a := l.group("/a", "misc")
	l.set(a, 0, gib, nvml.SUCCESS)
	if err := syscall.Mount(l.m.Root, l.m.Root, "", syscall.MS_BIND, ""); err != nil {
		t.Skip("SKIPPED: ", err)
	}
	t.Cleanup(func() { ok(t, syscall.Unmount(l.m.Root, 0)) })
	ok(t, syscall.Mount("", l.m.Root, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	l.is(a, 0, gib, 0)
	l.set(a, 0, 2*gib, nvml.ERROR_UNKNOWN)
}
