package deviceplugin

import (
	"context"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
)

const (
	answerAge  = 10 * time.Second // of the kubelet's latest complete answer, for the holders of a GPU to be known
	requestAge = 3 * time.Second  // of the same, for another reading
	recordAge  = time.Second      // of a reading for owners
)

// Record reads which pods have GPUs through device plugins, for the moves of GPUs between APIs. It waits as Claims does.
func (a *Adapter) Record() assignment.Record {
	a.awaitGiven()
	return a.tracker.devicePluginHolders(a.known())
}

// Claims returns what the kubelet lists of the claims of pods, of all drivers, and whether that is known to be complete. It waits until
// what was being given out, perhaps by an earlier inventory, is recorded.
func (a *Adapter) Claims() ([]podresources.Claim, assignment.Holders) {
	a.awaitGiven()
	return a.pods.Latest().Claims, a.known()
}

func (a *Adapter) awaitGiven() {
	a.opts.Lock.Lock()
	defer a.opts.Lock.Unlock()
}

// Holder returns a pod that has, or may have, hardware of a placement through a device plugin. It makes no query.
func (a *Adapter) Holder(at gpu.Placement) (holder string, held bool) {
	t := a.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range slices.SortedFunc(t.allocations.held(), compareKeys) {
		device, _ := k.id.Split()
		for d := range t.source.Current().Hardware() {
			if d.ID == device && d.At.Overlaps(at) {
				return t.allocations.byKey[k].holder(), true
			}
		}
	}
	return "", false
}

func (t *tracker) devicePluginHolders(h assignment.Holders) assignment.Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	inv := t.source.Current()
	by := map[gpu.DeviceID][]string{}
	for k := range t.allocations.held() {
		device, _ := k.id.Split()
		holder := t.allocations.byKey[k].holder()
		if of, ok := inv.PhysicalGPU(device); ok {
			by[of] = append(by[of], holder)
		} else {
			h.Known, h.Why = false, "the end of "+holder+", whose device "+string(k.id)+" is not known to the driver"
		}
	}
	return assignment.NewRecord(h, by)
}

// ListsPods reports whether the kubelet's list of pods can be read: its socket is configured, and the folder of the socket is there, or was.
func (a *Adapter) ListsPods() bool { return !a.pods.Absent() || !a.pods.Latest().AnsweredAt.IsZero() }

// known returns whether the kubelet listed all pods just now. It requests a reading if that was a while ago.
func (a *Adapter) known() assignment.Holders {
	if !a.ListsPods() {
		return assignment.Holders{First: true, Never: true, Why: "the kubelet's list of pods, which is not read: set --pod-resources-socket, and mount its folder"}
	}
	r, now := a.pods.Latest(), time.Now()
	if now.Sub(r.CompleteAt) > requestAge {
		a.pods.Request()
	}
	return knownAt(r, now)
}

// knownAt is what a reading shows at a time of whether all pods with devices are known.
func knownAt(r podresources.Reading, now time.Time) assignment.Holders {
	h := assignment.Holders{First: !r.AnsweredAt.IsZero()}
	switch {
	case !r.CompleteAt.IsZero() && now.Sub(r.CompleteAt) <= answerAge:
		h.Known = true
	case r.Err != nil:
		h.Why = "the kubelet's list of pods: " + r.Err.Error()
	default:
		h.Why = "the kubelet's complete list of pods: it may lack some for two minutes after its start"
	}
	return h
}

// PodClaims reads what pods have through resource claims now: what was prepared, unprepared or read before the call is in the answer. complete
// means that no pod is missing.
func (a *Adapter) PodClaims(ctx context.Context) (claims []podresources.Claim, complete bool, err error) {
	r := a.pods.Read(ctx)
	return r.Answer.Claims, r.Complete, r.Stale(ctx)
}

// UseRecord reads which work has devices, as a usage.Holders. podLogs is a folder such as podresources.PodLogs.
func (a *Adapter) UseRecord(ctx context.Context, inv *inventory.Inventory, podLogs string) (use.Record, error) {
	r := a.pods.Fresh(ctx, recordAge)
	if err := r.Stale(ctx); err != nil {
		return use.Record{}, err
	}
	a.tracker.apply(r)
	record := r.Record(inv, podLogs)
	record.Holds = append(record.Holds, a.tracker.unlisted()...)
	return record, nil
}

// unlisted are the device IDs that pods may have and the kubelet does not list: those of ordinary init containers, and of pods that are just being
// admitted or have just ended.
func (t *tracker) unlisted() (holds []use.Hold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.allocations.held() {
		one := t.allocations.byKey[k]
		if len(one.pods) > 0 {
			continue
		}
		device, _ := k.id.Split()
		hold := use.Hold{Owner: use.Owner{Orchestrator: use.Kubernetes}, Resource: k.resource, Unit: k.id, Device: device}
		for _, c := range one.checkpointed {
			hold.Owner.ID, hold.Owner.Container = c.uid, c.container
			holds = append(holds, hold)
		}
		if len(one.checkpointed) == 0 {
			holds = append(holds, hold)
		}
	}
	return holds
}
