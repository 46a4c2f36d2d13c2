package compare

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/hardware/record"
)

func integer[T ~int | ~int64 | ~uint64](n T) string { return strconv.FormatInt(int64(n), 10) }

// scaled is a number in another unit; "" if there is none.
func scaled(n *uint64, unit float64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatFloat(float64(*n)/unit, 'f', -1, 64)
}

// OfReport has the values of `inspect --json`.
func OfReport(name string, r report.Report) Source {
	s := NewSource(name)
	s.Lists = true
	s.Machine.set(DriverVersion, r.Driver.Version)
	s.Machine.set(CUDAVersion, r.Driver.CUDA)
	gpus := map[gpu.DeviceID]bool{}
	for _, d := range r.Devices {
		gpus[d.GPU] = true
		s.Device(string(d.ID)).addDevice(d)
	}
	for _, e := range r.Excluded { // a GPU in MIG mode without instances, one that can't be read
		id, _, _ := strings.Cut(e.ID, " ")
		gpus[gpu.DeviceID(cmp.Or(id, "index "+strconv.Itoa(e.Index)))] = true
	}
	s.Machine.set(GPUCount, strconv.Itoa(len(gpus)))
	s.addConditions(r)
	return s
}

func (v Values) addDevice(d report.Device) {
	v.set(PCIAddress, string(d.PCI))
	v.set(Memory, integer(d.MemoryBytes>>20))
	v.set(Serial, d.Serial)
	v.set(Architecture, d.Architecture)
	v.set(Brand, d.Brand)
	v.set(ECCMode, d.ECC)
	if d.ComputeCapability != "" {
		v.set(ComputeCapability, d.ComputeCapability)
	}
	if d.Profile == "" {
		v.set(Index, strconv.Itoa(d.Index))
		v.set(Name, d.Model)
	} else {
		v.set(Profile, d.Profile)
		v.set(Instance, strconv.Itoa(*d.Instance))
	}
	if d.NUMANode >= 0 {
		v.set(NUMANode, strconv.Itoa(d.NUMANode))
	}
	if d.NVLinks > 0 {
		v.set(NVLinks, strconv.Itoa(d.NVLinks))
	}
	u := d.Usage
	if u == nil {
		return
	}
	var pids []int
	for _, p := range d.Processes {
		pids = append(pids, p.PID)
	}
	v.set(Processes, pidText(pids))
	v.set(Temperature, scaled(u.TemperatureCelsius, 1))
	v.set(MemoryUsed, scaled(u.MemoryUsedBytes, 1<<20))
	if d.Profile != "" {
		return // what follows is of GPUs
	}
	v.set(GPUUtilization, scaled(u.GPUPercent, 1))
	v.set(MemoryUtilization, scaled(u.MemoryPercent, 1))
	v.set(Power, scaled(u.PowerMilliwatts, 1000))
	v.set(PowerLimit, scaled(u.PowerLimitMilliwatts, 1000))
}

// addConditions has what nvidia-smi shows of row remapping: an agent has a condition for each, and none if there is nothing.
func (s Source) addConditions(r report.Report) {
	for _, c := range r.Conditions {
		v := s.Devices[string(c.GPU)]
		switch {
		case v == nil:
		case c.Cause == "ROW_REMAP_PENDING":
			v.set(RowPending, "Yes")
		case c.Cause == "ROW_REMAP_FAILED":
			v.set(RowFailed, "Yes")
		}
	}
}

// attributes are the values of Nomad's attributes.
var attributes = map[string]Value{
	"memory": Memory, "power": PowerLimit, "bar1": BAR1, "driver_version": DriverVersion, "cores_clock": MaxGraphicsClock, "memory_clock": MaxMemoryClock,
	"pci_bandwidth": PCIeBandwidth, "display_state": Display, "persistence_mode": Persistence, "cuda_version": CUDAVersion,
	"compute_capability": ComputeCapability, "product": Name, "architecture": Architecture, "brand": Brand, "ecc_mode": ECCMode, "nvlinks": NVLinks,
	"numa_node": NUMANode, "unique.serial": Serial, "mig_profile": Profile, "multiprocessors": Multiprocessors, "copy_engines": CopyEngines,
	"decoders": Decoders, "encoders": Encoders, "jpeg_decoders": JPEGDecoders, "ofas": OFAs,
}

// ofInstance are the attributes and statistics of a MIG instance that are its own, and for which nvidia-smi has a value.
func ofInstance(value Value) bool {
	return !slices.Contains([]Value{MaxGraphicsClock, MaxMemoryClock, PCIeBandwidth, Display, Persistence, Name, PowerLimit}, value)
}

// OfNomad has the values of the fingerprint of nomad-gpu and of its statistics.
func OfNomad(groups []*device.DeviceGroup, statistics []*device.DeviceGroupStats) Source {
	s := NewSource("Nomad")
	for _, g := range groups {
		for _, d := range g.Devices {
			v := s.Device(d.ID)
			for key, a := range g.Attributes {
				name, ok := attributes[key]
				switch {
				case !ok, strings.HasPrefix(d.ID, "MIG-") && !ofInstance(name):
				case name == DriverVersion || name == CUDAVersion:
					s.Machine.set(name, *a.String)
				case a.String != nil:
					v.set(name, *a.String)
				case a.Int != nil:
					v.set(name, integer(*a.Int))
				}
			}
			if d.HwLocality != nil {
				v.set(PCIAddress, address(d.HwLocality.PciBusID))
			}
		}
	}
	s.addStatistics(statistics)
	return s
}

