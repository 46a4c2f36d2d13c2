package storm

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// nomad is Nomad's side: the plugin behind real gRPC, a stream of fingerprints and one of statistics.
type nomad struct {
	w      *oneAgent
	plugin device.DevicePlugin

	mu      sync.Mutex
	groups  []*device.DeviceGroup
	streams map[string]context.CancelFunc // the open ones, by name
}

// newNomad starts the adapter and opens both streams.
func newNomad(t testing.TB, w *oneAgent) *nomad {
	source := func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return w.monitor }
	adapter := nomadadapter.New(w.ctx, "2.0.0", source, hclog.NewNullLogger())
	n := &nomad{w: w, plugin: nomadtest.Serve(t, adapter), streams: map[string]context.CancelFunc{}}
	must(t, n.fingerprint(), n.stats())
	return n
}

// open returns the context of a stream, and ends the earlier stream of that name.
func (n *nomad) open(name string) context.Context {
	ctx, cancel := context.WithCancel(n.w.ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	if last := n.streams[name]; last != nil {
		last()
	}
	n.streams[name] = cancel
	return ctx
}

// fingerprint opens the stream of fingerprints again.
func (n *nomad) fingerprint() error {
	ctx := n.open("fingerprint")
	stream, err := n.plugin.Fingerprint(ctx)
	if err != nil {
		return err
	}
	go func() {
		for r := range stream {
			if ctx.Err() != nil {
				continue
			}
			if r.Error != nil {
				n.w.fail("Nomad's fingerprint stream: %w", r.Error)
				continue
			}
			now := time.Now()
			n.mu.Lock()
			n.groups = r.Devices
			n.mu.Unlock()
			for id, u := range viewOf(r.Devices) {
				n.w.check("Nomad received", id, u.healthy, now)
			}
		}
		if ctx.Err() == nil {
			n.w.fail("Nomad's fingerprint stream has ended")
		}
	}()
	return nil
}

// statsLimit is the longest time between two messages of statistics: there is one each second, and the adapter waits for the driver no
// longer than that.
const statsLimit = 8 * time.Second

// stats opens the stream of statistics again.
func (n *nomad) stats() error {
	ctx := n.open("stats")
	stream, err := n.plugin.Stats(ctx, time.Second)
	if err != nil {
		return err
	}
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for late := n.w.late(statsLimit); ; {
			select {
			case r, open := <-stream:
				late = n.w.late(statsLimit)
				switch {
				case ctx.Err() != nil && !open:
					return
				case ctx.Err() != nil:
				case !open:
					n.w.fail("Nomad's stream of statistics has ended")
					return
				case r.Error != nil:
					n.w.fail("Nomad's stream of statistics: %w", r.Error)
				}
			case <-tick.C:
				if late() && ctx.Err() == nil {
					n.w.fail("Nomad had no statistics for %v", n.w.o.limit(statsLimit))
				}
			}
		}
	}()
	return nil
}

// view is what Nomad has now.
func (n *nomad) view() map[string]unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	return viewOf(n.groups)
}

func viewOf(groups []*device.DeviceGroup) map[string]unit {
	units := map[string]unit{}
	for _, g := range groups {
		for _, d := range g.Devices {
			units[d.ID] = unit{d.Healthy, g.Name}
		}
	}
	return units
}
