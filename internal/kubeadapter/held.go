package kubeadapter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// unitKey is a device ID of a resource, by which the kubelet keeps its books.
type unitKey struct {
	resource string
	id       core.UnitID
}

func keyOf(u core.Unit) unitKey { return unitKey{ResourceOf(u), u.ID} }

func compareKeys(a, b unitKey) int {
	return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.id, b.id))
}

// conflicts reports whether a pod that holds k must keep u from new work: they are the same hardware, offered
// differently. Units that share a device in one resource do not conflict.
func (k unitKey) conflicts(u core.Unit) bool {
	switch device, shared := k.id.Split(); device {
	case u.Device.ID:
		return k.resource != ResourceOf(u) || shared != (u.Sharing.Mode != core.Exclusive)
	case u.Device.At.GPU: // u is an instance of the GPU that is held
		return true
	default:
		return false
	}
}

// grant is what is remembered of a device ID that a pod got and may still hold.
type grant struct {
	numaNode int
	at       time.Time // of the latest Allocate; zero = before this agent started
	gone     time.Time // since when it is not offered; zero = it is
}

// holdings are what is known of the device IDs that pods hold. They are immutable; nil knows nothing.
type holdings struct {
	grants map[unitKey]grant
	pods   map[unitKey]string // who holds, as the kubelet said; nil = it can't be asked

	// checked are the units that were offered when the kubelet last said which pods hold what: any other unit may
	// be of a device that a pod got under another name since. nil = the kubelet is not asked.
	checked map[unitKey]bool
}

// reading is what holdings change by.
type reading struct {
	now        time.Time
	offered    map[unitKey]int      // NUMA nodes of the units that were offered before the kubelet was asked
	ready      bool                 // the driver answers: what is not offered has left
	ours       map[string]bool      // resources that this agent serves; others may be another plugin's
	answer     *podresources.Answer // nil = none
	partial    bool                 // the answer may lack pods
	unreadable bool                 // no answer is to be expected
}

// maxGrants bounds what is remembered. A node with 16 GPUs in seven instances that ten pods share each has 1,120.
const maxGrants = 4096

// after returns the holdings after a reading.
func (h *holdings) after(r reading, p holdPace) *holdings {
	next := &holdings{grants: maps.Clone(h.grants), pods: h.pods, checked: h.checked}
	switch {
	case r.answer != nil:
		next.pods = map[unitKey]string{}
		if r.partial {
			maps.Copy(next.pods, h.pods)
		} else {
			next.checked = keysOf(r.offered)
		}
		for _, d := range r.answer.Devices {
			k := unitKey{d.Resource, core.UnitID(d.ID)}
			next.pods[k] = d.Pod
			if _, known := next.grants[k]; !known && r.ours[d.Resource] {
				next.grants[k] = grant{numaNode: d.NUMANode}
			}
		}
	case r.unreadable:
		next.pods, next.checked = nil, keysOf(r.offered)
	}
	complete := r.answer != nil && !r.partial
	for k, g := range next.grants {
		numa, offered := r.offered[k]
		switch {
		case offered:
			g.gone, g.numaNode = time.Time{}, numa
		case g.gone.IsZero() && r.ready:
			g.gone = r.now
		}
		next.grants[k] = g
		_, held := next.pods[k]
		free := complete && r.now.Sub(g.at) >= p.inFlight
		late := !g.gone.IsZero() && r.now.Sub(g.gone) >= p.keep
		if !held && (free || late) {
			delete(next.grants, k)
		}
	}
	next.limit()
	return next
}

// limit drops what has been gone longest, if there is too much.
func (h *holdings) limit() {
	if len(h.grants) <= maxGrants {
		return
	}
	var gone []unitKey
	for k, g := range h.grants {
		if _, held := h.pods[k]; !held && !g.gone.IsZero() {
			gone = append(gone, k)
		}
	}
	slices.SortFunc(gone, func(a, b unitKey) int {
		return cmp.Or(h.grants[a].gone.Compare(h.grants[b].gone), compareKeys(a, b))
	})
	for _, k := range gone[:min(len(gone), len(h.grants)-maxGrants)] {
		delete(h.grants, k)
	}
}

