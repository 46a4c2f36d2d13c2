// Package compare compares what the agents show of the GPUs of a machine with what nvidia-smi prints, value by value. It reads
// nothing itself: it is given the outputs.
package compare

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Value is the name of a value, with its unit.
type Value string

// The values. Those of the machine come first, those of MIG instances last.
const (
	DriverVersion Value = "driver version"
	CUDAVersion   Value = "CUDA version"
	GPUCount      Value = "GPUs"

	Index             Value = "index"
	PCIAddress        Value = "PCI address"
	Name              Value = "name"
	Architecture      Value = "architecture"
	Brand             Value = "brand"
	Serial            Value = "serial"
	ComputeCapability Value = "compute capability"
	Minor             Value = "minor number"
	VBIOS             Value = "VBIOS"
	NUMANode          Value = "NUMA node"
	NVLinks           Value = "active NVLinks"

	Memory            Value = "memory, MiB"
	BAR1              Value = "BAR1, MiB"
	PowerLimit        Value = "power limit, W"
	MaxGraphicsClock  Value = "maximum graphics clock, MHz"
	MaxSMClock        Value = "maximum SM clock, MHz"
	MaxMemoryClock    Value = "maximum memory clock, MHz"
	MaxPCIeGeneration Value = "maximum PCIe generation"
	MaxPCIeWidth      Value = "maximum PCIe width"
	PCIeBandwidth     Value = "PCIe bandwidth, MB/s"
	MIGMode           Value = "MIG mode"
	Persistence       Value = "persistence mode"
	Display           Value = "display mode"
	ECCMode           Value = "ECC mode"

	ECCMemory         Value = "corrected errors of the memory"
	ECCL1             Value = "corrected errors of L1"
	ECCL2             Value = "corrected errors of L2"
	ECCUncorrected    Value = "uncorrected errors"
	RowsCorrectable   Value = "remapped rows, correctable"
	RowsUncorrectable Value = "remapped rows, uncorrectable"
	RowPending        Value = "row remap pending"
	RowFailed         Value = "row remap failed"
	PCIeReplays       Value = "PCIe replays"
	RecoveryAction    Value = "recovery action"

	Temperature        Value = "temperature, C"
	Power              Value = "power, W"
	GPUUtilization     Value = "GPU utilisation, %"
	MemoryUtilization  Value = "memory utilisation, %"
	EncoderUtilization Value = "encoder utilisation, %"
	DecoderUtilization Value = "decoder utilisation, %"
	MemoryUsed         Value = "memory used, MiB"
	BAR1Used           Value = "BAR1 used, MiB"
	SMClock            Value = "SM clock, MHz"
	MemoryClock        Value = "memory clock, MHz"
	PCIeGeneration     Value = "PCIe generation"
	PCIeWidth          Value = "PCIe width"
	Processes          Value = "compute processes"

	Profile         Value = "MIG profile"
	Instance        Value = "MIG instance"
	Multiprocessors Value = "multiprocessors"
	CopyEngines     Value = "copy engines"
	Decoders        Value = "decoders"
	Encoders        Value = "encoders"
	JPEGDecoders    Value = "JPEG decoders"
	OFAs            Value = "optical flow accelerators"
)

// Connection is the connection of two GPUs, by their indices: "NV18", "PIX", "SYS".
func Connection(i, j int) Value { return Value(fmt.Sprintf("connection of GPU %d and %d", i, j)) }

// tolerance is by how much two numbers may differ, and why.
type tolerance struct {
	by  float64 // the larger of this
	and float64 // and of this part of nvidia-smi's number
	why string
}

const moment = "read at another moment"

var tolerances = map[Value]tolerance{
	Memory: {1, 0, "rounded to MiB"}, BAR1: {1, 0, "rounded to MiB"}, PowerLimit: {1, 0, "rounded to W"},
	Temperature: {5, 0, moment}, Power: {25, 0.2, moment}, MemoryUsed: {64, 0.02, moment}, BAR1Used: {64, 0, moment},
	GPUUtilization: {30, 0, moment}, MemoryUtilization: {30, 0, moment}, EncoderUtilization: {30, 0, moment}, DecoderUtilization: {30, 0, moment},
	SMClock: {math.Inf(1), 0, "changes with load, read up to 10 s before"}, MemoryClock: {math.Inf(1), 0, "changes with load, read up to 10 s before"},
	PCIeGeneration: {6, 0, "changes with load, read up to a minute before"}, PCIeWidth: {16, 0, "changes with load, read up to a minute before"},
	PCIeReplays: {3, 0.1, moment},
}

// Values are the values of the machine or of a device.
type Values map[Value]string

// set sets a value; "" is none.
func (v Values) set(name Value, text string) {
	if text != "" {
		v[name] = text
	}
}

// Source is a program, and what it shows.
type Source struct {
	Name    string
	Lists   bool // it has every device on which work can run: all but GPUs in MIG mode
	Machine Values
	Devices map[string]Values // by UUID
}

