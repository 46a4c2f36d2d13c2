package deviceplugin

import (
	"fmt"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// listedDevice is a device of a ListAndWatch response. It is comparable, so that equal lists are not sent twice.
type listedDevice struct {
	id       inventory.UnitID
	healthy  bool
	numaNode int // -1 = no affinity
}

// deviceList is what the kubelet is sent for all resources and may allocate: an inventory, corrected by what pods hold. It is immutable.
type deviceList struct {
	allocatable *inventory.Allocatable    // with units as unhealthy whose device a pod holds under another resource
	byResource  map[string][]listedDevice // the units in canonical order, then the retained IDs
	retained    map[string]string         // by resource: the IDs that are not in the inventory, with the pods that may hold them
	withheld    bool                      // inventory differs from that of the source
}

func newDeviceList(inv *inventory.Allocatable, a *allocations) *deviceList {
	withheld := a.withheld(inv)
	l := &deviceList{allocatable: inv.Withhold(withheld), retained: map[string]string{}, withheld: len(withheld) > 0}
	if !isFromHistory(inv) {
		l.byResource = listDevices(l.allocatable)
	}
	for resource, list := range a.retained(inv) {
		l.retained[resource] = a.describe(resource, list)
		if !inv.Provisional() { // else the missing units may follow
			l.byResource[resource] = slices.Concat(l.byResource[resource], list)
		}
	}
	return l
}

// isFromHistory reports whether an inventory has the devices of the health history, because the driver has not answered
// yet. The kubelet gets no list of these: it keeps the devices of an agent that has ended, and an ID that a pod has may
// be missing.
func isFromHistory(inv *inventory.Allocatable) bool {
	return inv.Driver().State == gpu.DriverPending && inv.Len() > 0
}

// listDevices returns the units of an inventory by resource, in canonical order.
func listDevices(inv *inventory.Allocatable) map[string][]listedDevice {
	size := map[string]int{} // by pool
	for u := range inv.Devices() {
		if !ofDevicePlugin(u.API) {
			continue
		}
		size[u.Pool] += max(u.Sharing.Replicas, 1)
	}
	lists := make(map[string][]listedDevice, len(size))
	var pool, resource string
	var list []listedDevice // of pool
	for u := range inv.Units() {
		if !ofDevicePlugin(u.API) {
			continue
		}
		if list == nil || u.Pool != pool {
			pool, resource = u.Pool, kubeadapter.ResourceOf(u)
			if list = lists[resource]; list == nil {
				list = make([]listedDevice, 0, size[pool])
			}
		}
		list = append(list, listedDevice{u.ID, u.Health.Schedulable(), u.Device.NUMANode})
		lists[resource] = list
	}
	return lists
}

// Schedulable returns the number of devices that take work, by resource, of those that an inventory offers to the kubelet.
func Schedulable(inv *inventory.Allocatable) map[string]int {
	units := map[string]int{}
	for resource, list := range listDevices(inv) {
		for _, d := range list {
			if d.healthy {
				units[resource]++
			}
		}
	}
	return units
}

// ofDevicePlugin reports whether units of an API are offered to the kubelet's device manager.
func ofDevicePlugin(a inventory.API) bool { return a == "" || a == inventory.DevicePlugin }

// dependsOnPods reports whether the list changes when a pod ends.
func (l *deviceList) dependsOnPods() bool { return l.withheld || len(l.retained) > 0 }

// retainedText is the message about the retained IDs of a resource.
const retainedText = "device IDs no longer offered, still listed as unhealthy because pods may hold them"

// problems returns one for each resource with retained IDs.
func (l *deviceList) problems() (all []problem.Problem) {
	for _, resource := range slices.Sorted(maps.Keys(l.retained)) {
		all = append(all, problem.Problem{Code: problem.Retained, Object: resource, Text: fmt.Sprintf("%s: %s: %s", resource, retainedText, l.retained[resource])})
	}
	return all
}

// markRemoved returns next and, as unhealthy, the devices that are healthy in sent and missing in next. removing reports
// whether there are any: kubelet 1.37 can panic if an ID that it is allocating is not in the next list. The core lists
// withdrawn units for a while, except a unit that moves to another resource with the same ID: a MIG instance
// in the place of another one, or a GPU that a new policy puts into another pool.
func markRemoved(sent, next []listedDevice) (list []listedDevice, removing bool) {
	if slices.EqualFunc(sent, next, func(a, b listedDevice) bool { return a.id == b.id }) {
		return next, false
	}
	stays := make(map[inventory.UnitID]bool, len(next))
	for _, d := range next {
		stays[d.id] = true
	}
	var removed []listedDevice
	for _, d := range sent {
		if d.healthy && !stays[d.id] {
			d.healthy = false
			removed = append(removed, d)
		}
	}
	return slices.Concat(next, removed), len(removed) > 0
}
