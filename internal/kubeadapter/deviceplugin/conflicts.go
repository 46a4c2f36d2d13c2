package deviceplugin

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// conflicts reports whether u must not be allocated while a pod holds k: both are the same hardware, offered in different
// ways. Units that share a device in one resource do not conflict.
func (k deviceKey) conflicts(u inventory.Unit) bool {
	switch device, shared := k.id.Split(); device {
	case u.Device.ID:
		return k.resource != kubeadapter.ResourceOf(u) || shared != (u.Sharing.Mode != inventory.Exclusive)
	case u.Device.At.GPU: // u is an instance of the GPU that the pod holds
		return true
	default:
		return false
	}
}

// withheld returns the units of an inventory that must not be allocated, with the reason: a pod has, or may have, their device under
// another resource.
func (a *allocations) withheld(inv *inventory.Inventory) map[inventory.UnitID]string {
	if a.unread {
		return nil
	}
	held := byDevice(a.held())
	reasons := map[inventory.UnitID]string{}
	for u := range inv.Units() {
		if k, ok := conflictOf(held, u); ok {
			reasons[u.ID] = "by " + a.byKey[k].holder() + " under " + k.resource
		}
	}
	return reasons
}

// holder names the pod that has a device, for the operators of the host.
func (a allocation) holder() string {
	switch {
	case len(a.pods) > 0:
		return "pod " + strings.Join(a.pods, " and pod ")
	case len(a.checkpointed) > 0:
		return "the pod with UID " + a.checkpointed[0].uid + " in the kubelet's checkpoint"
	}
	return "a pod that was admitted before, or just now"
}

// retained returns the IDs that are not in an inventory and stay listed, as unhealthy devices by resource.
func (a *allocations) retained(inv *inventory.Inventory) map[string][]listedDevice {
	var keys []deviceKey
	for k, one := range a.byKey {
		if u, ok := inv.Unit(k.id); one.kept() && (!ok || kubeadapter.ResourceOf(u) != k.resource || !ofDevicePlugin(u.API)) {
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

// describe lists retained IDs of a resource with the pods that have them.
func (a *allocations) describe(resource string, retained []listedDevice) string {
	ids := make([]string, len(retained))
	for i, d := range retained {
		one := a.byKey[deviceKey{resource, d.id}]
		switch ids[i] = string(d.id); {
		case len(one.pods) > 0:
			ids[i] += " (" + one.holder() + ")"
		case a.unread:
			ids[i] += " (allocated before; pod-resources API unavailable)"
		}
	}
	return strings.Join(ids, ", ")
}

// equivalent reports whether two allocations lead to the same offer of any inventory, and to the same messages.
func (a *allocations) equivalent(b *allocations) bool {
	return a.unread == b.unread && maps.EqualFunc(a.byKey, b.byKey, allocation.equivalent)
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
