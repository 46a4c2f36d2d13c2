package nomadadapter

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Bounds of the stats stream.
const (
	minStatsInterval = time.Second     // between two reads of the usage
	maxStatsDelay    = 5 * time.Second // between the start of a read and a response, even if the read has not ended
	maxUsageAge      = time.Minute     // of the usage that is sent while the next read has not ended
)

// Stats streams the usage and the health of every device: now, and then at interval, which is at least minStatsInterval. A
// read of the usage that takes longer is followed by the next one immediately. Meanwhile the previous usage is sent at
// interval until it is maxUsageAge old: with the current health, and the time at which the usage was read.
//
// Unknown values are "N/A", also if the driver does not answer: after an error Nomad would read no statistics for up to
// half an hour, after the end of the stream none at all.
func (p *Plugin) Stats(ctx context.Context, interval time.Duration) (<-chan *device.StatsResponse, error) {
	out := make(chan *device.StatsResponse)
	go p.stats(ctx, max(interval, minStatsInterval), out)
	return out, nil
}

func (p *Plugin) stats(ctx context.Context, interval time.Duration, out chan<- *device.StatsResponse) {
	s := statsStream{plugin: p, results: make(chan usageResult, 1)}
	defer s.readers.Wait()
	ticker, delay := time.NewTicker(interval), time.NewTimer(interval)
	defer ticker.Stop()
	defer delay.Stop()
	for due := true; ; {
		if due && !s.reading {
			due = false
			s.read(ctx)
			delay.Reset(min(interval, maxStatsDelay))
		}
		select {
		case <-ticker.C:
			due = true
			continue
		case r := <-s.results:
			s.reading, s.last = false, r
		case <-delay.C:
			if !s.reading {
				continue // the next read is about to start
			}
		case <-ctx.Done():
			return
		}
		select {
		case out <- s.response(ctx):
			delay.Reset(interval)
		case <-ctx.Done():
			return
		}
	}
}

// usageResult is the result of Source.Usage.
type usageResult struct {
	run   *run // whose source was read
	usage []gpu.Usage
	err   error
	at    time.Time // the end of the read
}

// statsStream is one stream.
type statsStream struct {
	plugin  *Plugin
	readers sync.WaitGroup
	results chan usageResult // capacity 1 for at most one reader, so that it never blocks
	reading bool
	last    usageResult
	groups  []*device.DeviceGroupStats // of the last response that had any, without devices
	failing bool
}

// read starts a read of the usage, without a timeout: with one a slow driver would never give a result.
func (s *statsStream) read(ctx context.Context) {
	s.reading = true
	r := s.plugin.currentRun()
	s.readers.Go(func() {
		task := watchdogOf(r.source).Register("statistics")
		defer task.Done()
		task.Heartbeat(0) // no timeout
		ctx, cancel := withDone(ctx, r.done)
		defer cancel()
		usage, err := r.source.Usage(ctx)
		s.results <- usageResult{r, usage, err, time.Now()}
	})
}

var errUsageTimeout = errors.New("usage: driver has not answered")

// usage returns the last usage of r, unless it is too old.
func (s *statsStream) usage(r *run) ([]gpu.Usage, error) {
	switch {
	case s.last.run == nil, s.reading && time.Since(s.last.at) > maxUsageAge:
		return nil, errUsageTimeout
	case s.last.run != r: // the source of r was not read yet
		return nil, nil
	}
	return s.last.usage, s.last.err
}

// response returns the present response. Nomad ignores a response without groups and shows the previous one, so groups
// that have lost all their devices are sent without devices. While the saved group names are being loaded, there are none.
func (s *statsStream) response(ctx context.Context) *device.StatsResponse {
	p, r := s.plugin, s.plugin.currentRun()
	usage, err := s.usage(r)
	if failing := err != nil && ctx.Err() == nil; failing != s.failing {
		s.failing = failing
		p.log.Info("device statistics changed", "available", !failing, "error", err)
	}
	var groups []*device.DeviceGroupStats
	if p.names.loading() == nil {
		groups = groupStats(p.names.groups(r.source.Current(), r.settings.GroupBy), usage, time.Now())
	}
	if len(groups) == 0 {
		return &device.StatsResponse{Groups: s.groups}
	}
	s.groups = nil
	for _, g := range groups {
		s.groups = append(s.groups, newGroupStats(g.Type, g.Name))
	}
	return &device.StatsResponse{Groups: groups}
}

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
func statistics(h health.Health, u gpu.Usage) map[string]*structs.StatValue {
	return map[string]*structs.StatValue{
		healthKey:             {StringVal: new(h.String()), Desc: "Health of the device, with what is wrong and what to do"},
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

// groupStats returns the statistics of every unit. The units of a shared device have those of the device.
func groupStats(groups []group, usage []gpu.Usage, now time.Time) []*device.DeviceGroupStats {
	byDevice := make(map[gpu.DeviceID]gpu.Usage, len(usage))
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
func deviceStats(h health.Health, u gpu.Usage, now time.Time) *device.DeviceStats {
	at := u.At
	if at.IsZero() {
		at = now
	}
	values := statistics(h, u)
	return &device.DeviceStats{Summary: values[memoryKey], Stats: &structs.StatObject{Attributes: values}, Timestamp: at}
}
