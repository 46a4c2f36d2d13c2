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

// Scenes run in a child process, with the library to load as their argument; the result is the exit code. What a process has whose library
// is replaced or hidden is shown by the tests of internal/core/nvidia.
var scenes = map[string]func(library string) int{
	"init":   initScene,
	"fields": fieldsScene,
	"follow": followScene,
	"total":  totalScene,
}

// initScene returns the code of nvmlInit, cut to a byte.
func initScene(library string) int {
	return int(nvml.New(nvml.WithLibraryPath(library)).Init()) & 0xff
}

// firstGPU opens a session and returns GPU 0.
func firstGPU(library string) (nvml.Interface, nvml.Device) {
	lib := nvml.New(nvml.WithLibraryPath(library))
	if code := lib.Init(); code != nvml.SUCCESS {
		panic(code)
	}
	dev, code := lib.DeviceGetHandleByIndex(0)
	if code != nvml.SUCCESS {
		panic(code)
	}
	return lib, dev
}

// fieldsScene makes a call that the library may lack.
func fieldsScene(library string) int {
	lib, dev := firstGPU(library)
	fmt.Println("lookup:", lib.Extensions().LookupSymbol("nvmlDeviceGetFieldValues") == nil)
	return int(dev.GetFieldValues([]nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}))
}

// followScene prints the temperature of GPU 0 for each line that it reads.
func followScene(library string) int {
	_, dev := firstGPU(library)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Println(dev.GetTemperature(nvml.TEMPERATURE_GPU))
	}
	return 0
}

func TestTwoProcessesSeeOneChange(t *testing.T) {
	d := open(t, "h200")
	c := start(t, d.m, "follow", "SIMDRIVER_MACHINE=") // without the variable the library finds the machine by its own path
	both := func(when, expected string) {
		t.Helper()
		same(t, when+", in the child", c.ask(), expected)
		temperature, code := d.gpu(0).GetTemperature(nvml.TEMPERATURE_GPU)
		same(t, when, fmt.Sprint(temperature, code), expected)
	}
	both("before", "31 Success")
	ok(t, d.m.Set(0, "temperature", "84 C"))
	both("after", "84 Success")
	ok(t, d.m.Fail(simdriver.GPU(0), "nvmlDeviceGetTemperature", "UNKNOWN", simdriver.Always))
	both("with a fault", "0 Unknown Error")
	c.end()

	calls, err := d.m.CallsOf(c.cmd.Process.Pid)
	ok(t, err)
	same(t, "child's calls", calls["nvmlDeviceGetTemperature"], 3)
	same(t, "all calls", d.calls("nvmlDeviceGetTemperature"), 6)
	same(t, "all inits", d.calls("nvmlInit_v2"), 2)
}

// go-nvml ends the process if a symbol is missing: core/nvidia looks each one up before.
func TestMissingSymbol(t *testing.T) {
	m := simdriver.Start(t, "h200")
	ok(t, m.Without("nvmlDeviceGetFieldValues"))
	out, code := scene(t, m, "fields")
	same(t, "exit code", code, 127)
	if !strings.Contains(out, "lookup: false") || !strings.Contains(out, "symbol lookup error") {
		t.Errorf("output %q", out)
	}
}

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
	of(d.gpu(5).GetMigDeviceHandleByIndex(0)).returns(t, "MIG device", nvml.SUCCESS)
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

// TryUnload names the processes that hold a device node, and succeeds when there is none.
func TestTryUnload(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	c := start(t, m, "follow")
	c.ask() // it has a GPU's handle by then
	pid := c.cmd.Process.Pid
	held, err := m.HeldBy(pid)
	ok(t, err)
	same(t, "nodes of the child", len(held), 2)

	d := initialise(t, m)
	err = m.TryUnload()
	pids := []int{os.Getpid(), pid}
	slices.Sort(pids)
	if inUse, is := errors.AsType[*simdriver.InUseError](err); !is || !slices.Equal(inUse.PIDs, pids) ||
		!strings.Contains(err.Error(), fmt.Sprintf("in use by pid %d %d", pids[0], pids[1])) {
		t.Errorf("with two sessions: %v", err)
	}
	of(d.gpu(0).GetUUID()).returns(t, "a session after the attempt", nvml.SUCCESS)
	c.end()
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	ok(t, m.TryUnload())
	want(t, "init", d.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, m.Load())
	want(t, "init", d.Init(), nvml.SUCCESS)
}

// A reboot gives another boot ID, and resets the GPUs.
func TestReboot(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	boot := func() string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(m.Root, "proc/sys/kernel/random/boot_id"))
		ok(t, err)
		return string(text)
	}
	before := boot()
	ok(t, m.Set(3, "recovery_action", "1"))
	ok(t, m.Reboot())
	if action, err := m.Get(3, "recovery_action"); err != nil || action != "0" || boot() == before {
		t.Errorf("recovery action %q, boot ID %q, was %q, error %v", action, boot(), before, err)
	}
}
