package deviceplugin

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// deviceKey is a device ID of a resource, as the kubelet's checkpoint names it.
type deviceKey struct {
	resource string
	id       inventory.UnitID
}

func keyOf(u inventory.Unit) deviceKey { return deviceKey{kubeadapter.ResourceOf(u), u.ID} }

func compareKeys(a, b deviceKey) int {
	return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.id, b.id))
}

// allocation is a device ID that a pod has or may have.
//
// It begins with an Allocate of this agent, with the kubelet's list of pods, or with its checkpoint. It ends with evidence that the pod has
// ended. The list does not have ordinary init containers, and the checkpoint has pods that ended until the kubelet writes it again:
//
//	listed by a kubelet, and missing in a complete list of the same one        the pod has ended
//	missing in a complete list, and then in two versions of the checkpoint     the pod has ended: one version may have been made before
//	                                                                           the kubelet recorded the allocation, and be written late
//	neither, and the ID is not offered, for the time of retention              nothing is known; the pod is taken for ended
type allocation struct {
	numaNode    int
	at          gpu.Placement // of the device, as it was when it was allocated or first listed; the zero value = not known
	stays       bool          // while a pod may have it the ID stays listed, also when it is not offered: an agent has allocated it
	allocatedAt time.Time     // of the latest Allocate; zero = before this agent started
	heldSince   time.Time     // of the latest Allocate, also before this agent started; zero = not known
	withdrawnAt time.Time     // since when the ID is not offered; zero = it is offered
	seenAt      time.Time     // the latest evidence that a pod has it

	pods         []string           // "namespace/name", by the latest list that has it
	listedBy     statefile.Identity // of the kubelet whose list had it last; zero = none since the Allocate
	checkpointed []podContainer     // by the latest checkpoint
	missing      time.Time          // when a complete list, or after it a version of the checkpoint, was the first without it; zero = the latest list has it
	versions     int                // of the checkpoint since then, one after the other, that do not have it
	ended        bool               // of the pods in checkpointed: no pod has it, and the kubelet has not written its checkpoint since
}

// podContainer is a container of a pod in the kubelet's checkpoint.
type podContainer struct{ uid, container string }

// certain reports whether it is known that a pod has it, and which, or that none has.
func (a allocation) certain() bool { return a.ended || len(a.pods) > 0 }

// kept reports whether it is stored for the next agent.
func (a allocation) kept() bool { return a.stays && !a.ended }

// equivalent reports whether two allocations lead to the same device list and the same messages.
func (a allocation) equivalent(b allocation) bool {
	return a.numaNode == b.numaNode && a.at == b.at && a.stays == b.stays && a.ended == b.ended && a.holder() == b.holder()
}

// allocations are the device IDs that pods have or may have. They are immutable but for byKey, which the tracker reads and
// changes under its lock: a copy would make an Allocate cost more the more pods there are.
type allocations struct {
	byKey      map[deviceKey]allocation
	checkpoint uint64 // version of the latest one
	unread     bool   // there is no pod-resources API: nothing shows the end of a pod, so nothing is withheld because of one
}

// update is the input of allocations.apply.
type update struct {
	now         time.Time
	offered     map[deviceKey]int // NUMA nodes of the units that were offered before the reading
	driverReady bool              // units that are not offered were withdrawn
	served      map[string]bool   // resources of this agent; others may be another plugin's
	reading     podresources.Reading
	unread      bool // see allocations

	placements func() map[gpu.DeviceID]gpu.Placement // of the devices that the driver lists
}

// maxAllocations limits the memory of allocations. A node with 16 GPUs of seven instances that ten pods share each has 1,120.
const maxAllocations = 4096

// apply returns the allocations after an update.
func (a *allocations) apply(u update, t trackerTimings) *allocations {
	next := &allocations{byKey: maps.Clone(a.byKey), checkpoint: a.checkpoint, unread: u.unread}
	if c := u.reading.Checkpoint; c.Version != a.checkpoint && u.reading.CheckpointErr == nil {
		next.applyCheckpoint(c, u.now)
	}
	if u.reading.Err == nil && !u.reading.AnsweredAt.IsZero() {
		next.applyAnswer(u)
	}
	for k, one := range next.byKey {
		numaNode, offered := u.offered[k]
		if one.at.GPU == "" {
			device, _ := k.id.Split()
			one.at = u.placements()[device]
		}
		switch {
		case offered:
			one.withdrawnAt, one.numaNode = time.Time{}, numaNode
		case one.withdrawnAt.IsZero() && u.driverReady:
			one.withdrawnAt = u.now
		}
		next.byKey[k] = one
		unknown := !one.certain() && !one.withdrawnAt.IsZero() && u.now.Sub(one.withdrawnAt) >= t.retention && u.now.Sub(one.seenAt) >= t.retention
		if one.versions >= 2 || unknown {
			delete(next.byKey, k)
		}
	}
	next.limit()
	return next
}

