package simdriver_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Scenes are played in a child process, with the library to load as their
// argument; the result is the exit code.
var scenes = map[string]func(library string) int{
	"init":     initScene,
	"verdict":  verdictScene,
	"follow":   followScene,
	"old":      oldScene,
	"versions": versionsScene,
}

// initScene initialises and answers with the code, cut to a byte.
func initScene(library string) int {
	return int(nvml.New(nvml.WithLibraryPath(library)).Init()) & 0xff
}

// verdictScene makes a call that the library may lack.
func verdictScene(library string) int {
	lib := nvml.New(nvml.WithLibraryPath(library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return 1
	}
	fmt.Println("lookup:", lib.Extensions().LookupSymbol("nvmlDeviceGetFieldValues") == nil)
	dev, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return 2
	}
	return int(dev.GetFieldValues([]nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}))
}

// oldScene waits for an event of a GPU that the test raises once the line "ready" is out.
func oldScene(library string) int {
	lib := nvml.New(nvml.WithLibraryPath(library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return 1
	}
	set, _ := lib.EventSetCreate()
	dev, _ := lib.DeviceGetHandleByIndex(0)
	if ret := dev.RegisterEvents(nvml.EventTypeXidCriticalError, set); ret != nvml.SUCCESS {
		return 2
	}
	fmt.Println("ready")
	e, ret := set.Wait(10_000)
	fmt.Println(e.EventData, e.GpuInstanceId, e.ComputeInstanceId, ret)
	return 0
}

// followScene tells the temperature of GPU 0 for each line that it reads.
func followScene(library string) int {
	lib := nvml.New(nvml.WithLibraryPath(library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return 1
	}
	dev, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return 2
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		temp, ret := dev.GetTemperature(nvml.TEMPERATURE_GPU)
		fmt.Println(temp, ret)
	}
	return 0
}

// versionsScene opens a session for each line that it reads and tells the library's version.
func versionsScene(library string) int {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		lib := nvml.New(nvml.WithLibraryPath(library))
		if ret := lib.Init(); ret != nvml.SUCCESS {
			fmt.Println(ret)
			continue
		}
		fmt.Println(lib.SystemGetNVMLVersion())
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			return 1
		}
	}
	return 0
}

func sceneCommand(t testing.TB, library, name string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	ok(t, err)
	cmd := exec.CommandContext(t.Context(), self, library)
	cmd.Env = append(os.Environ(), "SIMDRIVER_SCENE="+name)
	return cmd
}

// scene plays a scene on the library that lies under the machine's root.
func scene(t testing.TB, m *simdriver.Machine, name string) (string, int) {
	t.Helper()
	out, err := sceneCommand(t, filepath.Join(m.Root, "usr/lib/x86_64-linux-gnu", simdriver.LibraryName), name).CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	} else if err != nil {
		return string(out), exit.ExitCode()
	}
	return string(out), 0
}

func TestTwoProcessesSeeOneChange(t *testing.T) {
	d := open(t, "h200")
	child := sceneCommand(t, filepath.Join(d.m.Root, "usr/lib/x86_64-linux-gnu", simdriver.LibraryName), "follow")
	// The library finds its machine by where it lies, without the variable.
	child.Env = append(child.Env, "SIMDRIVER_MACHINE=")
	in, err := child.StdinPipe()
	ok(t, err)
	out, err := child.StdoutPipe()
	ok(t, err)
	ok(t, child.Start())
	lines := bufio.NewReader(out)
	ask := func() string {
		t.Helper()
		_, err := io.WriteString(in, "\n")
		ok(t, err)
		line, err := lines.ReadString('\n')
		ok(t, err)
		temp, ret := d.gpu(0).GetTemperature(nvml.TEMPERATURE_GPU)
		same(t, "child's answer", strings.TrimSpace(line), fmt.Sprint(temp, ret))
		return strings.TrimSpace(line)
	}
	same(t, "before", ask(), "31 Success")
	ok(t, d.m.Set(0, "temperature", "84 C"))
	same(t, "after", ask(), "84 Success")
	ok(t, d.m.Fail(simdriver.GPU(0), "nvmlDeviceGetTemperature", "UNKNOWN", simdriver.Always))
	same(t, "with a fault", ask(), "0 Unknown Error")
	ok(t, in.Close())
	ok(t, child.Wait())

	calls, err := d.m.CallsOf(child.Process.Pid)
	ok(t, err)
	same(t, "child's calls", calls["nvmlDeviceGetTemperature"], 3)
	all, err := d.m.Calls()
	ok(t, err)
	same(t, "all calls", all["nvmlDeviceGetTemperature"], 6)
	same(t, "all inits", all["nvmlInit_v2"], 2)
}

// The hazard of go-nvml that discovery has to gate against: a missing symbol ends the process.
func TestMissingSymbol(t *testing.T) {
	m := simdriver.Start(t, "h200")
	ok(t, m.Without(t.Context(), "nvmlDeviceGetFieldValues"))
	out, code := scene(t, m, "verdict")
	same(t, "exit code", code, 127)
	if !strings.Contains(out, "lookup: false") || !strings.Contains(out, "symbol lookup error") {
		t.Errorf("output %q", out)
	}
}

func TestHiddenLibrary(t *testing.T) {
	m := simdriver.Start(t, "h200")
	ok(t, m.Hide())
	_, code := scene(t, m, "init")
	same(t, "init without library", nvml.Return(code), nvml.ERROR_LIBRARY_NOT_FOUND)
	ok(t, m.Unhide())
	_, code = scene(t, m, "init")
	same(t, "init", nvml.Return(code), nvml.SUCCESS)
}

func TestLibraryNewerThanDriver(t *testing.T) {
	d := open(t, "h200")
	ok(t, d.m.ReplaceLibrary("600.1.2"))
	_, code := scene(t, d.m, "init")
	same(t, "init in a new process", nvml.Return(code), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	_, ret := d.gpu(0).GetUUID()
	want(t, "a session that was open", ret, nvml.SUCCESS)
	ok(t, d.m.SetDriver("600.1.2"))
	_, code = scene(t, d.m, "init")
	same(t, "init after the driver followed", nvml.Return(code), nvml.SUCCESS)
}

// With a driver that has only the first event wait, go-nvml leaves the
// placement 0: that is not GPU instance 0.
func TestOldEventWaitHasNoPlacement(t *testing.T) {
	m := simdriver.Start(t, "h200")
	ok(t, m.Without(t.Context(), "nvmlEventSetWait_v2"))
	child := sceneCommand(t, filepath.Join(m.Root, "usr/lib/x86_64-linux-gnu", simdriver.LibraryName), "old")
	out, err := child.StdoutPipe()
	ok(t, err)
	ok(t, child.Start())
	lines := bufio.NewReader(out)
	read := func() string {
		line, err := lines.ReadString('\n')
		ok(t, err)
		return strings.TrimSpace(line)
	}
	same(t, "child", read(), "ready")
	ok(t, m.XID(0, 94, simdriver.At{GI: 3, CI: 1}))
	same(t, "event", read(), "94 0 0 Success")
	ok(t, child.Wait())
}
