package nvidia

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// These tests show how the dynamic linker treats a library that is replaced while a process uses it (docs/adr/0004). If one
// fails, the assumptions of loadedlibrary.go are wrong.

// removedFunction is a function that one of two libraries lacks.
const removedFunction = "nvmlDeviceGetRepairStatus"

func init() {
	scenarios["linker: path"] = func(m *simdriver.Machine) error { return reopen(m, m.Library, m.Library) }
	scenarios["linker: name"] = func(m *simdriver.Machine) error { return reopen(m, libraryName, libraryName) }
	scenarios["linker: another path"] = func(m *simdriver.Machine) error {
		other := filepath.Join(m.Root, "other", libraryName)
		if err := os.MkdirAll(filepath.Dir(other), 0o755); err != nil {
			return err
		}
		return reopen(m, m.Library, other)
	}
	scenarios["linker: two libraries"] = twoLibraries
	scenarios["linker: not called"] = func(m *simdriver.Machine) error {
		library := dl.New(m.Library, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		if err := library.Open(); err != nil {
			return err
		}
		found := library.Lookup("nvmlInit_v2")
		if err := library.Close(); err != nil {
			return err
		}
		fmt.Println("found", found == nil, "and closed; mapped", inodes())
		return reopen(m, "", m.Library)
	}
}

// reopen opens the library, calls it and closes it, replaces the file, and does the same again, perhaps under another path.
func reopen(m *simdriver.Machine, first, second string) error {
	if first != "" {
		fmt.Println("before:", describeLoaded(first))
	}
	library, err := os.ReadFile(m.Library)
	if err != nil {
		return err
	}
	was := m.Library
	successor := was + ".successor"
	if err := os.WriteFile(successor, bytes.ReplaceAll(library, []byte("\x00"+removedFunction+"\x00"), []byte("\x00x"+removedFunction[1:]+"\x00")), 0o755); err != nil {
		return err
	}
	if err := os.Rename(successor, was); err != nil {
		return err
	}
	if err := m.ReplaceLibrary(newer); err != nil {
		return err
	}
	if second != first && first != "" {
		if err := os.Rename(was, second); err != nil {
			return err
		}
	}
	fmt.Println("library replaced:", describeLoaded(second))
	if err := m.SetModule(newer); err != nil {
		return err
	}
	fmt.Println("module replaced:", describeLoaded(second))
	return nil
}

// twoLibraries opens a library that lacks a function, then one under another path that has it, and calls it
// with a handle from the first.
func twoLibraries(m *simdriver.Machine) error {
	library, err := os.ReadFile(m.Library)
	if err != nil {
		return err
	}
	other := m.Library + ".other"
	if err := os.Rename(m.Library, other); err != nil {
		return err
	}
	without := bytes.ReplaceAll(library, []byte("\x00"+removedFunction+"\x00"), []byte("\x00x"+removedFunction[1:]+"\x00"))
	if err := os.WriteFile(m.Library, without, 0o755); err != nil {
		return err
	}
	first, second := nvml.New(nvml.WithLibraryPath(m.Library)), nvml.New(nvml.WithLibraryPath(other))
	fmt.Println("init", first.Init(), second.Init())
	device, ret := second.DeviceGetHandleByIndex(0)
	fmt.Println("handle", ret)
	_, ret = device.GetRepairStatus()
	fmt.Println("new function", ret)
	return nil
}

// describeLoaded opens a session as go-nvml does and prints which library's code runs, what dlsym finds, and how many libraries
// are mapped.
func describeLoaded(path string) string {
	lib := nvml.New(nvml.WithLibraryPath(path))
	ret := lib.Init()
	version, _ := lib.SystemGetNVMLVersion()
	text := fmt.Sprintf("%v, code %s, dlsym finds it: %t, mapped %d",
		ret, version, lib.Extensions().LookupSymbol(removedFunction) == nil, inodes())
	if ret == nvml.SUCCESS {
		ret = lib.Shutdown()
	}
	if ret != nvml.SUCCESS && ret != nvml.ERROR_LIB_RM_VERSION_MISMATCH {
		text += ret.String()
	}
	return text
}

// inodes counts the driver libraries that this process has mapped.
func inodes() int {
	text, _ := os.ReadFile("/proc/self/maps")
	inodes := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 5 && strings.Contains(f[5], "libnvidia-ml") {
			inodes[f[4]] = true
		}
	}
	return len(inodes)
}

func TestReplacedLibraryInTheDynamicLinker(t *testing.T) {
	const (
		old      = "code 12." + older
		whole    = ", dlsym finds it: true, mapped 1\n"
		mismatch = "Driver/library version mismatch, "
	)
	same := "before: Success, " + old + whole + "library replaced: Success, " + old + whole + "module replaced: " + mismatch + old + whole
	for scenario, want := range map[string]string{
		// Opened by the same name it is the same library, whatever the file is.
		"linker: path": same,
		"linker: name": same,
		// Opened by another path, the new file is mapped beside the old one: the old code runs, dlsym finds the new functions.
		"linker: another path": "before: Success, " + old + whole +
			"library replaced: Success, " + old + ", dlsym finds it: false, mapped 2\n" +
			"module replaced: " + mismatch + old + ", dlsym finds it: false, mapped 2\n",
		// A function that only the new library has runs there, where nvmlInit was not called.
		"linker: two libraries": "init Success Success\nhandle Success\nnew function Uninitialized\n",
		// A library none of whose functions was called is unloaded.
		"linker: not called": "found true and closed; mapped 0\n" +
			"library replaced: " + mismatch + "code 12." + newer + ", dlsym finds it: false, mapped 1\n" +
			"module replaced: Success, code 12." + newer + ", dlsym finds it: false, mapped 1\n",
	} {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			m := install(t, "t4")
			got, err := runScenario(t, m.Root, scenario, "LD_LIBRARY_PATH="+filepath.Dir(m.Library))
			if err != nil || got != want {
				t.Errorf("%v; saw\n%swant\n%s", err, got, want)
			}
		})
	}
}
