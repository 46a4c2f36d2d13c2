package nomadadapter

import (
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// statistic is one line of `nomad node status -stats`: a number, or a part of a whole.
type statistic struct {
	key, unit, desc string
	scale           uint64 // the core's units in one of ours
	part            func(core.Usage) core.OptionalUint64
	whole           func(core.Usage) core.OptionalUint64 // nil for a plain number
}

// summary is the statistic that stands for a device in short lists.
const summary = "Memory state"

// healthKey is the one statistic that is no number: the line of health. Nomad's command line shows the
// description in a fingerprint nowhere.
const healthKey = "Health"

// statistics have the keys, units and descriptions of nomad-device-nvidia.
var statistics = []statistic{
	{
		key: "Power usage", unit: "W", scale: 1000,
		desc:  "Power usage for this GPU in watts and its associated circuitry (e.g. memory) / Maximum GPU Power",
		part:  func(u core.Usage) core.OptionalUint64 { return u.Power },
		whole: func(u core.Usage) core.OptionalUint64 { return u.PowerLimit },
	},
	{
		key: "GPU utilization", unit: "%", scale: 1,
		desc: "Percent of time over the past sample period during which one or more kernels were executing on the GPU.",
		part: func(u core.Usage) core.OptionalUint64 { return u.GPU },
	},
	{
		key: "Memory utilization", unit: "%", scale: 1,
		desc: "Percentage of bandwidth used during the past sample period",
		part: func(u core.Usage) core.OptionalUint64 { return u.Memory },
	},
	{
		key: "Encoder utilization", unit: "%", scale: 1,
		desc: "Percent of time over the past sample period during which GPU Encoder was used",
		part: func(u core.Usage) core.OptionalUint64 { return u.Encoder },
	},
	{
		key: "Decoder utilization", unit: "%", scale: 1,
		desc: "Percent of time over the past sample period during which GPU Decoder was used",
		part: func(u core.Usage) core.OptionalUint64 { return u.Decoder },
	},
	{
		key: "Temperature", unit: "C", scale: 1,
		desc: "Temperature of the Unit",
		part: func(u core.Usage) core.OptionalUint64 { return u.Temperature },
	},
	{
		key: summary, unit: "MiB", scale: 1 << 20,
		desc:  "UsedMemory / TotalMemory",
		part:  func(u core.Usage) core.OptionalUint64 { return u.MemoryUsed },
		whole: func(u core.Usage) core.OptionalUint64 { return u.MemoryTotal },
	},
	{
		key: "BAR1 buffer state", unit: "MiB", scale: 1 << 20,
		desc:  "UsedBAR1 / TotalBAR1",
		part:  func(u core.Usage) core.OptionalUint64 { return u.BAR1Used },
		whole: func(u core.Usage) core.OptionalUint64 { return u.BAR1Total },
	},
	{
		key: "ECC L1 errors", unit: "#", scale: 1,
		desc: "Requested L1Cache error counter for the device",
		part: func(u core.Usage) core.OptionalUint64 { return u.ECCL1 },
	},
	{
		key: "ECC L2 errors", unit: "#", scale: 1,
		desc: "Requested L2Cache error counter for the device",
		part: func(u core.Usage) core.OptionalUint64 { return u.ECCL2 },
	},
	{
		key: "ECC memory errors", unit: "#", scale: 1,
		desc: "Requested memory error counter for the device",
		part: func(u core.Usage) core.OptionalUint64 { return u.ECCMemory },
	},
}

// value is the statistic of one device, "N/A" if the part or the whole is not known.
func (s statistic) value(u core.Usage) *structs.StatValue {
	v := &structs.StatValue{Unit: s.unit, Desc: s.desc}
	part, whole := s.part(u), core.OptionalUint64{OK: true}
	if s.whole != nil {
		whole = s.whole(u)
	}
	if !part.OK || !whole.OK {
		v.StringVal = new("N/A")
		return v
	}
	v.IntNumeratorVal = new(int64(part.Value / s.scale))
	if s.whole != nil {
		v.IntDenominatorVal = new(int64(whole.Value / s.scale))
	}
	return v
}
