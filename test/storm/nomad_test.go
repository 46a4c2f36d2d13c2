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

// nomad is Nomad's side: the plugin behind real gRPC, a fingerprint stream and one of numbers.
type nomad struct {
	w      *storm
	plugin device.DevicePlugin

	mu      sync.Mutex
	groups  []*device.DeviceGroup
	streams map[string]context.CancelFunc // the open ones, by name
}

// newNomad starts the adapter and opens both streams.
func newNomad(ctx context.Context, t testing.TB, w *storm) *nomad {
	source := func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return w.monitor }
	adapter := nomadadapter.New(ctx, "2.0.0", source, hclog.NewNullLogger())
	n := &nomad{w: w, plugin: nomadtest.Serve(t, adapter), streams: map[string]context.CancelFunc{}}
	must(t, n.fingerprint(), n.stats())
	return n
}

// open is the context of a stream; the one before it of that name ends.
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

// fingerprint opens the stream of devices anew.
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
				n.w.wrong("Nomad's fingerprint stream: %w", r.Error)
				continue
			}
			now := time.Now()
			n.mu.Lock()
			n.groups = r.Devices
			n.mu.Unlock()
			for id, u := range viewOf(r.Devices) {
				n.w.judge("Nomad is told", id, u.healthy, now)
			}
		}
		if ctx.Err() == nil {
			n.w.wrong("Nomad's fingerprint stream has ended")
		}
	}()
	return nil
}

// silent is how long a stream of numbers may be without any: it has them each second, and waits for the driver
// no longer than that.
const silent = 8 * time.Second

// stats opens the stream of numbers anew.
func (n *nomad) stats() error {
	ctx := n.open("stats")
	stream, err := n.plugin.Stats(ctx, time.Second)
	if err != nil {
		return err
	}
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for late := n.w.late(silent); ; {
			select {
			case r, open := <-stream:
				late = n.w.late(silent)
				switch {
				case ctx.Err() != nil && !open:
					return
				case ctx.Err() != nil:
				case !open:
					n.w.wrong("Nomad's stream of numbers has ended")
					return
				case r.Error != nil:
					n.w.wrong("Nomad's stream of numbers: %w", r.Error)
				}
			case <-tick.C:
				if late() && ctx.Err() == nil {
					n.w.wrong("Nomad has had no numbers for %v", n.w.o.patient(silent))
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