// statistics are those of Nomad, and the value of the whole in those that are a part of something.
var statistics = map[string][2]Value{
	"Power usage": {Power, PowerLimit}, "GPU utilization": {GPUUtilization}, "Memory utilization": {MemoryUtilization},
	"Encoder utilization": {EncoderUtilization}, "Decoder utilization": {DecoderUtilization}, "Temperature": {Temperature},
	"Memory state": {MemoryUsed, Memory}, "BAR1 buffer state": {BAR1Used, BAR1}, "ECC L1 errors": {ECCL1}, "ECC L2 errors": {ECCL2},
	"ECC memory errors": {ECCMemory},
}

func (s Source) addStatistics(groups []*device.DeviceGroupStats) {
	for _, g := range groups {
		for id, d := range g.InstanceStats {
			if d.Stats == nil {
				continue
			}
			for key, stat := range d.Stats.Attributes {
				names := statistics[key]
				if stat.IntNumeratorVal == nil || names[0] == "" {
					continue
				}
				v := s.Device(id)
				v.set(names[0], integer(*stat.IntNumeratorVal))
				if _, known := v[names[1]]; names[1] != "" && stat.IntDenominatorVal != nil && !known {
					v.set(names[1], integer(*stat.IntDenominatorVal))
				}
			}
		}
	}
}

// recorded are the values of the keys of a machine file, with the number of their units in one unit of the value.
var recorded = map[string]struct {
	value Value
	unit  float64
}{
	"name": {Name, 0}, "pci": {PCIAddress, 0}, "serial": {Serial, 0}, "vbios": {VBIOS, 0}, "minor": {Minor, 0}, "compute": {ComputeCapability, 0},
	"memory": {Memory, 1 << 20}, "bar1": {BAR1, 1 << 20}, "bar1_used": {BAR1Used, 1 << 20}, "power_limit": {PowerLimit, 1000},
	"max_clock_graphics": {MaxGraphicsClock, 1}, "max_clock_sm": {MaxSMClock, 1}, "max_clock_memory": {MaxMemoryClock, 1},
	"clock_sm": {SMClock, 1}, "clock_memory": {MemoryClock, 1}, "temperature": {Temperature, 1}, "power_usage": {Power, 1000},
	"max_pcie_gen": {MaxPCIeGeneration, 1}, "max_pcie_width": {MaxPCIeWidth, 1}, "pcie_gen": {PCIeGeneration, 1}, "pcie_width": {PCIeWidth, 1},
	"pcie_replays": {PCIeReplays, 1}, "utilization_gpu": {GPUUtilization, 1}, "utilization_memory": {MemoryUtilization, 1},
	"encoder": {EncoderUtilization, 1}, "decoder": {DecoderUtilization, 1}, "remapped_correctable": {RowsCorrectable, 1},
	"remapped_uncorrectable": {RowsUncorrectable, 1}, "ecc_device": {ECCMemory, 1}, "ecc_uncorrected_volatile": {ECCUncorrected, 1},
}

// recordedFlags are the keys that are yes or no, and the words of nvidia-smi for these.
var recordedFlags = map[string]struct {
	value Value
	words [2]string
}{
	"mig": {MIGMode, [2]string{"Disabled", "Enabled"}}, "persistence": {Persistence, [2]string{"Disabled", "Enabled"}},
	"display_mode": {Display, [2]string{"Disabled", "Enabled"}}, "ecc": {ECCMode, [2]string{"Disabled", "Enabled"}},
	"remapped_pending": {RowPending, [2]string{"No", "Yes"}}, "remapped_failed": {RowFailed, [2]string{"No", "Yes"}},
}

// OfRecording has the values of a recording: what NVML itself returns.
func OfRecording(r record.Recording) Source {
	s := NewSource("NVML")
	s.Machine.set(GPUCount, strconv.Itoa(len(r.GPUs)))
	for _, a := range r.Answers {
		switch {
		case a.Return != "SUCCESS":
		case a.Key == "driver":
			s.Machine.set(DriverVersion, a.Value)
		case a.Key == "cuda":
			s.Machine.set(CUDAVersion, a.Value)
		}
	}
	for _, g := range r.GPUs {
		v := s.Device(g.Values["uuid"])
		v.set(Index, strconv.Itoa(g.Index))
		for key, text := range g.Values {
			if f, ok := recordedFlags[key]; ok {
				v.set(f.value, f.words[map[string]int{"yes": 1}[text]])
			}
			to, ok := recorded[key]
			if n, err := strconv.ParseFloat(record.Normal(text), 64); ok && err == nil && to.unit > 0 {
				v.set(to.value, strconv.FormatFloat(n/to.unit, 'f', -1, 64))
			} else if ok {
				v.set(to.value, text)
			}
		}
	}
	return s
}
