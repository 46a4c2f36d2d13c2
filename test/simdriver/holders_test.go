package simdriver_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// holds compares the nodes that this process has open, by their names under /dev.
func holds(t testing.TB, m *simdriver.Machine, nodes ...string) {
	t.Helper()
	held, err := m.HeldBy(os.Getpid())
	ok(t, err)
	for i, path := range held {
		held[i] = strings.TrimPrefix(path, filepath.Join(m.Root, "dev")+"/")
	}
	if !slices.Equal(held, nodes) {
		t.Errorf("holds %q, want %q", held, nodes)
	}
}

func TestNodesAreHeldUntilTheLastShutdown(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	holds(t, m)
	d := initialise(t, m)
	holds(t, m, "nvidiactl")
	d.gpu(3)
	d.gpu(3)
	holds(t, m, "nvidia1", "nvidiactl") // by minor number
	_, ret := d.gpu(5).GetMigDeviceHandleByIndex(0)
	want(t, "MIG device", ret, nvml.SUCCESS)
	holds(t, m, "nvidia1", "nvidia7", "nvidiactl")
	want(t, "second init", d.Init(), nvml.SUCCESS)
	want(t, "first shutdown", d.Shutdown(), nvml.SUCCESS)
	holds(t, m, "nvidia1", "nvidia7", "nvidiactl")
	want(t, "last shutdown", d.Shutdown(), nvml.SUCCESS)
	holds(t, m)
	want(t, "init", d.Init(), nvml.SUCCESS)
	holds(t, m, "nvidiactl")

	ok(t, m.Unload()) // by force: the nodes go, the descriptors stay
	holds(t, m, "nvidiactl (deleted)")
}

func TestInitThatFailsHoldsNothing(t *testing.T) {
	m := simdriver.Start(t, "h200")
	lib := nvml.New(nvml.WithLibraryPath(m.Library))
	ok(t, m.SetModule("600.1.2"))
	ok(t, m.SetModule("570.124.06"))
	ok(t, m.Fail(simdriver.All, "nvmlInit", "UNKNOWN", 1))
	want(t, "init", lib.Init(), nvml.ERROR_UNKNOWN)
	holds(t, m)
	ok(t, m.Unload())
	want(t, "init", lib.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	holds(t, m)
}

// A polite rmmod names who is in the way, and goes through once nobody is.
func TestTryUnload(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	child := sceneCommand(t, m.Library, "follow")
	in, err := child.StdinPipe()
	ok(t, err)
	out, err := child.StdoutPipe()
	ok(t, err)
	ok(t, child.Start())
	_, err = fmt.Fprintln(in)
	ok(t, err)
	_, err = bufio.NewReader(out).ReadString('\n') // it has a GPU's handle by then
	ok(t, err)
	held, err := m.HeldBy(child.Process.Pid)
	ok(t, err)
	same(t, "nodes of the child", len(held), 2)

	d := initialise(t, m)
	err = m.TryUnload()
	inUse := (*simdriver.InUseError)(nil)
	pids := []int{os.Getpid(), child.Process.Pid}
	slices.Sort(pids)
	if !errors.As(err, &inUse) || !slices.Equal(inUse.PIDs, pids) || !strings.Contains(err.Error(), fmt.Sprintf("in use by pid %d %d", pids[0], pids[1])) {
		t.Errorf("with two sessions: %v", err)
	}
	_, ret := d.gpu(0).GetUUID()
	want(t, "a session after the attempt", ret, nvml.SUCCESS)
	ok(t, in.Close())
	ok(t, child.Wait())
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	ok(t, m.TryUnload())
	want(t, "init", d.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, m.Load())
	want(t, "init", d.Init(), nvml.SUCCESS)
}

// A process keeps the version of the file that it has mapped, whatever lies there since.
func TestReplacedLibrary(t *testing.T) {
	m := simdriver.Start(t, "h200")
	library := filepath.Join(m.Root, "usr/lib/x86_64-linux-gnu", simdriver.LibraryName)
	inode := func() os.FileInfo {
		info, err := os.Stat(library)
		ok(t, err)
		return info
	}
	was := inode()
	ok(t, m.ReplaceLibrary("570.124.06"))
	if os.SameFile(was, inode()) {
		t.Error("it is the same file still")
	}
	child := sceneCommand(t, library, "versions")
	in, err := child.StdinPipe()
	ok(t, err)
	out, err := child.StdoutPipe()
	ok(t, err)
	ok(t, child.Start())
	lines := bufio.NewReader(out)
	says := func(when, expected string) {
		t.Helper()
		_, err := fmt.Fprintln(in)
		ok(t, err)
		line, err := lines.ReadString('\n')
		ok(t, err)
		same(t, when, strings.TrimSpace(line), expected)
	}
	says("as installed", "12.570.124.06 Success")
	ok(t, m.ReplaceLibrary("600.1.2"))
	says("the file replaced", "12.570.124.06 Success")
	_, code := scene(t, m, "init")
	same(t, "a new process", nvml.Return(code), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	ok(t, m.SetModule("600.1.2"))
	says("the module too", "Driver/library version mismatch")
	_, code = scene(t, m, "init")
	same(t, "a new process", nvml.Return(code), nvml.SUCCESS)
	ok(t, m.SetModule("570.124.06"))
	says("the module back", "12.570.124.06 Success")
	_, code = scene(t, m, "init")
	same(t, "a new process", nvml.Return(code), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	ok(t, in.Close())
	ok(t, child.Wait())
	if err := m.ReplaceLibrary(strings.Repeat("1", 96)); err == nil {
		t.Error("a version too long for its place was taken")
	}
}
