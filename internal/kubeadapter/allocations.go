package kubeadapter

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// deviceKey is a device ID of a resource, as the kubelet's checkpoint names it.
type deviceKey struct {
	resource string
	id       inventory.UnitID
}

func keyOf(u inventory.Unit) deviceKey { return deviceKey{ResourceOf(u), u.ID} }

func compareKeys(a, b deviceKey) int {
	return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.id, b.id))
}

// conflicts reports whether u must not be allocated while a pod holds k: both are the same hardware, offered in different
// ways. Units that share a device in one resource do not conflict.
func (k deviceKey) conflicts(u inventory.Unit) bool {
	switch device, shared := k.id.Split(); device {
	case u.Device.ID:
		return k.resource != ResourceOf(u) || shared != (u.Sharing.Mode != inventory.Exclusive)
	case u.Device.At.GPU: // u is an instance of the GPU that the pod holds
		return true
	default:
		return false
	}
}

// allocation is a device ID that was allocated to a pod, which may still hold it.
type allocation struct {
	numaNode    int
	allocatedAt time.Time // of the latest Allocate; zero = before this agent started
	withdrawnAt time.Time // since when the ID is not offered; zero = it is offered
}

// allocations are the device IDs that pods hold or may hold. They are immutable but for byKey, which the tracker reads and
// changes under its lock: a copy would make an Allocate cost more the more pods there are.
type allocations struct {
	byKey map[deviceKey]allocation
	pods  map[deviceKey]string // "namespace/name" by what the pod holds, from the kubelet; nil = unavailable

	claims []podresources.Claim // of containers; nil = unavailable

	// verified are the units that were offered when the kubelet last listed all pods: the device of any other unit may
	// have been allocated under another resource since. nil = the kubelet is not queried.
	verified map[deviceKey]int // with their NUMA nodes
}

// update is the input of allocations.apply.
type update struct {
	now         time.Time
	offered     map[deviceKey]int    // NUMA nodes of the units that were offered before the query
	driverReady bool                 // units that are not offered were withdrawn
	served      map[string]bool      // resources of this agent; others may be another plugin's
	answer      *podresources.Answer // nil = none
	partial     bool                 // answer may lack pods
	unavailable bool                 // no answer is expected
}

// maxAllocations limits the memory of allocations. A node with 16 GPUs of seven instances that ten pods share each has 1,120.
const maxAllocations = 4096

// apply returns the allocations after an update.
func (a *allocations) apply(u update, t trackerTimings) *allocations {
	next := &allocations{byKey: maps.Clone(a.byKey), pods: a.pods, verified: a.verified, claims: a.claims}
	switch {
	case u.answer != nil:
		next.pods = map[deviceKey]string{}
		if u.partial {
			maps.Copy(next.pods, a.pods)
		} else {
			next.verified, next.claims = u.offered, nil
		}
		next.claims = append(slices.Clone(next.claims), u.answer.Claims...)
		for _, d := range u.answer.Devices {
			k := deviceKey{d.Resource, inventory.UnitID(d.ID)}
			next.pods[k] = d.Pod
			if _, known := next.byKey[k]; !known && u.served[d.Resource] {
				next.byKey[k] = allocation{numaNode: d.NUMANode}
			}
		}
	case u.unavailable:
		next.pods, next.verified, next.claims = nil, u.offered, nil
	}
	complete := u.answer != nil && !u.partial
	for k, one := range next.byKey {
		numaNode, offered := u.offered[k]
		switch {
		case offered:
			one.withdrawnAt, one.numaNode = time.Time{}, numaNode
		case one.withdrawnAt.IsZero() && u.driverReady:
			one.withdrawnAt = u.now
		}
		next.byKey[k] = one
		_, held := next.pods[k]
		released := complete && u.now.Sub(one.allocatedAt) >= t.allocateToList
		expired := !one.withdrawnAt.IsZero() && u.now.Sub(one.withdrawnAt) >= t.retention
		if !held && (released || expired) {
			delete(next.byKey, k)
		}
	}
	next.limit()
	return next
}

