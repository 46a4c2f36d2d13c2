package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// This file finds libnvidia-ml.so.1 and the NVML functions that it has (dlopen, dlsym). It calls none of them.

const libraryName = "libnvidia-ml.so.1"

// libraryFolders are where Linux distributions and NVIDIA's driver container install the library.
var libraryFolders = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

// unversioned are the calls for which NVML has one function, of the same name.
var unversioned = []string{
	"nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", libraryVersion, "nvmlDeviceGetUUID",
	"nvmlDeviceGetIndex", "nvmlDeviceGetName", "nvmlDeviceGetSerial", "nvmlDeviceGetArchitecture",
	"nvmlDeviceGetBrand", "nvmlDeviceGetEccMode", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetEnforcedPowerLimit",
	"nvmlDeviceGetPowerUsage", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMaxPcieLinkGeneration",
	"nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetDisplayMode",
	"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization",
	"nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetTemperature", "nvmlDeviceGetMemoryErrorCounter",
	"nvmlDeviceGetFieldValues",

	"nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRepairStatus",
	"nvmlDeviceGetUnrepairableMemoryFlag_v1", "nvmlDeviceGetSramEccErrorStatus",
	"nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetGpuFabricInfoV",
	"nvmlDeviceGetGpuFabricInfo", "nvmlDeviceValidateInforom",

	"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
	"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetGpuInstanceById",
	"nvmlGpuInstanceGetInfo", "nvmlDeviceGetGpuInstanceProfileInfo",

	"nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemoteDeviceType",

	"nvmlEventSetCreate", "nvmlEventSetFree", eventWaitV2, "nvmlDeviceGetSupportedEventTypes",
	"nvmlDeviceRegisterEvents",

	"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree",
}

// functions lists for every call of this package the NVML functions that go-nvml may use for it, newest first; the
// library needs one of them. A call that is not in this table can't be made.
var functions = func() map[string][]string {
	all := map[string][]string{
		"nvmlInit":                         {"nvmlInit_v2", "nvmlInit"},
		"nvmlSystemGetCudaDriverVersion":   {"nvmlSystemGetCudaDriverVersion_v2"},
		"nvmlDeviceGetCount":               {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
		"nvmlDeviceGetHandleByIndex":       {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
		"nvmlDeviceGetPciInfo":             {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
		handleByPCI:                        {"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId"},
		"nvmlDeviceGetAttributes":          {"nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes"},
		"nvmlDeviceGetNvLinkRemotePciInfo": {"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"},
		"nvmlEventSetWait":                 {"nvmlEventSetWait_v2", "nvmlEventSetWait"},
	}
	for _, name := range unversioned {
		all[name] = []string{name}
	}
	return all
}()

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
	path      string          // as given to dlopen
	available map[string]bool // by call: whether the library has a function for it; immutable
	handle    *dl.DynamicLibrary
	file      libraryFile // that was opened
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
			return l, l.findFunctions()
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

// findFunctions fills l.available. If a mandatory call is missing, it closes the library.
func (l *library) findFunctions() error {
	l.available = make(map[string]bool, len(functions))
	for call, versions := range functions {
		for _, name := range versions {
			l.available[call] = l.available[call] || l.handle.Lookup(name) == nil
		}
	}
	for _, call := range mandatory {
		if !l.available[call] {
			_ = l.handle.Close()
			return fmt.Errorf("the driver's library %s lacks %s: install a newer driver", l.path, call)
		}
	}
	return nil
}
