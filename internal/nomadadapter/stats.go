package nomadadapter

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Bounds of the stats stream.
const (
	minInterval = time.Second     // between two readings
	maxSilence  = 5 * time.Second // between the request for a reading and a response, whether or not it is there
	maxUsageAge      = time.Minute     // of a reading that is sent while the next one is under way
)

// Stats streams live numbers and the health of every device offered, at once and then at interval, which is at least a
// second. A reading that takes longer is followed by the next one at once, so that numbers come as fast as the driver
// gives them. In between, once an interval, the last reading is sent again, up to a minute old: with the health of now
// and the time when the numbers were read.
//
// What can't be read is "N/A", also when the driver does not answer at all: an error would make
// Nomad stop asking for up to half an hour, an end for ever.
func (p *Plugin) Stats(ctx context.Context, interval time.Duration) (<-chan *device.StatsResponse, error) {
	out := make(chan *device.StatsResponse)
	go p.stats(ctx, max(interval, minInterval), out)
	return out, nil
}

func (p *Plugin) stats(ctx context.Context, interval time.Duration, out chan<- *device.StatsResponse) {
	s := sampler{plugin: p, answers: make(chan reading, 1)}
	defer s.readers.Wait()
	tick, silence := time.NewTicker(interval), time.NewTimer(interval)
	defer tick.Stop()
	defer silence.Stop()
	for due := true; ; {
		if due && !s.asking {
			due = false
			s.ask(ctx)
			silence.Reset(min(interval, maxSilence))
		}
		select {
		case <-tick.C:
			due = true
			continue
		case r := <-s.answers:
			s.asking, s.last = false, r
		case <-silence.C:
			if !s.asking {
				continue // the next reading is about to be due
			}
		case <-ctx.Done():
			return
		}
		select {
		case out <- s.sample(ctx):
			silence.Reset(interval)
		case <-ctx.Done():
			return
		}
	}
}

// reading is an answer of a source, by the life that it belongs to.
type reading struct {
	life  *run
	usage []core.Usage
	err   error
	at    time.Time // when it was done
}

// sampler is one stats stream: what it has asked for and what it remembers.
type sampler struct {
	plugin  *Plugin
	readers sync.WaitGroup
	answers chan reading // capacity 1, and at most one is asked for: answering never blocks
	asking  bool
	last    reading
	groups  []*device.DeviceGroupStats // of the last response that had any, without numbers
	failing bool
}

// ask asks for a reading. It takes as long as the driver does: one that is given up after a while would never arrive.
func (s *sampler) ask(ctx context.Context) {
	s.asking = true
	l := s.plugin.currentRun()
	s.readers.Go(func() {
		turns := watchdogOf(l.source).Register("statistics")
		defer turns.Done()
		turns.Heartbeat(0) // the driver need not answer
		ctx, cancel := withDone(ctx, l.done)
		defer cancel()
		usage, err := l.source.Usage(ctx)
		s.answers <- reading{l, usage, err, time.Now()}
	})
}

var errNoReading = errors.New("the driver takes too long to answer")

// current is the last reading, as far as it still counts.
func (s *sampler) current(l *run) ([]core.Usage, error) {
	switch {
	case s.last.life == nil, s.asking && time.Since(s.last.at) > maxUsageAge:
		return nil, errNoReading
	case s.last.life != l: // of devices that are read by another source now, which will answer soon
		return nil, nil
	}
	return s.last.usage, s.last.err
}

// sample is the response now. Nomad keeps showing the previous numbers when it gets none at all, so
// the groups of devices that have all gone are sent empty.
func (s *sampler) sample(ctx context.Context) *device.StatsResponse {
	p, l := s.plugin, s.plugin.currentRun()
	usage, err := s.current(l)
	if failing := err != nil && ctx.Err() == nil; failing != s.failing {
		s.failing = failing
		p.log.Info("device statistics", "available", !failing, "error", err)
	}
	if p.names.recalled() != nil {
		return &device.StatsResponse{Groups: s.groups} // a sample gives no names before those of earlier are known
	}
	inv := l.source.Current()
	groups := groupStats(inv, p.names.of(inv, l.settings.GroupBy), usage, time.Now())
	if len(groups) == 0 {
		return &device.StatsResponse{Groups: s.groups}
	}
	s.groups = nil
	for _, g := range groups {
		s.groups = append(s.groups, newGroupStats(g.Type, g.Name))
	}
	return &device.StatsResponse{Groups: groups}
}

// groupStats gives the numbers of every unit of inv, in the groups of its fingerprint. The units of a shared device
// have the numbers of the device.
func groupStats(inv *core.Inventory, given assignment, usage []core.Usage, now time.Time) []*device.DeviceGroupStats {
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

// deviceStats sets every field: the nomad command panics at a device without statistics or time. The time is that of the
// numbers; of a device without any, which has its health only, it is now.
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
