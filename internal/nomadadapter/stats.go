package nomadadapter

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
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
	usage []core.Usage
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
func (s *statsStream) usage(r *run) ([]core.Usage, error) {
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
	if p.names.loading() != nil {
		return &device.StatsResponse{Groups: s.groups}
	}
	groups := groupStats(p.names.groups(r.source.Current(), r.settings.GroupBy), usage, time.Now())
	if len(groups) == 0 {
		return &device.StatsResponse{Groups: s.groups}
	}
	s.groups = nil
	for _, g := range groups {
		s.groups = append(s.groups, newGroupStats(g.Type, g.Name))
	}
	return &device.StatsResponse{Groups: groups}
}
