package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// These tests show how the dynamic linker treats a library that is replaced while a process uses it (docs/adr/0004). If one
// fails, the assumptions of loadedlibrary.go are wrong.

// removedFunction is a function that one of two libraries lacks.
const removedFunction = "nvmlDeviceGetRepairStatus"

var linkerScenarios = map[string]func(*child){
	"linker: path": func(c *child) { c.reopen(c.Library, c.Library) },
	"linker: name": func(c *child) { c.reopen(libraryName, libraryName) },
	"linker: another path": func(c *child) {
		other := filepath.Join(c.Root, "other", libraryName)
		c.check(os.MkdirAll(filepath.Dir(other), 0o755))
		c.reopen(c.Library, other)
	},
	"linker: two libraries": twoLibraries,
	"linker: not called": func(c *child) {
		library := dl.New(c.Library, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		c.check(library.Open())
		found := library.Lookup("nvmlInit_v2")
		c.check(library.Close())
		fmt.Println("found", found == nil, "and closed; mapped", inodes())
		c.reopen("", c.Library)
	},
}

// reopen opens the library, calls it and closes it, replaces the file, and does the same again, perhaps under another path.
func (c *child) reopen(first, second string) {
	if first != "" {
		fmt.Println("before:", describeLoaded(first))
	}
	c.check(c.Without(removedFunction), c.ReplaceLibrary(newer))
	if second != first && first != "" {
		c.check(os.Rename(c.Library, second))
	}
	fmt.Println("library replaced:", describeLoaded(second))
	c.check(c.SetModule(newer))
	fmt.Println("module replaced:", describeLoaded(second))
}

// twoLibraries opens a library that lacks a function, then one under another path that has it, and calls it
// with a handle from the first.
func twoLibraries(c *child) {
	other := c.Library + ".other"
	c.check(os.Link(c.Library, other), c.Without(removedFunction))
	first, second := nvml.New(nvml.WithLibraryPath(c.Library)), nvml.New(nvml.WithLibraryPath(other))
	fmt.Println("init", first.Init(), second.Init())
	device, ret := second.DeviceGetHandleByIndex(0)
	fmt.Println("handle", ret)
	_, ret = device.GetRepairStatus()
	fmt.Println("new function", ret)
}

// describeLoaded opens a session as go-nvml does and returns which library's code runs, what dlsym finds, and how many libraries
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
