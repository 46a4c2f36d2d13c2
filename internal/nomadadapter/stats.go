package nomadadapter

import (
	"context"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Bounds of the stats stream: how often it samples at most, and how long one sample may wait for the
// driver.
const (
	minInterval = time.Second
	maxSample   = 5 * time.Second
)

// Stats streams live numbers and the health of every device offered, at once and then at interval, which is at least a
// second. What can't be read is "N/A", also when the driver does not answer at all: an error would make
// Nomad stop asking for up to half an hour, an end for ever.
func (p *Plugin) Stats(ctx context.Context, interval time.Duration) (<-chan *device.StatsResponse, error) {
	out := make(chan *device.StatsResponse)
	go p.stats(ctx, max(interval, minInterval), out)
	return out, nil
}

func (p *Plugin) stats(ctx context.Context, interval time.Duration, out chan<- *device.StatsResponse) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var s sampler
	for {
		select {
		case out <- s.sample(ctx, p, interval):
		case <-ctx.Done():
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// sampler is what one stats stream remembers.
type sampler struct {
	last    []*device.DeviceGroupStats // the groups of the last sample that had any, without numbers
	failing bool
}

// sample reads the machine once. Nomad keeps showing the previous numbers when it gets none at all, so
// the groups of devices that have all gone are sent empty.
func (s *sampler) sample(ctx context.Context, p *Plugin, interval time.Duration) *device.StatsResponse {
	l := p.now()
	src := l.source
	turns := pulseOf(src).Join("statistics")
	defer turns.Leave()
	turns.Beat(maxSample)
	bound, cancel := context.WithTimeout(ctx, min(interval, maxSample))
	defer cancel()
	usage, err := src.Usage(bound)
	if failing := err != nil && ctx.Err() == nil; failing != s.failing {
		s.failing = failing
		p.log.Info("device statistics", "available", !failing, "error", err)
	}
	if p.names.recalled() != nil {
		return &device.StatsResponse{Groups: s.last} // a sample gives no names before those of earlier are known
	}
	inv := src.Current()
	groups := groupStats(inv, p.names.of(inv, l.settings.GroupBy), usage, time.Now())
	if len(groups) == 0 {
		return &device.StatsResponse{Groups: s.last}
	}
	s.last = nil
	for _, g := range groups {
		s.last = append(s.last, newGroupStats(g.Type, g.Name))
	}
	return &device.StatsResponse{Groups: groups}
}

// groupStats gives the numbers of every unit of inv, in the groups of its fingerprint. The units of a shared device
// have the numbers of the device.
func groupStats(inv *core.Inventory, given naming, usage []core.Usage, now time.Time) []*device.DeviceGroupStats {
	of := make(map[core.DeviceID]core.Usage, len(usage))
	for _, u := range usage {
		of[u.Device] = u
	}
	var gs []*device.DeviceGroupStats
	for _, b := range bundles(inv, given) {
		g := newGroupStats(b.groupType, b.name)
		var last *device.DeviceStats
		for i, u := range b.units {
			if i == 0 || u.Device.ID != b.units[i-1].Device.ID || u.Health != b.units[i-1].Health {
				last = deviceStats(u.Health, of[u.Device.ID], now)
			}
			g.InstanceStats[string(u.ID)] = last
		}
		gs = append(gs, g)
	}
	return gs
}

func newGroupStats(groupType, name string) *device.DeviceGroupStats {
	return &device.DeviceGroupStats{
		Vendor: vendor, Type: groupType, Name: name,
		InstanceStats: map[string]*device.DeviceStats{},
	}
}

// deviceStats sets every field: the nomad command panics at a device without statistics or time.
func deviceStats(h core.Health, u core.Usage, now time.Time) *device.DeviceStats {
	values := make(map[string]*structs.StatValue, len(statistics)+1)
	values[healthKey] = &structs.StatValue{StringVal: new(h.String()), Desc: "Health of the device, with what is wrong and what to do"}
	for _, s := range statistics {
		values[s.key] = s.value(u)
	}
	return &device.DeviceStats{
		Summary:   values[summary],
		Stats:     &structs.StatObject{Attributes: values},
		Timestamp: now,
	}
}
