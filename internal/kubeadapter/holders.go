package kubeadapter

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

const (
	answerAge  = 10 * time.Second // of the kubelet's latest complete answer, for the holders of a GPU to be known
	requestAge = 3 * time.Second  // of the same, for another query
)

// Record reads which pods have GPUs through device plugins, for the moves of GPUs between APIs. It waits as Claims does.
func (a *Adapter) Record() assignment.Record {
	a.awaitGiven()
	return a.tracker.devicePluginHolders()
}

// Claims returns what the kubelet lists of the claims of pods, of all drivers, and whether that is known to be complete. It waits until
// what was being given out, perhaps by an earlier inventory, is recorded.
func (a *Adapter) Claims() ([]podresources.Claim, assignment.Holders) {
	a.awaitGiven()
	t := a.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.allocations.claims, t.known() // the slice is replaced, never changed
}

func (a *Adapter) awaitGiven() {
	if lock := a.opts.Lock; lock != nil {
		lock.Lock()
		defer lock.Unlock()
	}
}

// Holder returns a pod that has, or may have, hardware of a placement through a device plugin. It makes no query.
func (a *Adapter) Holder(at gpu.Placement) (holder string, held bool) {
	t := a.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.allocations.keys() {
		device, _ := k.id.Split()
		for d := range t.source.Current().Hardware() {
			if d.ID == device && d.At.Overlaps(at) {
				return t.allocations.holderOf(k), true
			}
		}
	}
	return "", false
}

// keys are what pods hold or may hold, in order.
func (a *allocations) keys() []deviceKey {
	all := slices.AppendSeq(slices.Collect(maps.Keys(a.byKey)), maps.Keys(a.pods))
	all = slices.DeleteFunc(all, func(k deviceKey) bool { return !strings.HasPrefix(k.resource, vendor) })
	slices.SortFunc(all, compareKeys)
	return slices.Compact(all)
}

func (a *allocations) holderOf(k deviceKey) string {
	if pod := a.pods[k]; pod != "" {
		return "pod " + pod
	}
	return "a pod that got " + string(k.id) + " before, or just now"
}

func (t *tracker) devicePluginHolders() assignment.Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	h, inv := t.known(), t.source.Current()
	by := map[gpu.DeviceID][]string{}
	for _, k := range t.allocations.keys() {
		device, _ := k.id.Split()
		holder := t.allocations.holderOf(k)
		if of, ok := inv.PhysicalGPU(device); ok {
			by[of] = append(by[of], holder)
		} else {
			h.Known, h.Why = false, "the end of "+holder+", whose device "+string(k.id)+" is not known to the driver"
		}
	}
	return assignment.NewRecord(h, by)
}

// known returns whether the kubelet listed all pods just now. It requests a query if that was a while ago. The caller holds mu.
func (t *tracker) known() assignment.Holders {
	if t.socket == "" {
		return assignment.Holders{First: true, Never: true, Why: "the kubelet's list of pods, which is not read: set --pod-resources-socket"}
	}
	now := time.Now()
	if now.Sub(t.complete) > requestAge {
		t.requestQuery()
	}
	first := !t.answered.IsZero()
	if !t.complete.IsZero() && now.Sub(t.complete) <= answerAge {
		return assignment.Holders{Known: true, First: first}
	}
	if t.unavailable {
		return assignment.Holders{First: first, Why: "the kubelet's list of pods: " + t.socket + " does not answer"}
	}
	return assignment.Holders{First: first, Why: "the kubelet's complete list of pods: it may lack some for two minutes after its start"}
}
