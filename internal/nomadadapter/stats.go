package nomadadapter

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
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
	var began time.Time // of the read whose usage is sent first; zero = it was sent before
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
			s.reading, s.last, began = false, r, r.began
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
			p.counters.statsResponses.Add(1)
			if !began.IsZero() {
				p.counters.observe("Stats", time.Since(began))
				began = time.Time{}
			}
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
	began time.Time
	at    time.Time // the end of the read
}

// statsStream is one stream.
type statsStream struct {
	plugin  *Plugin
	readers sync.WaitGroup
	results chan usageResult // capacity 1 for at most one reader, so that it never blocks
	reading bool
	last    usageResult
	groups  statsGroups
	empty   []*device.DeviceGroupStats // the groups of the last response that had any, without devices
	failing bool
}

// read starts a read of the usage, without a timeout: with one a slow driver would never give a result.
func (s *statsStream) read(ctx context.Context) {
	s.reading = true
	r, began := s.plugin.currentRun(), time.Now()
	s.readers.Go(func() {
		task := watchdogOf(r.source).Register("statistics")
		defer task.Done()
		task.Heartbeat(0) // no timeout
		ctx, cancel := withDone(ctx, r.done)
		defer cancel()
		usage, err := r.source.Usage(ctx)
		s.results <- usageResult{r, usage, err, began, time.Now()}
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
	starting := r.source.Current().Driver().State == gpu.DriverPending // there are no statistics yet
	if failing := err != nil && ctx.Err() == nil && !starting; failing != s.failing {
		s.failing = failing
		p.log.Info("device statistics changed", "available", !failing, "error", err)
	}
	var groups []*device.DeviceGroupStats
	if p.names.loading() == nil {
		s.groups.update(&p.names, r.source.Current(), r.settings.GroupBy)
		groups = s.groups.stats(usage, time.Now())
	}
	if len(groups) == 0 {
		return &device.StatsResponse{Groups: s.empty}
	}
	s.empty = nil
	for _, g := range groups {
		s.empty = append(s.empty, newGroupStats(g.Type, g.Name, 0))
	}
	return &device.StatsResponse{Groups: groups}
}

// statsGroups is what responses have from an inventory. Most responses have the same as the previous one.
type statsGroups struct {
	allocatable *inventory.Allocatable
	by          config.GroupBy
	groups      []statsGroup
}

// statsGroup is one group: its devices, each with its units.
type statsGroup struct {
	groupType, name string
	devices         []statsDevice
	units           int
}

// statsDevice is units of a device that have one health, and so the same statistics.
type statsDevice struct {
	id     gpu.DeviceID
	health string
	units  []string
}

// update sets the groups to those of inv.
func (s *statsGroups) update(names *groupNamer, inv *inventory.Allocatable, by config.GroupBy) {
	if s.allocatable == inv && s.by == by {
		return
	}
	s.allocatable, s.by, s.groups = inv, by, newStatsGroups(names.groups(inv, by))
}

func newStatsGroups(groups []group) (all []statsGroup) {
	for _, g := range groups {
		next := statsGroup{groupType: g.key.groupType, name: g.name, units: len(g.units)}
		for i := range g.units {
			u := &g.units[i]
			if i == 0 || u.Device.ID != g.units[i-1].Device.ID || u.Health != g.units[i-1].Health { // else a replica
				next.devices = append(next.devices, statsDevice{id: u.Device.ID, health: u.Health.String()})
			}
			d := &next.devices[len(next.devices)-1]
			d.units = append(d.units, string(u.ID))
		}
		all = append(all, next)
	}
	return all
}

// stats returns the statistics of every unit. The units of a shared device have those of the device.
func (s *statsGroups) stats(usage []gpu.Usage, now time.Time) []*device.DeviceGroupStats {
	byDevice := make(map[gpu.DeviceID]*gpu.Usage, len(usage))
	for i := range usage {
		byDevice[usage[i].Device] = &usage[i]
	}
	var all []*device.DeviceGroupStats
	for _, g := range s.groups {
		stats := newGroupStats(g.groupType, g.name, g.units)
		for _, d := range g.devices {
			one := deviceStats(d.health, byDevice[d.id], now)
			for _, id := range d.units {
				stats.InstanceStats[id] = one
			}
		}
		all = append(all, stats)
	}
	return all
}

func newGroupStats(groupType, name string, units int) *device.DeviceGroupStats {
	return &device.DeviceGroupStats{
		Vendor: vendor, Type: groupType, Name: name,
		InstanceStats: make(map[string]*device.DeviceStats, units),
	}
}

// deviceStats sets every field: the nomad command panics at a device without statistics or timestamp. The timestamp is the
// time at which the usage was read, or now if there is none (nil).
func deviceStats(health string, u *gpu.Usage, now time.Time) *device.DeviceStats {
	if u == nil {
		u = &gpu.Usage{}
	}
	at := u.At
	if at.IsZero() {
		at = now
	}
	values := statistics(health, u)
	return &device.DeviceStats{Summary: values[memoryKey], Stats: &structs.StatObject{Attributes: values}, Timestamp: at}
}
