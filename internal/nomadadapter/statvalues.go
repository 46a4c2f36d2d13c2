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

// notAvailable is the text of an unknown value.
var notAvailable = "N/A"

// statValues makes the statistics of one device in one block of memory.
type statValues struct {
	values []structs.StatValue
	ints   []int64
}

// maxStatistics is the number of statistics of a device.
const maxStatistics = 12

func newStatValues() *statValues {
	return &statValues{make([]structs.StatValue, 0, maxStatistics), make([]int64, 0, 2*maxStatistics)}
}

func (s *statValues) add(v structs.StatValue) *structs.StatValue {
	s.values = append(s.values, v)
	return &s.values[len(s.values)-1]
}

func (s *statValues) int(v uint64) *int64 {
	s.ints = append(s.ints, int64(v))
	return &s.ints[len(s.ints)-1]
}

// number returns a statistic, "N/A" if v is unknown.
func (s *statValues) number(m measure, v gpu.OptionalUint64) *structs.StatValue {
	stat := s.add(structs.StatValue{Unit: m.unit, Desc: m.desc})
	if v.OK {
		stat.IntNumeratorVal = s.int(v.Value / m.scale)
	} else {
		stat.StringVal = &notAvailable
	}
	return stat
}

// fraction returns a statistic, "N/A" if part or whole is unknown.
func (s *statValues) fraction(m measure, part, whole gpu.OptionalUint64) *structs.StatValue {
	if !whole.OK {
		part.OK = false
	}
	stat := s.number(m, part)
	if part.OK {
		stat.IntDenominatorVal = s.int(whole.Value / m.scale)
	}
	return stat
}

// statistics returns the lines of `nomad node status -stats` for one device. All but the health have the keys, units and
// descriptions of nomad-device-nvidia.
func statistics(health string, u *gpu.Usage) map[string]*structs.StatValue {
	s := newStatValues()
	return map[string]*structs.StatValue{
		healthKey:             s.add(structs.StatValue{StringVal: &health, Desc: "Health of the device, with what is wrong and what to do"}),
		"Power usage":         s.fraction(measure{"W", "Power usage for this GPU in watts and its associated circuitry (e.g. memory) / Maximum GPU Power", 1000}, u.Power, u.PowerLimit),
		"GPU utilization":     s.number(measure{"%", "Percent of time over the past sample period during which one or more kernels were executing on the GPU.", 1}, u.GPU),
		"Memory utilization":  s.number(measure{"%", "Percentage of bandwidth used during the past sample period", 1}, u.Memory),
		"Encoder utilization": s.number(measure{"%", "Percent of time over the past sample period during which GPU Encoder was used", 1}, u.Encoder),
		"Decoder utilization": s.number(measure{"%", "Percent of time over the past sample period during which GPU Decoder was used", 1}, u.Decoder),
		"Temperature":         s.number(measure{"C", "Temperature of the Unit", 1}, u.Temperature),
		memoryKey:             s.fraction(measure{"MiB", "UsedMemory / TotalMemory", 1 << 20}, u.MemoryUsed, u.MemoryTotal),
		"BAR1 buffer state":   s.fraction(measure{"MiB", "UsedBAR1 / TotalBAR1", 1 << 20}, u.BAR1Used, u.BAR1Total),
		"ECC L1 errors":       s.number(measure{"#", "Requested L1Cache error counter for the device", 1}, u.ECCL1),
		"ECC L2 errors":       s.number(measure{"#", "Requested L2Cache error counter for the device", 1}, u.ECCL2),
		"ECC memory errors":   s.number(measure{"#", "Requested memory error counter for the device", 1}, u.ECCMemory),
	}
}
