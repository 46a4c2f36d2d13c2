package nomadadapter

import (
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Vendor of every group; a job asks for "gpu", "nvidia/gpu" or "nvidia/gpu/<model>".
const vendor = "nvidia"

// bundle is a group in the making.
type bundle struct {
	groupType, name string
	units           []core.Unit
}

// bundles sorts the units into groups, each unit into one. Order is that of the inventory.
func bundles(inv *core.Inventory, given assignment) []*bundle {
	var all []*bundle
	byKind := map[groupKey]*bundle{}
	for u := range inv.Units() {
		k := given.keyOf(u)
		b, ok := byKind[k]
		if !ok {
			b = &bundle{groupType: k.groupType, name: given.names[k]}
			byKind[k] = b
			all = append(all, b)
		}
		b.units = append(b.units, u)
	}
	return all
}

// unhealthyKey is the attribute with the number of devices in a group that take no work; a group without such
// has none. The scheduler remembers by a node's class whether it has the devices, and health alone is not part
// of the class: a sick node would hide the others of its class, and its recovery would unblock nobody.
const unhealthyKey = "unhealthy"

func (b *bundle) unhealthy() (n int64) {
	for _, u := range b.units {
		if !u.Health.Schedulable() {
			n++
		}
	}
	return n
}

// groups says in Nomad's words what inv offers, under names that are given for it. Equal inventories give
// deeply equal groups, and each is valid by device.DeviceGroup.Validate.
func groups(inv *core.Inventory, given assignment) []*device.DeviceGroup {
	var gs []*device.DeviceGroup
	for _, b := range bundles(inv, given) {
		g := &device.DeviceGroup{Vendor: vendor, Type: b.groupType, Name: b.name}
		for _, u := range b.units {
			g.Devices = append(g.Devices, wireDevice(u))
		}
		common := shared(inv.Driver(), b.units)
		g.Attributes = make(map[string]*structs.Attribute, len(common)+1)
		for key, a := range common {
			g.Attributes[key] = a.wire()
		}
		if n := b.unhealthy(); n > 0 {
			g.Attributes[unhealthyKey] = structs.NewIntAttribute(n, "")
		}
		gs = append(gs, g)
	}
	return gs
}

// wireDevice gives a device a description if there is more to say than that it is healthy. Health stands
// nowhere else in a group: its attributes decide on the node's computed class.
func wireDevice(u core.Unit) *device.Device {
	d := &device.Device{ID: string(u.ID), Healthy: u.Health.Schedulable()}
	if text := u.Health.String(); text != core.Healthy.String() {
		d.HealthDesc = text
	}
	if u.Device.PCI != "" {
		d.HwLocality = &device.DeviceLocality{PciBusID: string(u.Device.PCI)}
	}
	return d
}
