package deviceplugin

import (
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// replicaSharing is how the device of a replica is shared: the ID of a replica does not have more.
const replicaSharing = "shared"

// holderOf is the holder of a device ID of a resource, whose work and placement are not known here.
func holderOf(k deviceKey) holders.Holder {
	h := holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes}, API: inventory.DevicePlugin, Resource: k.resource, Unit: k.id}
	device, replica := k.id.Split()
	if h.Device = device; replica {
		h.Sharing = replicaSharing
	}
	return h
}

// wanted is the holder that a pod would be of a unit.
func wanted(u *inventory.Unit) holders.Holder {
	h := holders.Holder{API: inventory.DevicePlugin, Resource: kubeadapter.ResourceOf(*u), Unit: u.ID, Device: u.Device.ID, At: u.Device.At}
	if u.Sharing.Mode != inventory.Exclusive {
		h.Sharing = replicaSharing
	}
	return h
}

// holders are the pods that have, or may have, device IDs, in the order of resources and IDs: by the kubelet's list; else by its checkpoint; else it
// is not known which.
func (a *allocations) holders() (all []holders.Holder) {
	for _, k := range slices.SortedFunc(a.held(), compareKeys) {
		all = append(all, a.byKey[k].holders(k)...)
	}
	return all
}

func (a allocation) holders(k deviceKey) (all []holders.Holder) {
	h := holderOf(k)
	h.At = a.at
	for _, pod := range a.pods {
		h.Work.Namespace, h.Work.Name, _ = strings.Cut(pod, "/")
		all = append(all, h)
	}
	if len(all) > 0 {
		return all
	}
	for _, c := range a.checkpointed {
		h.Work.ID, h.Work.Container = c.uid, c.container
		all = append(all, h)
	}
	if len(all) > 0 {
		return all
	}
	return []holders.Holder{h}
}

// withheld returns the units of an inventory that must not be allocated, with the reason: a pod has, or may have, their device under
// another resource.
func (a *allocations) withheld(inv *inventory.Allocatable) map[inventory.UnitID]string {
	if a.unread {
		return nil
	}
	held := holders.NewSet(holders.Record{Holders: a.holders()}.Locate(inv.Placements()).Holders)
	reasons := map[inventory.UnitID]string{}
	var last, reason string // of the device and resource before: its replicas have the same reason
	for u := range inv.Units() {
		want := wanted(&u)
		if this := want.Resource + " " + string(want.Device) + " " + want.Sharing; this != last {
			last, reason = this, ""
			if h, ok := held.Conflict(want); ok {
				reason = "by " + h.Work.String() + " under " + h.Resource
			}
		}
		if reason != "" {
			reasons[u.ID] = reason
		}
	}
	return reasons
}

// holder names the pods that have a device, for the operators of the node.
func (a allocation) holder() string {
	var names []string
	for _, h := range a.holders(deviceKey{}) {
		names = append(names, h.Work.String())
	}
	return strings.Join(slices.Compact(names), " and ")
}

// retained returns the IDs that are not in an inventory and stay listed, as unhealthy devices by resource.
func (a *allocations) retained(inv *inventory.Allocatable) map[string][]listedDevice {
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

// equivalent reports whether two allocations lead to the same device list of any inventory, and to the same messages.
func (a *allocations) equivalent(b *allocations) bool {
	return a.unread == b.unread && maps.EqualFunc(a.byKey, b.byKey, allocation.equivalent)
}
