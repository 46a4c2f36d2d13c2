package deviceplugin

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

const (
	answerAge  = 10 * time.Second // of the kubelet's latest complete answer, for the holders of a GPU to be known
	requestAge = 3 * time.Second  // of the same, for another reading
	recordAge  = time.Second      // of a reading for owners
)

// Record returns which pods have devices through device plugins. It waits as Claims does.
func (p *Plugins) Record() holders.Record {
	p.awaitCalls()
	r := p.complete()
	r.MayHaveEnded = r.Never
	return p.withHolders(r)
}

// Holders returns the pods that have, or may have, devices through device plugins. It makes no query, and waits for nothing.
func (p *Plugins) Holders() []holders.Holder { return p.withHolders(holders.Record{}).Holders }

// withHolders returns a record with the pods that have, or may have, device IDs.
func (p *Plugins) withHolders(r holders.Record) holders.Record {
	r.Holders = p.tracker.holders()
	return r.Locate(p.src.Current().Placements())
}

// Claims returns what the kubelet lists of the claims of pods, of all drivers, and a record without holders: whether that is known to be complete.
// It waits until an Allocate or a Prepare that is under way, perhaps by an earlier inventory, is recorded.
func (p *Plugins) Claims() ([]podresources.Claim, holders.Record) {
	p.awaitCalls()
	return p.pods.Latest().Claims, p.complete()
}

// awaitCalls waits until an Allocate or a Prepare that is under way is recorded.
func (p *Plugins) awaitCalls() {
	p.opts.Lock.Lock()
	defer p.opts.Lock.Unlock()
}

// holders are the pods that have, or may have, device IDs, in the order of resources and IDs.
func (t *tracker) holders() (all []holders.Holder) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.allocations.holders()
}

// locate adds where the devices are that pods have: a device stays there until its pod has ended, listed or not.
func (t *tracker) locate(r *holders.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range r.Holders {
		h := &r.Holders[i]
		if one, known := t.allocations.byKey[deviceKey{h.Resource, h.Unit}]; known && h.API == inventory.DevicePlugin {
			h.At = one.at
		}
	}
}

// began adds since when pods have devices.
func (t *tracker) began(r *holders.Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, one := range t.allocations.byKey {
		if device, _ := k.id.Split(); !one.ended {
			r.Began(device, one.heldSince)
		}
	}
}

// ListsPods reports whether the kubelet's list of pods can be read: its socket is configured, and the folder of the socket is there, or was.
func (p *Plugins) ListsPods() bool { return !p.pods.Absent() || !p.pods.Latest().AnsweredAt.IsZero() }

// complete returns a record without holders: whether the kubelet listed all pods just now. It requests a reading if that was a while ago.
func (p *Plugins) complete() holders.Record {
	if !p.ListsPods() {
		return holders.Record{
			First: true, Never: true,
			Missing: "the kubelet's list of pods, which is not read: set --pod-resources-socket, and mount its folder",
		}
	}
	r, now := p.pods.Latest(), time.Now()
	if now.Sub(r.CompleteAt) > requestAge {
		p.pods.Request()
	}
	return completeAt(r, now)
}

// completeAt is what a reading shows at a time of whether all pods with devices are known.
func completeAt(r podresources.Reading, now time.Time) holders.Record {
	h := holders.Record{First: !r.AnsweredAt.IsZero()}
	switch {
	case !r.CompleteAt.IsZero() && now.Sub(r.CompleteAt) <= answerAge:
		h.Complete = true
	case r.Err != nil:
		h.Missing = "the kubelet's list of pods: " + r.Err.Error()
	default:
		h.Missing = "the kubelet's complete list of pods: it may lack some for two minutes after its start"
	}
	return h
}

// PodClaims reads what pods have through resource claims now: what was prepared, unprepared or read before the call is in the answer. complete
// means that no pod is missing.
func (p *Plugins) PodClaims(ctx context.Context) (claims []podresources.Claim, complete bool, err error) {
	r := p.pods.Read(ctx)
	return r.Answer.Claims, r.Complete, r.Stale(ctx)
}

// UseRecord reads which work has devices, as a usage.Holders. podLogs is a folder such as podresources.PodLogs. Added to what the kubelet lists
// are those that it does not: ordinary init containers, and pods that are just being admitted or have just ended.
func (p *Plugins) UseRecord(ctx context.Context, inv *inventory.Allocatable, podLogs string) (holders.Record, error) {
	r := p.pods.Fresh(ctx, recordAge)
	if err := r.Stale(ctx); err != nil {
		return holders.Record{}, err
	}
	p.tracker.apply(r)
	record := r.Record(inv, podLogs)
	p.tracker.locate(&record)
	for _, h := range p.tracker.holders() {
		if h.Work.Name == "" {
			record.Holders = append(record.Holders, h)
		}
	}
	p.tracker.began(&record)
	return record, nil
}
