// Package record reads everything that the simulated driver can play from a real driver, through NVML, and writes it as a
// machine file (test/simdriver/README.md). It calls only functions that read. A function that the library lacks is not called.
package record

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Answer is what a driver answers for one key of a machine file.
type Answer struct {
	GPU      int    `json:"gpu"` // NVML index; -1 = the driver
	Key      string `json:"key"`
	Function string `json:"function"`
	Return   string `json:"return"` // "SUCCESS", "NOT_SUPPORTED"; "not in the library"
	Value    string `json:"value,omitempty"`
}

// Recording is a machine.
type Recording struct {
	Text    string   // machine.conf
	Answers []Answer // one for each key and GPU, in the order of the table of keys
	GPUs    []GPU
}

// GPU is one GPU of a recording, by the keys of machine files.
type GPU struct {
	Index     int
	Values    map[string]string
	Instances []string // values of the key instance
}

// machine is a recording in progress.
type machine struct {
	lib      nvml.Interface
	sysfs    string
	answers  []Answer
	gpus     []GPU
	handles  []nvml.Device
	driver   map[string]string
	profiles []profile
}

// Record reads the machine of an initialised library. sysfs is the mount point of sysfs, for NUMA nodes.
func Record(lib nvml.Interface, sysfs string) (Recording, error) {
	m := &machine{lib: lib, sysfs: sysfs, driver: map[string]string{}}
	if err := m.readDriver(); err != nil {
		return Recording{}, err
	}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return Recording{}, fmt.Errorf("nvmlDeviceGetCount: %w", ret)
	}
	var problems []error
	for i := range count {
		h, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			problems = append(problems, fmt.Errorf("GPU %d is not recorded: nvmlDeviceGetHandleByIndex: %w", i, ret))
			continue
		}
		m.handles = append(m.handles, h)
		m.gpus = append(m.gpus, GPU{Index: i, Values: map[string]string{}})
	}
	for i := range m.gpus {
		m.readGPU(i)
	}
	m.readProfiles()
	for i := range m.gpus {
		m.readInstances(i)
	}
	links := m.readLinks()
	return Recording{Text: m.text(links), Answers: m.answers, GPUs: m.gpus}, errors.Join(problems...)
}

// has reports whether the library has one of these functions.
func (m *machine) has(functions ...string) bool {
	return slices.ContainsFunc(functions, func(f string) bool { return m.lib.Extensions().LookupSymbol(f) == nil })
}

func (m *machine) readDriver() error {
	version, ret := m.lib.SystemGetDriverVersion()
	m.note(-1, "driver", "nvmlSystemGetDriverVersion", version, ret)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("nvmlSystemGetDriverVersion: %w", ret)
	}
	m.driver["driver"] = version
	if m.has("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion") {
		cuda, ret := m.lib.SystemGetCudaDriverVersion()
		text := fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
		if m.note(-1, "cuda", "nvmlSystemGetCudaDriverVersion", text, ret); ret == nvml.SUCCESS {
			m.driver["cuda"] = text
		}
	}
	return nil
}

// note records an answer.
func (m *machine) note(gpu int, key, function, value string, ret nvml.Return) {
	a := Answer{GPU: gpu, Key: key, Function: function, Return: ReturnName(ret)}
	if ret == nvml.SUCCESS {
		a.Value = value
	}
	m.answers = append(m.answers, a)
}

// readGPU reads every key of the table.
func (m *machine) readGPU(i int) {
	g := &m.gpus[i]
	for _, k := range keys {
		if !m.has(k.functions...) {
			m.answers = append(m.answers, Answer{GPU: g.Index, Key: k.name, Function: k.functions[0], Return: notInLibrary})
			continue
		}
		value, ret := k.read(m.handles[i])
		m.note(g.Index, k.name, k.functions[0]+k.argument, value, ret)
		if ret == nvml.SUCCESS && value != "" {
			g.Values[k.name] = value
		}
	}
	// The simulated driver answers these like the value in force if they are not given.
	for pending, current := range map[string]string{"ecc_pending": "ecc", "mig_pending": "mig"} {
		if g.Values[pending] == g.Values[current] {
			delete(g.Values, pending)
		}
	}
	m.readLocation(g)
	m.readFabric(i)
}