// applyCheckpoint applies a version of the kubelet's checkpoint.
func (a *allocations) applyCheckpoint(c podresources.Checkpoint, now time.Time) {
	a.checkpoint = c.Version
	has, numaNodes := map[deviceKey][]podContainer{}, map[deviceKey]int{}
	for _, d := range c.Devices {
		if k := (deviceKey{d.Resource, inventory.UnitID(d.ID)}); isOurs(k) {
			has[k] = append(has[k], podContainer{d.PodUID, d.Container})
			numaNodes[k] = d.NUMANode
		}
	}
	for k, containers := range has {
		one, known := a.byKey[k]
		if !known {
			one.numaNode = numaNodes[k]
		}
		other := slices.ContainsFunc(containers, func(c podContainer) bool { return !slices.Contains(one.checkpointed, c) })
		switch {
		case other: // of which no list has shown anything
			one.listedBy, one.missing, one.ended = statefile.Identity{}, time.Time{}, false
		case one.ended:
			continue
		}
		one.checkpointed, one.versions, one.seenAt = containers, 0, now
		a.byKey[k] = one
	}
	for k, one := range a.byKey {
		switch _, ok := has[k]; {
		case ok:
		case one.ended:
			delete(a.byKey, k)
		default:
			one.checkpointed = nil
			if !one.missing.IsZero() {
				one.missing, one.versions = now, one.versions+1
			}
			a.byKey[k] = one
		}
	}
}

// applyAnswer applies an answer of the kubelet.
func (a *allocations) applyAnswer(u update) {
	r := u.reading
	listed := map[deviceKey]bool{}
	for _, d := range r.Answer.Devices {
		k := deviceKey{d.Resource, inventory.UnitID(d.ID)}
		if !isOurs(k) {
			continue
		}
		one, known := a.byKey[k]
		if !known {
			one.numaNode = d.NUMANode
		}
		if !r.Began.After(one.allocatedAt) { // the pod before
			continue
		}
		if !listed[k] {
			one.pods = nil
		}
		listed[k] = true
		one.pods = append(slices.Clone(one.pods), d.Pod)
		one.listedBy, one.missing, one.versions, one.ended, one.seenAt = r.Kubelet, time.Time{}, 0, false, u.now
		one.stays = one.stays || u.served[k.resource]
		a.byKey[k] = one
	}
	if !r.Complete {
		return
	}
	for k, one := range a.byKey {
		if listed[k] || one.ended || !r.Began.After(one.allocatedAt) {
			continue
		}
		if one.pods = nil; one.missing.IsZero() {
			one.missing, one.versions = u.now, 0
		}
		a.byKey[k] = one
		if one.listedBy == r.Kubelet && r.Kubelet != (statefile.Identity{}) {
			a.end(k)
		}
	}
}

// end records that the pod has ended that had a device ID.
func (a *allocations) end(k deviceKey) {
	one := a.byKey[k]
	if len(one.checkpointed) == 0 {
		delete(a.byKey, k)
		return
	}
	one.ended, one.pods = true, nil
	a.byKey[k] = one
}

// isOurs reports whether a resource may be one of this agent, or of another plugin for the same hardware.
func isOurs(k deviceKey) bool { return strings.HasPrefix(k.resource, inventory.ResourceDomain) }

// awaitsCheckpoint reports whether the next version of the kubelet's checkpoint shows of an allocation whether the pod has ended. If it still
// has it after a while, the pod goes on; if there is none, the kubelet can't write it. Then the versions that it writes anyway are soon enough.
func (a *allocations) awaitsCheckpoint(now time.Time) bool {
	const while = 5 * time.Second
	for _, one := range a.byKey {
		if !one.certain() && !one.missing.IsZero() && now.Sub(one.missing) < while {
			return true
		}
	}
	return false
}

// limit deletes the allocations that were withdrawn first, if there are more than maxAllocations.
func (a *allocations) limit() {
	if len(a.byKey) <= maxAllocations {
		return
	}
	var withdrawn []deviceKey
	for k, one := range a.byKey {
		if len(one.pods) == 0 && !one.withdrawnAt.IsZero() {
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

// add adds an Allocate of a device. What was known of an earlier pod does not hold for the next one.
func (a *allocations) add(k deviceKey, d gpu.Device, now time.Time) {
	a.byKey[k] = allocation{
		numaNode: d.NUMANode, at: d.At, stays: true,
		allocatedAt: now, heldSince: now, seenAt: now, checkpointed: a.byKey[k].checkpointed,
	}
}

// held are the keys that pods have or may have.
func (a *allocations) held() iter.Seq[deviceKey] {
	return func(yield func(deviceKey) bool) {
		for k, one := range a.byKey {
			if !one.ended && !yield(k) {
				return
			}
		}
	}
}

// uncertain reports whether it is not known of a key whether a pod has it.
func (a *allocations) uncertain() bool {
	for _, one := range a.byKey {
		if !one.certain() {
			return true
		}
	}
	return false
}
