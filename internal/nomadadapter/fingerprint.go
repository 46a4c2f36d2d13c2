package nomadadapter

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
)

// firstFingerprintTimeout bounds how long the first fingerprint waits for a driver that is there and does not answer yet.
// A new client does not register before it is sent, and gives up on it after 50 s (client/node_updater.go);
// after a crash Nomad goes on with the devices of the process before, so that an early list without them
// takes them from the node. A node without a driver does not wait.
const firstFingerprintTimeout = 5 * time.Second

// fingerprintInterval is the least time between two fingerprints: each makes the servers write to raft and evaluate the
// node. What changes meanwhile goes out as one at its end.
const fingerprintInterval = time.Second

// Fingerprint streams what the node offers: at once, and then whenever it differs, but for what comes
// within a second of the last. The stream ends with ctx and never before; a machine without a driver is
// an empty list.
func (p *Plugin) Fingerprint(ctx context.Context) (<-chan *device.FingerprintResponse, error) {
	out := make(chan *device.FingerprintResponse)
	go p.fingerprint(ctx, out)
	return out, nil
}

// fingerprint follows one life after the other. It leaves out open: its end means the end of the devices
// to Nomad.
func (p *Plugin) fingerprint(ctx context.Context, out chan<- *device.FingerprintResponse) {
	f := fingerprinter{names: &p.names, out: out}
	for ctx.Err() == nil {
		l := p.currentRun()
		bound, cancel := withDone(ctx, l.done)
		first, stop := context.WithTimeout(bound, firstFingerprintTimeout)
		awaitFirstSnapshot(first, l.source)
		p.awaitNames(first)
		stop()
		f.by = l.settings.GroupBy
		f.follow(bound, l.source)
		cancel()
		if p.currentRun() == l { // it has no successor: the process is about to end
			<-ctx.Done()
		}
	}
}

// awaitNames waits until the names that were announced before are known, or ctx ends.
func (p *Plugin) awaitNames(ctx context.Context) {
	recalled := p.names.recalled()
	if recalled == nil {
		return
	}
	select {
	case <-recalled:
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			p.log.Error("the names of groups that were announced before are not read yet and nothing is offered without them: does the disk hang?")
		}
	}
}

// fingerprinter is one stream and what it has sent.
type fingerprinter struct {
	names  *groupNamer
	by     GroupBy
	out    chan<- *device.FingerprintResponse
	last   *device.FingerprintResponse // nil before the first
	rested <-chan time.Time            // nil unless the last was sent a moment ago

	writing <-chan struct{}  // closed when it was tried to write the names of what is to be sent; nil = it need not wait
	enough  <-chan time.Time // when it waits for that no longer
	waited  <-chan struct{}  // the latest writing
}

// follow sends what src offers until ctx ends. While Nomad does not read, what waits to be sent is replaced
// by what is newer.
func (f *fingerprinter) follow(ctx context.Context, src Source) {
	latest := make(chan *core.Inventory)
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() {
		for inv := range src.Watch(ctx) {
			select {
			case latest <- inv:
			case <-ctx.Done():
			}
		}
	})
	turns := watchdogOf(src).Register("fingerprint")
	defer turns.Done()
	var next *device.FingerprintResponse // nil = there is nothing to say
	var inv *core.Inventory              // the latest
	recalled := f.names.recalled()
	for {
		turns.Heartbeat(0) // Nomad need not read, and nothing need happen
		out := f.out
		if next == nil || f.rested != nil || f.writing != nil {
			out = nil
		}
		select {
		case inv = <-latest:
			next = f.news(inv)
		case <-recalled:
			if recalled = nil; inv != nil {
				next = f.news(inv)
			}
		case <-f.writing:
			f.writing, f.enough = nil, nil
		case <-f.enough:
			f.writing, f.enough = nil, nil
		case out <- next:
			f.last, next = next, nil
			f.rested = time.After(fingerprintInterval)
		case <-f.rested:
			f.rested = nil
		case <-ctx.Done():
			return
		}
	}
}

// news is what there is to say about inv: nil if it is what was sent last. A driver that has not answered yet
// does not take back what was sent before. Before the names are known that were announced earlier nothing is offered: under
// another name Nomad would take a device for free.
func (f *fingerprinter) news(inv *core.Inventory) *device.FingerprintResponse {
	if f.last != nil && inv.Driver().State == core.DriverPending {
		return nil
	}
	if f.names.recalled() != nil {
		if f.last != nil {
			return nil
		}
		return device.NewFingerprint()
	}
	next := device.NewFingerprint(groups(inv, f.names.of(inv, f.by))...)
	f.await(f.names.written())
	if f.last != nil && reflect.DeepEqual(next.Devices, f.last.Devices) {
		return nil
	}
	return next
}

// await has what is to be sent wait until its names were written, for a while only, and once only for each writing.
func (f *fingerprinter) await(written <-chan struct{}) {
	if written == nil || written == f.waited {
		return
	}
	if f.waited, f.writing = written, written; f.enough == nil {
		f.enough = time.After(maxSaveWait)
	}
}
