package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

const libraryName = "libnvidia-ml.so.1"

// libraryFolders are where Linux distributions and NVIDIA's driver container install the library.
var libraryFolders = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

// LibraryFolders are the folders beneath a driver root in which the driver's library is searched for, in this order.
func LibraryFolders() []string { return slices.Clone(libraryFolders) }

// versions are the NVML functions that go-nvml may use for a call, newest first, where that is not the one function of the
// call's name.
var versions = map[string][]string{
	"nvmlInit":                         {"nvmlInit_v2", "nvmlInit"},
	"nvmlSystemGetCudaDriverVersion":   {"nvmlSystemGetCudaDriverVersion_v2"},
	"nvmlDeviceGetCount":               {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	"nvmlDeviceGetHandleByIndex":       {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	"nvmlDeviceGetPciInfo":             {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	handleByPCI:                        {"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId"},
	"nvmlDeviceGetAttributes":          {"nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes"},
	"nvmlDeviceGetNvLinkRemotePciInfo": {"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"},
	"nvmlEventSetWait":                 {"nvmlEventSetWait_v2", "nvmlEventSetWait"},
	processesCall:                      {processesCall + "_v3", processesCall + "_v2", processesCall},
}

// functionsOf are the NVML functions for a call; the library needs one of them.
func functionsOf(call string) []string {
	if names, ok := versions[call]; ok {
		return names
	}
	return []string{call}
}

// eventWaitV2 is the event wait that reports the MIG instance of an event. The older nvmlEventSetWait leaves the
// instance numbers zero, which are valid ones.
const eventWaitV2 = "nvmlEventSetWait_v2"

// libraryVersion may be called without nvmlInit (nvml.h), so also after an nvmlInit that failed.
const libraryVersion = "nvmlSystemGetNVMLVersion"

// handleByPCI identifies a GPU by its slot, independent of its index and of older handles.
const handleByPCI = "nvmlDeviceGetHandleByPciBusId"

// mandatory are the calls without which no device can be offered.
var mandatory = []string{
	"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
	"nvmlDeviceGetPciInfo",
}

// library is an opened libnvidia-ml.so.1.
type library struct {
	path   string // as given to dlopen
	handle *dl.DynamicLibrary
	file   libraryFile // that was opened
	calls  sync.Map    // results of function, by call
	texts  sync.Map    // results of errorText, by nvml.Return
}

// has reports whether the library has a function for a call. It is safe for concurrent use.
func (l *library) has(call string) bool { return l.function(call).found }

// function is the function for a call, with its counters. It is safe for concurrent use.
func (l *library) function(call string) *function {
	f, known := l.calls.Load(call)
	if !known {
		found := slices.ContainsFunc(functionsOf(call), func(name string) bool { return l.handle.Lookup(name) == nil })
		f, _ = l.calls.LoadOrStore(call, &function{found: found})
	}
	return f.(*function)
}

// errorText is nvmlErrorString's text for a code. It is safe for concurrent use.
func (l *library) errorText(ret nvml.Return) string {
	text, known := l.texts.Load(ret)
	if !known {
		text = fmt.Sprintf("error %d", int(ret))
		if l.has("nvmlErrorString") {
			text = cleanText(ret.Error())
		}
		l.texts.Store(ret, text)
	}
	return text.(string)
}

// findLibrary opens the driver's library beneath root; if root is "/", first the one that the dynamic linker finds.
func findLibrary(root string) (*library, error) {
	root = filepath.Join("/", root)
	var candidates, searched []string
	if root == "/" {
		candidates, searched = []string{libraryName}, []string{"the dynamic linker's path"}
	}
	for _, folder := range libraryFolders {
		searched = append(searched, filepath.Join(root, folder))
		path := filepath.Join(root, folder, libraryName)
		if _, err := os.Stat(path); err == nil {
			candidates = append(candidates, path)
		}
	}
	var loadErr error
	for _, path := range candidates {
		l, err := openLibrary(path)
		if err == nil {
			return l, l.checkMandatory()
		}
		if path != libraryName || !strings.Contains(err.Error(), "No such file") {
			loadErr = fmt.Errorf("the driver's library can't be loaded: %w", err)
		}
	}
	if loadErr != nil {
		return nil, loadErr
	}
	return nil, errNoLibrary(searched)
}

func errNoLibrary(searched []string) error {
	return fmt.Errorf("%w: %s is not in %s: install the driver, or set the driver root",
		gpu.ErrNoDriver, libraryName, strings.Join(searched, ", "))
}

// openLibrary opens a library and notes which file it is. It starts over if the file was replaced meanwhile.
func openLibrary(path string) (*library, error) {
	for {
		before := statLibrary(path)
		handle := dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		if err := handle.Open(); err != nil {
			return nil, err
		}
		l := &library{path: path, handle: handle, file: statLibrary(path)}
		if path == libraryName { // the dynamic linker chose the folder
			l.file = statLibrary(loadedPath())
			return l, nil
		}
		if l.file.id == before.id {
			return l, nil
		}
		_ = handle.Close()
	}
}

// checkMandatory closes a library that lacks a mandatory call.
func (l *library) checkMandatory() error {
	for _, call := range mandatory {
		if !l.has(call) {
			_ = l.handle.Close()
			return fmt.Errorf("the driver's library %s lacks %s: install a newer driver", l.path, call)
		}
	}
	return nil
}