// readLocation reads the NUMA node, which NVML does not have.
func (m *machine) readLocation(g *GPU) {
	text, err := os.ReadFile(filepath.Join(m.sysfs, "bus/pci/devices", g.Values["pci"], "numa_node"))
	a := Answer{GPU: g.Index, Key: "numa", Function: "sysfs numa_node", Return: "SUCCESS"}
	if a.Value = strings.TrimSpace(string(text)); err != nil {
		a.Return = err.Error()
	} else if a.Value != "-1" {
		g.Values["numa"] = a.Value
	}
	m.answers = append(m.answers, a)
}

// readFabric reads the state in an NVSwitch fabric: the newest structure that the driver accepts.
func (m *machine) readFabric(i int) {
	const function = "nvmlDeviceGetGpuFabricInfoV"
	g, h := &m.gpus[i], m.handles[i]
	if !m.has(function) {
		m.answers = append(m.answers, Answer{GPU: g.Index, Key: "fabric_state", Function: function, Return: notInLibrary})
		return
	}
	info, ret := h.GetGpuFabricInfoV().V3()
	if ret == nvml.ERROR_ARGUMENT_VERSION_MISMATCH {
		old, retOld := h.GetGpuFabricInfoV().V2()
		info, ret = nvml.GpuFabricInfo_v3{ClusterUuid: old.ClusterUuid, Status: old.Status, CliqueId: old.CliqueId, State: old.State, HealthMask: old.HealthMask}, retOld
		g.Values["fabric_version"] = "2"
	}
	set := func(key, value string) {
		if m.note(g.Index, key, function, value, ret); ret == nvml.SUCCESS {
			g.Values[key] = value
		}
	}
	set("fabric_state", decimal(info.State))
	set("fabric_status", decimal(info.Status))
	set("fabric_clique", decimal(info.CliqueId))
	if c := info.ClusterUuid; c != [16]uint8{} {
		set("fabric_cluster", fmt.Sprintf("%x-%x-%x-%x-%x", c[:4], c[4:6], c[6:8], c[8:10], c[10:]))
	}
	set("fabric_health_mask", hexadecimal(info.HealthMask))
	if g.Values["fabric_version"] == "" {
		set("fabric_health_summary", decimal(info.HealthSummary))
	}
}

// allLinks is the scope of a field value that is a sum over all NVLinks.
const allLinks = math.MaxUint32

// notInLibrary is the answer of a function that the library does not export.
const notInLibrary = "not in the library"

// ReturnName is the name of an NVML return code without its prefix.
func ReturnName(ret nvml.Return) string {
	if name, ok := returnNames[ret]; ok {
		return name
	}
	return fmt.Sprint("return code ", int(ret))
}

var returnNames = map[nvml.Return]string{
	nvml.SUCCESS: "SUCCESS", nvml.ERROR_UNINITIALIZED: "UNINITIALIZED", nvml.ERROR_INVALID_ARGUMENT: "INVALID_ARGUMENT",
	nvml.ERROR_NOT_SUPPORTED: "NOT_SUPPORTED", nvml.ERROR_NO_PERMISSION: "NO_PERMISSION", nvml.ERROR_NOT_FOUND: "NOT_FOUND",
	nvml.ERROR_INSUFFICIENT_SIZE: "INSUFFICIENT_SIZE", nvml.ERROR_INSUFFICIENT_POWER: "INSUFFICIENT_POWER",
	nvml.ERROR_DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED", nvml.ERROR_TIMEOUT: "TIMEOUT", nvml.ERROR_IRQ_ISSUE: "IRQ_ISSUE",
	nvml.ERROR_LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND", nvml.ERROR_FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
	nvml.ERROR_CORRUPTED_INFOROM: "CORRUPTED_INFOROM", nvml.ERROR_GPU_IS_LOST: "GPU_IS_LOST", nvml.ERROR_RESET_REQUIRED: "RESET_REQUIRED",
	nvml.ERROR_OPERATING_SYSTEM: "OPERATING_SYSTEM", nvml.ERROR_LIB_RM_VERSION_MISMATCH: "LIB_RM_VERSION_MISMATCH",
	nvml.ERROR_IN_USE: "IN_USE", nvml.ERROR_MEMORY: "MEMORY", nvml.ERROR_NO_DATA: "NO_DATA",
	nvml.ERROR_ARGUMENT_VERSION_MISMATCH: "ARGUMENT_VERSION_MISMATCH", nvml.ERROR_DEPRECATED: "DEPRECATED",
	nvml.ERROR_NOT_READY: "NOT_READY", nvml.ERROR_GPU_NOT_FOUND: "GPU_NOT_FOUND", nvml.ERROR_INVALID_STATE: "INVALID_STATE",
	nvml.ERROR_UNKNOWN: "UNKNOWN",
}