// granted returns the holdings after units were handed out.
func (h *holdings) granted(now time.Time, units []core.Unit) *holdings {
	next := *h
	next.grants = maps.Clone(h.grants)
	for _, u := range units {
		next.grants[keyOf(u)] = grant{numaNode: u.Device.NUMANode, at: now}
	}
	return &next
}

// withheld says why units of an inventory must not be given to new work: a pod holds their device under another name,
// or may hold it and the kubelet has not said yet.
func (h *holdings) withheld(inv *core.Inventory) map[core.UnitID]string {
	if h == nil || h.pods == nil && h.checked == nil {
		return nil
	}
	held, suspects := byDevice(maps.Keys(h.pods)), map[core.DeviceID][]unitKey(nil)
	why := map[core.UnitID]string{}
	for u := range inv.Units() {
		if k, ok := against(held, u); ok {
			why[u.ID] = fmt.Sprintf("by pod %s under %s", h.pods[k], k.resource)
			continue
		}
		if h.checked == nil || h.checked[keyOf(u)] {
			continue
		}
		if suspects == nil {
			all := maps.Clone(h.checked)
			for k := range h.grants {
				all[k] = true
			}
			suspects = byDevice(maps.Keys(all))
		}
		if k, ok := against(suspects, u); ok {
			why[u.ID] = "perhaps, by a pod under " + k.resource + ": the kubelet is being asked"
		}
	}
	return why
}

// vanished are the listings of IDs that pods hold or may hold, and that are in no list any more, by resource.
func (h *holdings) vanished(lists map[string][]listing) map[string][]listing {
	if h == nil {
		return nil
	}
	listed := map[unitKey]bool{}
	for resource, list := range lists {
		for _, l := range list {
			listed[unitKey{resource, l.id}] = true
		}
	}
	gone := map[string][]listing{}
	for k, g := range h.grants {
		if !listed[k] {
			gone[k.resource] = append(gone[k.resource], listing{id: k.id, numaNode: g.numaNode})
		}
	}
	for _, list := range gone {
		slices.SortFunc(list, func(a, b listing) int { return cmp.Compare(a.id, b.id) })
	}
	return gone
}

// notes say in a line per resource which IDs are listed only because pods hold them.
func (h *holdings) notes(gone map[string][]listing) []string {
	var notes []string
	for _, resource := range slices.Sorted(maps.Keys(gone)) {
		names := make([]string, len(gone[resource]))
		for i, l := range gone[resource] {
			names[i] = string(l.id)
			switch pod := h.pods[unitKey{resource, l.id}]; {
			case pod != "":
				names[i] += " (pod " + pod + ")"
			case h.pods == nil:
				names[i] += " (since it was given to a pod; the kubelet can't be asked whether one holds it)"
			}
		}
		notes = append(notes, fmt.Sprintf("no longer offered as %s, and still listed there as unhealthy because pods may hold it: %s",
			resource, strings.Join(names, ", ")))
	}
	return notes
}

func keysOf(offered map[unitKey]int) map[unitKey]bool {
	keys := make(map[unitKey]bool, len(offered))
	for k := range offered {
		keys[k] = true
	}
	return keys
}

// byDevice sorts keys by the device that they name, those of a device in order.
func byDevice(keys func(func(unitKey) bool)) map[core.DeviceID][]unitKey {
	of := map[core.DeviceID][]unitKey{}
	for _, k := range slices.SortedFunc(keys, compareKeys) {
		device, _ := k.id.Split()
		of[device] = append(of[device], k)
	}
	return of
}

// against is the first key that conflicts with a unit.
func against(of map[core.DeviceID][]unitKey, u core.Unit) (unitKey, bool) {
	for _, device := range []core.DeviceID{u.Device.ID, u.Device.At.GPU} {
		for _, k := range of[device] {
			if k.conflicts(u) {
				return k, true
			}
		}
	}
	return unitKey{}, false
}