// limit deletes the allocations that were withdrawn first, if there are more than maxAllocations.
func (a *allocations) limit() {
	if len(a.byKey) <= maxAllocations {
		return
	}
	var withdrawn []deviceKey
	for k, one := range a.byKey {
		if _, held := a.pods[k]; !held && !one.withdrawnAt.IsZero() {
			withdrawn = append(withdrawn, k)
		}
	}
	slices.SortFunc(withdrawn, func(x, y deviceKey) int {
		return cmp.Or(a.byKey[x].withdrawnAt.Compare(a.byKey[y].withdrawnAt), compareKeys(x, y))
	})
	for _, k := range withdrawn[:min(len(withdrawn), len(a.byKey)-maxAllocations)] {
		delete(a.byKey, k)
	}
}

// add adds an Allocate. It reports whether the key is new.
func (a *allocations) add(k deviceKey, numaNode int, now time.Time) bool {
	_, known := a.byKey[k]
	a.byKey[k] = allocation{numaNode: numaNode, allocatedAt: now}
	return !known
}

// withheld returns the units of an inventory that must not be allocated, with the reason: a pod holds their device under
// another resource, or may hold it until the kubelet has answered.
func (a *allocations) withheld(inv *inventory.Inventory) map[inventory.UnitID]string {
	if a.pods == nil && a.verified == nil {
		return nil
	}
	held, unverified := byDevice(maps.Keys(a.pods)), map[gpu.DeviceID][]deviceKey(nil)
	reasons := map[inventory.UnitID]string{}
	for u := range inv.Units() {
		if k, ok := conflictOf(held, u); ok {
			reasons[u.ID] = "by pod " + a.pods[k] + " under " + k.resource
			continue
		}
		if _, ok := a.verified[keyOf(u)]; ok || a.verified == nil {
			continue
		}
		if unverified == nil {
			all := maps.Clone(a.verified)
			for k := range a.byKey {
				all[k] = 0
			}
			unverified = byDevice(maps.Keys(all))
		}
		if k, ok := conflictOf(unverified, u); ok {
			reasons[u.ID] = "possibly by a pod under " + k.resource + ": waiting for the kubelet's list of pods"
		}
	}
	return reasons
}

// retained returns the allocations whose IDs are not in an inventory, as unhealthy devices by resource.
func (a *allocations) retained(inv *inventory.Inventory) map[string][]listedDevice {
	var keys []deviceKey
	for k := range a.byKey {
		if u, ok := inv.Unit(k.id); !ok || ResourceOf(u) != k.resource || !ofDevicePlugin(u.API) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, compareKeys)
	retained := map[string][]listedDevice{}
	for _, k := range keys {
		retained[k.resource] = append(retained[k.resource], listedDevice{id: k.id, numaNode: a.byKey[k].numaNode})
	}
	return retained
}

// equivalent reports whether two allocations lead to the same offer of any inventory.
func (a *allocations) equivalent(b *allocations) bool {
	sameNode := func(x, y allocation) bool { return x.numaNode == y.numaNode }
	return maps.EqualFunc(a.byKey, b.byKey, sameNode) && maps.Equal(a.pods, b.pods) &&
		maps.Equal(a.verified, b.verified) && (a.verified == nil) == (b.verified == nil)
}

// byDevice groups keys by device, those of a device in order. Of the replicas of a device in one resource, which conflict with the
// same units, it has the first one.
func byDevice(keys iter.Seq[deviceKey]) map[gpu.DeviceID][]deviceKey {
	type use struct {
		device   gpu.DeviceID
		shared   bool
		resource string
	}
	first := map[use]deviceKey{}
	for k := range keys {
		u := use{resource: k.resource}
		u.device, u.shared = k.id.Split()
		if other, ok := first[u]; !ok || k.id < other.id {
			first[u] = k
		}
	}
	groups := map[gpu.DeviceID][]deviceKey{}
	for _, k := range slices.SortedFunc(maps.Values(first), compareKeys) {
		device, _ := k.id.Split()
		groups[device] = append(groups[device], k)
	}
	return groups
}

// conflictOf returns the first key that conflicts with a unit.
func conflictOf(groups map[gpu.DeviceID][]deviceKey, u inventory.Unit) (deviceKey, bool) {
	for _, device := range []gpu.DeviceID{u.Device.ID, u.Device.At.GPU} {
		for _, k := range groups[device] {
			if k.conflicts(u) {
				return k, true
			}
		}
	}
	return deviceKey{}, false
}
