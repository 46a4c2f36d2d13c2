package nomadadapter

import (
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// statistic is one line of `nomad node status -stats`: a number, or a fraction.
type statistic struct {
	key, unit, desc string
	scale           uint64 // units of core.Usage in one unit of the statistic
	part            func(core.Usage) core.OptionalUint64
	whole           func(core.Usage) core.OptionalUint64 // nil = a number
}

// summary is the key of the statistic that the nomad command shows in short lists.
const summary = "Memory state"

// healthKey is the key of the health, a text: the nomad command does not show the description in the fingerprint.
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

// value returns the statistic of one device, "N/A" if the part or the whole is unknown.
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

// groupStats returns the statistics of every unit. The units of a shared device have those of the device.
func groupStats(groups []group, usage []core.Usage, now time.Time) []*device.DeviceGroupStats {
	byDevice := make(map[core.DeviceID]core.Usage, len(usage))
	for _, u := range usage {
		byDevice[u.Device] = u
	}
	var all []*device.DeviceGroupStats
	for _, g := range groups {
		stats := newGroupStats(g.key.groupType, g.name)
		var last *device.DeviceStats
		for i, u := range g.units {
			if i == 0 || u.Device.ID != g.units[i-1].Device.ID || u.Health != g.units[i-1].Health { // else a replica
				last = deviceStats(u.Health, byDevice[u.Device.ID], now)
			}
			stats.InstanceStats[string(u.ID)] = last
		}
		all = append(all, stats)
	}
	return all
}

func newGroupStats(groupType, name string) *device.DeviceGroupStats {
	return &device.DeviceGroupStats{
		Vendor: vendor, Type: groupType, Name: name,
		InstanceStats: map[string]*device.DeviceStats{},
	}
}

// deviceStats sets every field: the nomad command panics at a device without statistics or timestamp. The timestamp is the
// time at which the usage was read, or now if there is none.
func deviceStats(h core.Health, u core.Usage, now time.Time) *device.DeviceStats {
	at := u.At
	if at.IsZero() {
		at = now
	}
	values := make(map[string]*structs.StatValue, len(statistics)+1)
	values[healthKey] = &structs.StatValue{StringVal: new(h.String()), Desc: "Health of the device, with what is wrong and what to do"}
	for _, s := range statistics {
		values[s.key] = s.value(u)
	}
	return &device.DeviceStats{
		Summary:   values[summary],
		Stats:     &structs.StatObject{Attributes: values},
		Timestamp: at,
	}
}
