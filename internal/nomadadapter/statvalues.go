package nomadadapter

import (
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Keys of statistics.
const (
	memoryKey = "Memory state" // shown by the nomad command in short lists
	healthKey = "Health"       // a text: the nomad command does not show the description in the fingerprint
)

// measure is the unit and description of a statistic.
type measure struct {
	unit, desc string
	scale      uint64 // units of gpu.Usage in one unit of the statistic
}

// number returns the statistic of one device, "N/A" if v is unknown.
func (m measure) number(v gpu.OptionalUint64) *structs.StatValue {
	stat := &structs.StatValue{Unit: m.unit, Desc: m.desc}
	if v.OK {
		stat.IntNumeratorVal = new(int64(v.Value / m.scale))
	} else {
		stat.StringVal = new("N/A")
	}
	return stat
}

// fraction returns the statistic of one device, "N/A" if part or whole is unknown.
func (m measure) fraction(part, whole gpu.OptionalUint64) *structs.StatValue {
	if !whole.OK {
		part.OK = false
	}
	stat := m.number(part)
	if part.OK {
		stat.IntDenominatorVal = new(int64(whole.Value / m.scale))
	}
	return stat
}

// statistics returns the lines of `nomad node status -stats` for one device. All but the health have the keys, units and
// descriptions of nomad-device-nvidia.
func statistics(health string, u *gpu.Usage) map[string]*structs.StatValue {
	return map[string]*structs.StatValue{
		healthKey:             {StringVal: &health, Desc: "Health of the device, with what is wrong and what to do"},
		"Power usage":         measure{"W", "Power usage for this GPU in watts and its associated circuitry (e.g. memory) / Maximum GPU Power", 1000}.fraction(u.Power, u.PowerLimit),
		"GPU utilization":     measure{"%", "Percent of time over the past sample period during which one or more kernels were executing on the GPU.", 1}.number(u.GPU),
		"Memory utilization":  measure{"%", "Percentage of bandwidth used during the past sample period", 1}.number(u.Memory),
		"Encoder utilization": measure{"%", "Percent of time over the past sample period during which GPU Encoder was used", 1}.number(u.Encoder),
		"Decoder utilization": measure{"%", "Percent of time over the past sample period during which GPU Decoder was used", 1}.number(u.Decoder),
		"Temperature":         measure{"C", "Temperature of the Unit", 1}.number(u.Temperature),
		memoryKey:             measure{"MiB", "UsedMemory / TotalMemory", 1 << 20}.fraction(u.MemoryUsed, u.MemoryTotal),
		"BAR1 buffer state":   measure{"MiB", "UsedBAR1 / TotalBAR1", 1 << 20}.fraction(u.BAR1Used, u.BAR1Total),
		"ECC L1 errors":       measure{"#", "Requested L1Cache error counter for the device", 1}.number(u.ECCL1),
		"ECC L2 errors":       measure{"#", "Requested L2Cache error counter for the device", 1}.number(u.ECCL2),
		"ECC memory errors":   measure{"#", "Requested memory error counter for the device", 1}.number(u.ECCMemory),
	}
}
