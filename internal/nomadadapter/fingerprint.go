package nomadadapter

import (
	"context"
	"reflect"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
)

// firstAnswer bounds how long the first fingerprint waits for a driver that is there and does not answer yet.
// A new client does not register before it is sent, and gives up on it after 50 s (client/node_updater.go);
// after a crash Nomad goes on with the devices of the process before, so that an early list without them
// takes them from the node. A node without a driver does not wait.
const firstAnswer = 5 * time.Second

// quiet is the least time between two fingerprints: each makes the servers write to raft and evaluate the
// node. What changes meanwhile goes out as one at its end.
const quiet = time.Second

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
		l := p.now()
		bound, cancel := until(ctx, l.ended)
		first, stop := context.WithTimeout(bound, firstAnswer)
		settled(first, l.source)
		stop()
		f.by = l.settings.GroupBy
		f.follow(bound, l.source)
		cancel()
		if p.now() == l { // it has no successor: the process is about to end
			<-ctx.Done()
		}
	}
}

// fingerprinter is one stream and what it has sent.
type fingerprinter struct {
	names  *register
	by     GroupBy
	out    chan<- *device.FingerprintResponse
	last   *device.FingerprintResponse // nil before the first
	rested <-chan time.Time            // nil unless the last was sent a moment ago
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
	turns := pulseOf(src).Join("fingerprint")
	defer turns.Leave()
	var next *device.FingerprintResponse // nil = there is nothing to say
	for {
		turns.Beat(0) // Nomad need not read, and nothing need happen
		out := f.out
		if next == nil || f.rested != nil {
			out = nil
		}
		select {
		case inv := <-latest:
			next = f.news(inv)
		case out <- next:
			f.last, next = next, nil
			f.rested = time.After(quiet)
		case <-f.rested:
			f.rested = nil
		case <-ctx.Done():
			return
		}
	}
}

// news is what there is to say about inv: nil if it is what was sent last. A driver that has not answered yet
// does not take back what was sent before.
func (f *fingerprinter) news(inv *core.Inventory) *device.FingerprintResponse {
	if f.last != nil && inv.Driver().State == core.DriverPending {
		return nil
	}
	next := device.NewFingerprint(groups(inv, f.names.of(inv, f.by))...)
	if f.last != nil && reflect.DeepEqual(next.Devices, f.last.Devices) {
		return nil
	}
	return next
}
