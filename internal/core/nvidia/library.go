package nvidia

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"

	"github.com/tandem-gpu/tandem/internal/core"
)

const libraryName = "libnvidia-ml.so.1"

// libraryFolders are where distributions and NVIDIA's driver container keep the library.
var libraryFolders = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

// functions lists, for every call made here, the functions that go-nvml may bind for it: the newest that
// the library has, so that one is enough. A call that is not in this table can't be made.
var functions = map[string][]string{
	"nvmlInit":                           {"nvmlInit_v2", "nvmlInit"},
	"nvmlShutdown":                       {"nvmlShutdown"},
	"nvmlErrorString":                    {"nvmlErrorString"},
	"nvmlSystemGetDriverVersion":         {"nvmlSystemGetDriverVersion"},
	libraryVersion:                       {libraryVersion},
	"nvmlSystemGetCudaDriverVersion":     {"nvmlSystemGetCudaDriverVersion_v2"},
	"nvmlDeviceGetCount":                 {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	"nvmlDeviceGetHandleByIndex":         {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	"nvmlDeviceGetUUID":                  {"nvmlDeviceGetUUID"},
	"nvmlDeviceGetIndex":                 {"nvmlDeviceGetIndex"},
	"nvmlDeviceGetPciInfo":               {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	"nvmlDeviceGetName":                  {"nvmlDeviceGetName"},
	"nvmlDeviceGetSerial":                {"nvmlDeviceGetSerial"},
	"nvmlDeviceGetArchitecture":          {"nvmlDeviceGetArchitecture"},
	"nvmlDeviceGetBrand":                 {"nvmlDeviceGetBrand"},
	"nvmlDeviceGetEccMode":               {"nvmlDeviceGetEccMode"},
	"nvmlDeviceGetMinorNumber":           {"nvmlDeviceGetMinorNumber"},
	"nvmlDeviceGetMemoryInfo":            {"nvmlDeviceGetMemoryInfo"},
	"nvmlDeviceGetBAR1MemoryInfo":        {"nvmlDeviceGetBAR1MemoryInfo"},
	"nvmlDeviceGetPowerManagementLimit":  {"nvmlDeviceGetPowerManagementLimit"},
	"nvmlDeviceGetEnforcedPowerLimit":    {"nvmlDeviceGetEnforcedPowerLimit"},
	"nvmlDeviceGetPowerUsage":            {"nvmlDeviceGetPowerUsage"},
	"nvmlDeviceGetMaxClockInfo":          {"nvmlDeviceGetMaxClockInfo"},
	"nvmlDeviceGetMaxPcieLinkGeneration": {"nvmlDeviceGetMaxPcieLinkGeneration"},
	"nvmlDeviceGetMaxPcieLinkWidth":      {"nvmlDeviceGetMaxPcieLinkWidth"},
	"nvmlDeviceGetCudaComputeCapability": {"nvmlDeviceGetCudaComputeCapability"},
	"nvmlDeviceGetDisplayMode":           {"nvmlDeviceGetDisplayMode"},
	"nvmlDeviceGetPersistenceMode":       {"nvmlDeviceGetPersistenceMode"},
	"nvmlDeviceGetUtilizationRates":      {"nvmlDeviceGetUtilizationRates"},
	"nvmlDeviceGetEncoderUtilization":    {"nvmlDeviceGetEncoderUtilization"},
	"nvmlDeviceGetDecoderUtilization":    {"nvmlDeviceGetDecoderUtilization"},
	"nvmlDeviceGetTemperature":           {"nvmlDeviceGetTemperature"},
	"nvmlDeviceGetMemoryErrorCounter":    {"nvmlDeviceGetMemoryErrorCounter"},
	"nvmlDeviceGetFieldValues":           {"nvmlDeviceGetFieldValues"},

	byPCI:                                    {"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId"},
	"nvmlDeviceGetVirtualizationMode":        {"nvmlDeviceGetVirtualizationMode"},
	"nvmlDeviceGetTotalEccErrors":            {"nvmlDeviceGetTotalEccErrors"},
	"nvmlDeviceGetRepairStatus":              {"nvmlDeviceGetRepairStatus"},
	"nvmlDeviceGetUnrepairableMemoryFlag_v1": {"nvmlDeviceGetUnrepairableMemoryFlag_v1"},
	"nvmlDeviceGetSramEccErrorStatus":        {"nvmlDeviceGetSramEccErrorStatus"},
	"nvmlDeviceGetCurrPcieLinkGeneration":    {"nvmlDeviceGetCurrPcieLinkGeneration"},
	"nvmlDeviceGetCurrPcieLinkWidth":         {"nvmlDeviceGetCurrPcieLinkWidth"},
	"nvmlDeviceGetGpuFabricInfoV":            {"nvmlDeviceGetGpuFabricInfoV"},
	"nvmlDeviceGetGpuFabricInfo":             {"nvmlDeviceGetGpuFabricInfo"},
	"nvmlDeviceValidateInforom":              {"nvmlDeviceValidateInforom"},

	"nvmlDeviceGetMigMode":                {"nvmlDeviceGetMigMode"},
	"nvmlDeviceGetMaxMigDeviceCount":      {"nvmlDeviceGetMaxMigDeviceCount"},
	"nvmlDeviceGetMigDeviceHandleByIndex": {"nvmlDeviceGetMigDeviceHandleByIndex"},
	"nvmlDeviceGetGpuInstanceId":          {"nvmlDeviceGetGpuInstanceId"},
	"nvmlDeviceGetComputeInstanceId":      {"nvmlDeviceGetComputeInstanceId"},
	"nvmlDeviceGetAttributes":             {"nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes"},
	"nvmlDeviceGetGpuInstanceById":        {"nvmlDeviceGetGpuInstanceById"},
	"nvmlGpuInstanceGetInfo":              {"nvmlGpuInstanceGetInfo"},
	"nvmlDeviceGetGpuInstanceProfileInfo": {"nvmlDeviceGetGpuInstanceProfileInfo"},

	"nvmlDeviceGetTopologyCommonAncestor": {"nvmlDeviceGetTopologyCommonAncestor"},
	"nvmlDeviceGetNvLinkState":            {"nvmlDeviceGetNvLinkState"},
	"nvmlDeviceGetNvLinkRemotePciInfo":    {"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo"},
	"nvmlDeviceGetNvLinkRemoteDeviceType": {"nvmlDeviceGetNvLinkRemoteDeviceType"},

	"nvmlEventSetCreate":               {"nvmlEventSetCreate"},
	"nvmlEventSetFree":                 {"nvmlEventSetFree"},
	"nvmlEventSetWait":                 {"nvmlEventSetWait_v2", "nvmlEventSetWait"},
	attributed:                         {attributed},
	"nvmlDeviceGetSupportedEventTypes": {"nvmlDeviceGetSupportedEventTypes"},
	"nvmlDeviceRegisterEvents":         {"nvmlDeviceRegisterEvents"},

	"nvmlSystemEventSetCreate": {"nvmlSystemEventSetCreate"},
	"nvmlSystemRegisterEvents": {"nvmlSystemRegisterEvents"},
	"nvmlSystemEventSetWait":   {"nvmlSystemEventSetWait"},
	"nvmlSystemEventSetFree":   {"nvmlSystemEventSetFree"},
}

// Calls are the names of all calls that a session can make, sorted: what may stand in core.Call, and what tests
// make fail.
func Calls() []string { return slices.Sorted(maps.Keys(functions)) }

// attributed is the event wait that says which MIG instance an event concerns; the older one leaves the
// instance at zero, which names one.
const attributed = "nvmlEventSetWait_v2"

// libraryVersion may be called without nvmlInit (nvml.h), so also after one that failed.
const libraryVersion = "nvmlSystemGetNVMLVersion"

// mandatory are the calls without which there is nothing to offer.
var mandatory = []string{
	"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
	"nvmlDeviceGetPciInfo",
}

// library is a libnvidia-ml.so.1 that was opened to see what it has.
type library struct {
	path string          // that the dynamic linker was given
	have map[string]bool // the calls that can be made; immutable
	file *dl.DynamicLibrary
	disk disk // the file that was opened
}

// findLibrary opens the driver's library beneath root, or where the dynamic linker finds it.
func findLibrary(root string) (*library, error) {
	root = filepath.Join("/", root)
	var candidates, looked []string
	if root == "/" {
		candidates, looked = []string{libraryName}, []string{"the dynamic linker's path"}
	}
	for _, folder := range libraryFolders {
		looked = append(looked, filepath.Join(root, folder))
		path := filepath.Join(root, folder, libraryName)
		if _, err := os.Stat(path); err == nil {
			candidates = append(candidates, path)
		}
	}
	var broken error
	for _, path := range candidates {
		l, err := openLibrary(path)
		if err == nil {
			return l, l.inspect()
		}
		if path != libraryName || !strings.Contains(err.Error(), "No such file") {
			broken = fmt.Errorf("the driver's library can't be loaded: %w", err)
		}
	}
	if broken != nil {
		return nil, broken
	}
	return nil, noLibrary(looked)
}

func noLibrary(looked []string) error {
	return fmt.Errorf("%w: %s is not in %s; install the driver, or name its root",
		core.ErrNoDriver, libraryName, strings.Join(looked, ", "))
}

// openLibrary opens a library and notes which file that was, again if it is just being replaced.
func openLibrary(path string) (*library, error) {
	for {
		before := diskOf(path)
		file := dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		if err := file.Open(); err != nil {
			return nil, err
		}
		l := &library{path: path, file: file, disk: diskOf(path)}
		if path == libraryName { // the dynamic linker knows where
			l.disk = diskOf(mappedPath())
			return l, nil
		}
		if l.disk.file == before.file {
			return l, nil
		}
		_ = file.Close()
	}
}

// inspect looks up every function once. Without one that is mandatory it closes the library.
func (l *library) inspect() error {
	l.have = make(map[string]bool, len(functions))
	for call, versions := range functions {
		for _, name := range versions {
			l.have[call] = l.have[call] || l.file.Lookup(name) == nil
		}
	}
	for _, call := range mandatory {
		if !l.have[call] {
			_ = l.file.Close()
			return fmt.Errorf("the driver's library %s lacks %s; install a newer driver", l.path, call)
		}
	}
	return nil
}
