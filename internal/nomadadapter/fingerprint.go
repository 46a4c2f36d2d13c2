package nomadadapter

import (
	"context"
	"reflect"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
)

// firstAnswer bounds how long the first fingerprint waits for the driver, so that it normally has the
// GPUs. The node can't register before it is sent.
const firstAnswer = 800 * time.Millisecond

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
	f := fingerprinter{out: out}
	for ctx.Err() == nil {
		l := p.now()
		bound, cancel := until(ctx, l.ended)
		first, stop := context.WithTimeout(bound, firstAnswer)
		settled(first, l.source)
		stop()
		for inv := range l.source.Watch(bound) {
			if f.send(bound, inv) {
				rest(bound, quiet)
			}
		}
		<-bound.Done()
		cancel()
		if p.now() == l { // it has no successor: the process is about to end
			<-ctx.Done()
		}
	}
}

// fingerprinter is one stream and what it has sent.
type fingerprinter struct {
	out  chan<- *device.FingerprintResponse
	any  bool
	last []*device.DeviceGroup
}

// send sends the groups of inv unless they are what was sent last. A driver that has not answered yet does
// not take back what was sent before.
func (f *fingerprinter) send(ctx context.Context, inv *core.Inventory) (sent bool) {
	if f.any && inv.Driver().State == core.DriverPending {
		return false
	}
	next := groups(inv)
	if f.any && reflect.DeepEqual(next, f.last) {
		return false
	}
	select {
	case f.out <- device.NewFingerprint(next...):
		f.any, f.last = true, next
		return true
	case <-ctx.Done():
		return false
	}
}

// rest waits for d or the end of ctx.
func rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
