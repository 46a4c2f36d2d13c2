package nomadadapter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// firstFingerprintTimeout is how long the first fingerprint waits for a driver that is loaded and has not answered yet. A
// new client does not register before it is sent, and waits for at most 50 s (client/node_updater.go). After a crash Nomad
// continues with the devices of the previous process, which a fingerprint without them would remove from the node: the
// monitor lists the devices of the history before this time is over. A node without a driver does not wait.
const firstFingerprintTimeout = 5 * time.Second

// fingerprintInterval is the least time between two fingerprints: each one makes the servers write to raft and evaluate
// the node. Changes in between are sent as one fingerprint at its end.
const fingerprintInterval = time.Second

// settleTime is for how long a change of health descriptions alone waits for more of them: what a fault results in becomes known bit by bit. The
// client tells the servers 5 to 10 s after the first change since it last did (client/client.go watchNodeUpdates), so that these get one change
// and not two. A device that becomes unhealthy or healthy does not wait.
const settleTime = 2 * time.Second

// Fingerprint streams the devices of the node: now, and then each time they change, at most once in fingerprintInterval.
// The stream ends with ctx and never before; a node without a driver is an empty list.
func (p *Plugin) Fingerprint(ctx context.Context) (<-chan *device.FingerprintResponse, error) {
	out := make(chan *device.FingerprintResponse)
	p.streams.opened.Store(true)
	go p.fingerprint(ctx, out)
	return out, nil
}

// fingerprint sends the devices of one run after the other. It never closes out: Nomad would remove the devices.
func (p *Plugin) fingerprint(ctx context.Context, out chan<- *device.FingerprintResponse) {
	f := fingerprinter{names: &p.names, out: out, counters: &p.counters}
	for ctx.Err() == nil {
		r := p.currentRun()
		ctxRun, cancel := withDone(ctx, r.done)
		ctxFirst, stop := context.WithTimeout(ctxRun, firstFingerprintTimeout)
		awaitFirstSnapshot(ctxFirst, r.source)
		p.awaitNames(ctxFirst)
		stop()
		f.by = r.settings.GroupBy
		f.follow(ctxRun, r.source)
		cancel()
		if p.currentRun() == r { // no other run follows: the process is about to end
			<-ctx.Done()
		}
	}
}

// awaitNames waits until the group names of earlier processes are loaded, or ctx ends.
func (p *Plugin) awaitNames(ctx context.Context) {
	loaded := p.names.loading()
	if loaded == nil {
		return
	}
	select {
	case <-loaded:
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			p.log.Error("group name file not loaded, fingerprint has no devices: check whether the disk hangs")
		}
	}
}

// fingerprinter is one stream.
type fingerprinter struct {
	names   *groupNamer
	by      config.GroupBy
	out     chan<- *device.FingerprintResponse
	sent    []listing                   // the last fingerprint; nil before the first
	next    []listing                   // to be sent; nil = nothing changed
	message *device.FingerprintResponse // next as Nomad's type
	changed time.Time                   // when next first differed from sent
	pause   <-chan time.Time            // the end of fingerprintInterval; nil = over
	settle  <-chan time.Time            // the end of settleTime; nil = over, or next differs from sent in more than descriptions

	counters *counters

	saving      <-chan struct{}  // closed after the attempt to save the names in next; nil = next need not wait for it
	saveTimeout <-chan time.Time // after maxSaveWait
	lastSave    <-chan struct{}  // the last saving
}

// follow sends the groups of src until ctx ends. While Nomad does not read, a newer fingerprint replaces the one to be
// sent.
func (f *fingerprinter) follow(ctx context.Context, src Source) {
	latest := make(chan *inventory.Allocatable)
	var watcher sync.WaitGroup
	defer watcher.Wait()
	watcher.Go(func() {
		for inv := range src.Watch(ctx) {
			select {
			case latest <- inv:
			case <-ctx.Done():
			}
		}
	})
	task := watchdogOf(src).Register("fingerprint")
	defer task.Done()
	f.next = nil
	var inv *inventory.Allocatable // the latest
	loaded := f.names.loading()
	for {
		task.Heartbeat(0) // no timeout: Nomad may not read, and nothing may change
		out := f.out
		if f.next == nil || f.pause != nil || f.settle != nil || f.saving != nil {
			out = nil
		}
		select {
		case inv = <-latest:
			f.update(inv)
		case <-loaded:
			if loaded = nil; inv != nil {
				f.update(inv)
			}
		case <-f.saving:
			f.saving, f.saveTimeout = nil, nil
		case <-f.saveTimeout:
			f.saving, f.saveTimeout = nil, nil
		case out <- f.message:
			f.counters.fingerprinted(f.next, f.changed)
			f.sent, f.next, f.changed = f.next, nil, time.Time{}
			f.pause = time.After(fingerprintInterval)
		case <-f.pause:
			f.pause = nil
		case <-f.settle:
			f.settle = nil
		case <-ctx.Done():
			return
		}
	}
}

// update sets what is to be sent: nothing if the groups of inv were sent last, or if devices were sent before and the driver has not
// answered yet or devices are unhealthy for milliseconds. No devices are sent until the names of earlier processes are loaded: under another name Nomad
// would take an allocated device for a free one.
func (f *fingerprinter) update(inv *inventory.Allocatable) {
	f.next = nil
	if f.sent != nil && (inv.Driver().State == gpu.DriverPending || inv.AwaitsFirstPass()) {
		return
	}
	next := []listing{}
	if f.names.loading() == nil {
		next = newListings(inv, f.names.groups(inv, f.by))
		f.awaitSave(f.names.saveAttempt())
	} else if f.sent != nil {
		return
	}
	if f.sent != nil && slices.EqualFunc(next, f.sent, listing.equal) {
		f.changed, f.settle = time.Time{}, nil
		return
	}
	switch {
	case f.sent == nil || !slices.EqualFunc(next, f.sent, listing.equalButTexts):
		f.settle = nil
	case f.changed.IsZero():
		f.settle = time.After(settleTime)
	}
	if f.changed.IsZero() {
		f.changed = time.Now()
	}
	f.next, f.message = next, device.NewFingerprint()
	for _, l := range next {
		f.message.Devices = append(f.message.Devices, l.wire())
	}
}

// awaitSave delays the next fingerprint until its names are saved, for at most maxSaveWait and once for each attempt.
func (f *fingerprinter) awaitSave(attempt <-chan struct{}) {
	if attempt == nil || attempt == f.lastSave {
		return
	}
	if f.lastSave, f.saving = attempt, attempt; f.saveTimeout == nil {
		f.saveTimeout = time.After(maxSaveWait)
	}
}