// NewSource returns a source without values.
func NewSource(name string) Source {
	return Source{Name: name, Machine: Values{}, Devices: map[string]Values{}}
}

// Device returns the values of a device, to which more can be added.
func (s Source) Device(id string) Values {
	if s.Devices[id] == nil {
		s.Devices[id] = Values{}
	}
	return s.Devices[id]
}

// Result is the result of a comparison.
type Result string

// The results.
const (
	Equal     Result = "equal"
	Within    Result = "within tolerance"
	Differs   Result = "DIFFERS"
	OnlyOurs  Result = "only this source has it"
	OnlySMI   Result = "only nvidia-smi has it"
	NotListed Result = "DEVICE NOT LISTED" // by this source, or by nvidia-smi
)

// Row is one value of one source.
type Row struct {
	Device string `json:"device,omitempty"` // UUID; "" = the machine
	Value  Value  `json:"value"`
	Source string `json:"source"`
	Ours   string `json:"ours,omitempty"`
	SMI    string `json:"nvidiaSMI,omitempty"`
	Result Result `json:"result"`
	Why    string `json:"tolerance,omitempty"` // how far the values may differ, and why
}

// Bad reports whether the values should not differ as they do.
func (r Row) Bad() bool { return r.Result == Differs || r.Result == NotListed }

// Compare compares sources with nvidia-smi. What no source has is one row; what one of them has and nvidia-smi has not, too.
func Compare(sources []Source, smi Source) []Row {
	rows := compareValues("", func(s Source) Values { return s.Machine }, sources, smi)
	devices := map[string]bool{}
	for _, s := range append(slices.Clone(sources), smi) {
		for id := range s.Devices {
			devices[id] = true
		}
	}
	ids := slices.SortedFunc(maps.Keys(devices), func(a, b string) int {
		return cmp.Or(cmp.Compare(position(smi, a), position(smi, b)), cmp.Compare(a, b))
	})
	for _, id := range ids {
		theirs, listed := smi.Devices[id]
		if !listed {
			rows = append(rows, Row{Device: id, Value: "device", Source: smi.Name, Result: NotListed})
		}
		for _, s := range sources {
			if _, ok := s.Devices[id]; listed && s.Lists && !ok && theirs[MIGMode] != "Enabled" {
				rows = append(rows, Row{Device: id, Value: "device", Source: s.Name, Result: NotListed})
			}
		}
		rows = append(rows, compareValues(id, func(s Source) Values { return s.Devices[id] }, sources, smi)...)
	}
	return rows
}

// position is the index of a GPU; instances come after all GPUs.
func position(s Source, id string) int {
	if n, err := strconv.Atoi(s.Devices[id][Index]); err == nil {
		return n
	}
	return math.MaxInt
}

func compareValues(device string, of func(Source) Values, sources []Source, smi Source) (rows []Row) {
	names := map[Value]bool{}
	for _, s := range append(slices.Clone(sources), smi) {
		for name := range of(s) {
			names[name] = true
		}
	}
	theirs := of(smi)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		var here []Row
		for _, s := range sources {
			ours, ok := of(s)[name]
			if !ok {
				continue
			}
			row := Row{Device: device, Value: name, Source: s.Name, Ours: ours, SMI: theirs[name]}
			row.Result, row.Why = judge(name, ours, theirs[name])
			here = append(here, row)
		}
		if len(here) == 0 {
			here = []Row{{Device: device, Value: name, Source: "-", SMI: theirs[name], Result: OnlySMI}}
		}
		rows = append(rows, merge(here)...)
	}
	return rows
}

// judge compares two texts.
func judge(name Value, ours, theirs string) (Result, string) {
	switch {
	case theirs == "":
		return OnlyOurs, ""
	case strings.EqualFold(ours, theirs):
		return Equal, ""
	}
	a, err1 := strconv.ParseFloat(ours, 64)
	b, err2 := strconv.ParseFloat(theirs, 64)
	if err1 != nil || err2 != nil {
		return Differs, ""
	}
	if a == b {
		return Equal, ""
	}
	t, ok := tolerances[name]
	if !ok {
		return Differs, ""
	}
	limit := max(t.by, math.Abs(b)*t.and)
	why := t.why
	if !math.IsInf(limit, 1) {
		why = fmt.Sprintf("±%s, %s", strconv.FormatFloat(math.Round(limit*10)/10, 'f', -1, 64), t.why)
	}
	if math.Abs(a-b) <= limit {
		return Within, why
	}
	return Differs, why
}

// merge makes one row of sources with the same value.
func merge(rows []Row) (merged []Row) {
	for _, r := range rows {
		i := slices.IndexFunc(merged, func(m Row) bool { return m.Ours == r.Ours })
		if i < 0 {
			merged = append(merged, r)
			continue
		}
		merged[i].Source += ", " + r.Source
	}
	return merged
}
