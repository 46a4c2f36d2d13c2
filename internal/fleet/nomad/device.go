package nomad

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

const vendor = "nvidia" // of device groups

// causeUnknown is the cause of a device that is unhealthy by a text that this program does not read: of another plugin, or of an older agent. Such a fault
// never counts, and the device is no free place.
const causeUnknown = "UNKNOWN"

// deviceOf returns the device of an instance: replicas of a device that is shared have its ID, "::" and a number.
func deviceOf(instance string) gpu.DeviceID {
	id, _, _ := strings.Cut(instance, "::")
	return gpu.DeviceID(id)
}

func hasGPUs(n *api.NodeListStub) bool {
	return n.NodeResources != nil && slices.ContainsFunc(n.NodeResources.Devices, func(d *api.NodeDeviceResource) bool { return d.Vendor == vendor })
}

// devicesOf returns the GPUs and MIG instances of a node, and their faults. The API does not show of which GPU a MIG instance is, but its PCI address.
func (t *translation) devicesOf(n *api.NodeListStub, name string) (devices []rescue.Device, faults []rescue.Fault) {
	at := placements(n, name)
	for _, group := range n.NodeResources.Devices {
		if group.Vendor != vendor {
			continue
		}
		kind, first := t.kindOf(group), len(devices)
		for _, instance := range group.Instances {
			id := deviceOf(instance.ID)
			i := slices.IndexFunc(devices[first:], func(d rescue.Device) bool { return d.ID == id })
			if i < 0 {
				devices = append(devices, rescue.Device{ID: id, At: at[id], Kind: kind, Healthy: true})
				i = len(devices) - 1 - first
			}
			d := &devices[first+i]
			d.Units++
			if !instance.Healthy && d.Healthy { // all replicas of a device have the same description
				d.Healthy = false
				faults = append(faults, faultOf(instance.HealthDescription, d.At))
			}
		}
	}
	return devices, faults
}

// placements are where the devices of a node are. All MIG instances of one PCI address are of one GPU, so that they count as one for the budgets. Two of them
// share no hardware that a fault of one of them concerns.
func placements(n *api.NodeListStub, node string) map[gpu.DeviceID]gpu.Placement {
	at, instances := map[gpu.DeviceID]gpu.Placement{}, map[gpu.DeviceID]string{}
	whole := map[string]gpu.DeviceID{} // by PCI address
	for _, group := range n.NodeResources.Devices {
		for _, instance := range group.Instances {
			id, pci := deviceOf(instance.ID), ""
			if instance.Locality != nil {
				pci = instance.Locality.PciBusID
			}
			if isMIG(id) && pci != "" {
				instances[id] = pci
				continue
			}
			at[id] = gpu.WholeGPU(id)
			if pci != "" {
				whole[pci] = id
			}
		}
	}
	count := map[string]uint32{}
	for _, id := range slices.Sorted(maps.Keys(instances)) {
		pci := instances[id]
		at[id] = gpu.Placement{GPU: cmp.Or(whole[pci], gpu.DeviceID(node+"/"+pci)), GI: count[pci], CI: gpu.Whole}
		count[pci]++
	}
	return at
}

func isMIG(id gpu.DeviceID) bool { return strings.HasPrefix(string(id), "MIG-") }

// faultOf reads why a device is unhealthy.
func faultOf(text string, at gpu.Placement) rescue.Fault {
	d, ok := faultreport.ParseDescription(text)
	if !ok || d.Cause == "" {
		return rescue.Fault{At: at, State: health.Unhealthy, Cause: causeUnknown}
	}
	if !d.Since.IsZero() {
		d.Since = d.Since.Add(time.Minute - time.Second) // the text has the minute: it began at the end of it at the latest
	}
	return rescue.Fault{
		At: at, State: d.State, Repair: health.RepairOf(d.Cause), Cause: d.Cause, Since: d.Since, Simulated: d.Simulated, Advisory: d.Advisory,
	}
}

// request is what a job asks for of one device group.
type request struct {
	name        string // "gpu", "nvidia/gpu", "nvidia/gpu/NAME"
	constraints []*api.Constraint
	many        bool // more than one device, which Nomad takes from one group
}

// deviceRequests are those of all work that is followed, in order. Work of which no place is certain takes part in none.
func (r *reading) deviceRequests() (all []request) {
	for _, id := range keysInOrder(r.followed) {
		for _, s := range r.followed[id].specs {
			if s.unknown != "" {
				continue
			}
			for _, q := range s.devices {
				if !slices.ContainsFunc(all, q.equal) {
					all = append(all, q)
				}
			}
		}
	}
	return all
}

func (q request) equal(o request) bool {
	return q.name == o.name && q.many == o.many && slices.EqualFunc(q.constraints, o.constraints, func(a, b *api.Constraint) bool { return *a == *b })
}

const oneKind = "nvidia/gpu" // of the devices of all nodes, of which none has two groups

// hasOneGroup reports whether no node has two groups of GPUs.
func (r *reading) hasOneGroup() bool {
	for _, n := range r.nodes {
		groups := 0
		if !hasGPUs(n) {
			continue
		}
		for _, g := range n.NodeResources.Devices {
			if g.Vendor == vendor {
				groups++
			}
		}
		if groups > 1 {
			return false
		}
	}
	return true
}

// kindOf names what the devices of a group are to the work that is followed. If no node has two groups, all have one kind: which of them work accepts is
// a matter of its nodes (places.mayUse), so that what one job asks for does not keep another one from its places. Else groups have one kind if each request that accepts one of them accepts the
// other, and takes one device: a job that asks for "nvidia/gpu" may get a device of any model, so places of all models count for it.
func (t *translation) kindOf(group *api.NodeDeviceResource) string {
	if t.oneGroup {
		return oneKind
	}
	var accepted []string
	for i := range t.requests {
		q := &t.requests[i]
		if !q.accepts(group) {
			continue
		}
		if q.many {
			return group.ID()
		}
		name := q.name
		for _, c := range q.constraints {
			name += " " + c.LTarget + " " + c.Operand + " " + c.RTarget
		}
		accepted = append(accepted, name)
	}
	if len(accepted) == 0 {
		return group.ID()
	}
	return strings.Join(accepted, ", ")
}

func (q *request) accepts(group *api.NodeDeviceResource) bool {
	id := strings.SplitN(q.name, "/", 3)
	switch len(id) {
	case 1:
		id = []string{group.Vendor, id[0], group.Name}
	case 2:
		id = append(id, group.Name)
	}
	if id[0] != group.Vendor || id[1] != group.Type || id[2] != group.Name {
		return false
	}
	for _, c := range q.constraints {
		if ok, _ := meetsDevice(c, group); !ok {
			return false
		}
	}
	return true
}
