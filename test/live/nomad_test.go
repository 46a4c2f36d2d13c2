package live

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/hashicorp/nomad/plugins/device"
)

// nomad is a Nomad client that records what it receives. A plugin may end and be started again.
type nomad struct {
	mu       sync.Mutex
	plugin   device.DevicePlugin
	streams  int // opened so far
	received []fingerprint
	changed  chan struct{} // closed and replaced with each fingerprint
}

// fingerprint is one message of a stream.
type fingerprint struct {
	stream int // counted from 1
	groups []*device.DeviceGroup
	err    error
}

func newNomad() *nomad { return &nomad{changed: make(chan struct{})} }

// follow opens the stream of a plugin, which gets the calls from now on.
func (n *nomad) follow(ctx context.Context, p device.DevicePlugin) error {
	stream, err := p.Fingerprint(ctx)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.plugin = p
	n.streams++
	number := n.streams
	n.mu.Unlock()
	go func() {
		for r := range stream {
			n.mu.Lock()
			n.received = append(n.received, fingerprint{number, r.Devices, r.Error})
			close(n.changed)
			n.changed = make(chan struct{})
			n.mu.Unlock()
		}
	}()
	return nil
}

// fingerprints are all so far, oldest first.
func (n *nomad) fingerprints() []fingerprint {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.received)
}

// last is the latest fingerprint; zero if there is none.
func (n *nomad) last() (f fingerprint) {
	if all := n.fingerprints(); len(all) > 0 {
		f = all[len(all)-1]
	}
	return f
}

// await waits until ok holds for the latest fingerprint.
func (n *nomad) await(ctx context.Context, ok func(fingerprint) bool) error {
	for {
		n.mu.Lock()
		changed := n.changed
		n.mu.Unlock()
		if ok(n.last()) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *nomad) reserve(ids ...string) (*device.ContainerReservation, error) {
	n.mu.Lock()
	p := n.plugin
	n.mu.Unlock()
	return p.Reserve(ids)
}

// health is each device's health, by ID.
func (f fingerprint) health() map[string]bool {
	health := map[string]bool{}
	for _, g := range f.groups {
		for _, d := range g.Devices {
			health[d.ID] = d.Healthy
		}
	}
	return health
}

// names are the groups of all devices, by ID.
func (f fingerprint) names() map[string]string {
	names := map[string]string{}
	for _, g := range f.groups {
		for _, d := range g.Devices {
			names[d.ID] = g.Name
		}
	}
	return names
}

// group is the group of a device.
func (f fingerprint) group(t testing.TB, id string) *device.DeviceGroup {
	t.Helper()
	for _, g := range f.groups {
		if slices.ContainsFunc(g.Devices, func(d *device.Device) bool { return d.ID == id }) {
			return g
		}
	}
	t.Fatalf("Nomad does not have %s", id)
	return nil
}

func (f fingerprint) device(t testing.TB, id string) *device.Device {
	t.Helper()
	g := f.group(t, id)
	return g.Devices[slices.IndexFunc(g.Devices, func(d *device.Device) bool { return d.ID == id })]
}

// check makes the checks of Nomad's client.
func (f fingerprint) check() error {
	if f.err != nil {
		return f.err
	}
	seen := map[string]string{}
	for _, g := range f.groups {
		if err := g.Validate(); err != nil {
			return err
		}
		for _, d := range g.Devices {
			if other, twice := seen[d.ID]; twice {
				return fmt.Errorf("%s is in %q and in %q", d.ID, other, g.Name)
			}
			seen[d.ID] = g.Name
		}
	}
	return nil
}
