package nomadadapter

import (
	"maps"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Vendor of every group; a job asks for "gpu", "nvidia/gpu" or "nvidia/gpu/<model>".
const vendor = "nvidia"

// bundle is a group in the making.
type bundle struct {
	name  string
	units []core.Unit
}

// bundles sorts the units into groups, each unit into one. Order is that of the inventory.
func bundles(inv *core.Inventory, given names) []*bundle {
	var all []*bundle
	byKind := map[kind]*bundle{}
	for u := range inv.Units() {
		k := kindOf(u.Device)
		b, ok := byKind[k]
		if !ok {
			b = &bundle{name: given[k]}
			byKind[k] = b
			all = append(all, b)
		}
		b.units = append(b.units, u)
	}
	return all
}

// unhealthy is the attribute with the number of devices in a group that take no work; a group without such
// has none. The scheduler remembers by a node's class whether it has the devices, and health alone is not part
// of the class: a sick node would hide the others of its class, and its recovery would unblock nobody.
const unhealthy = "unhealthy"

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
func groups(inv *core.Inventory, given names) []*device.DeviceGroup {
	var gs []*device.DeviceGroup
	for _, b := range bundles(inv, given) {
		g := &device.DeviceGroup{Vendor: vendor, Type: device.DeviceTypeGPU, Name: b.name}
		var common map[string]attribute
		for _, u := range b.units {
			g.Devices = append(g.Devices, wireDevice(u))
			own := attributes(inv.Driver(), u.Device)
			if common == nil {
				common = own
			}
			maps.DeleteFunc(common, func(key string, a attribute) bool { return own[key] != a })
		}
		g.Attributes = make(map[string]*structs.Attribute, len(common))
		for key, a := range common {
			g.Attributes[key] = a.wire()
		}
		if n := b.unhealthy(); n > 0 {
			g.Attributes[unhealthy] = structs.NewIntAttribute(n, "")
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

// attribute is a number with a unit, or a text. The zero value is unknown.
type attribute struct {
	number uint64
	unit   string // of a number; one of those that Nomad knows
	text   string
}

func (a attribute) wire() *structs.Attribute {
	if a.text != "" {
		return structs.NewStringAttribute(a.text)
	}
	return structs.NewIntAttribute(int64(a.number), a.unit)
}

// attributes are the facts that jobs may ask for: ${device.attr.memory}. The first nine are those of
// nomad-device-nvidia, names, units and types alike. What is not known has no key, so that is_set tells
// and a comparison is false.
//
// Versions are texts, because Nomad's version constraint compares those; ">" would compare letters.
func attributes(driver core.Driver, d core.Device) map[string]attribute {
	all := map[string]attribute{
		"memory":           {number: d.Memory >> 20, unit: structs.UnitMiB},
		"power":            {number: d.PowerLimit / 1000, unit: structs.UnitW},
		"bar1":             {number: d.BAR1 >> 20, unit: structs.UnitMiB},
		"driver_version":   {text: driver.Version},
		"cores_clock":      {number: d.CoreClock, unit: structs.UnitMHz},
		"memory_clock":     {number: d.MemoryClock, unit: structs.UnitMHz},
		"pci_bandwidth":    {number: uint64(d.PCIBandwidth()), unit: structs.UnitMBPerS},
		"display_state":    {text: d.DisplayState.String()},
		"persistence_mode": {text: d.PersistenceMode.String()},

		"cuda_version": {text: driver.CUDA},
		"mig_profile":  {text: d.Profile},
	}
	if d.Compute != (core.Compute{}) {
		all["compute_capability"] = attribute{text: d.Compute.String()}
	}
	maps.DeleteFunc(all, func(_ string, a attribute) bool { return a.number == 0 && a.text == "" })
	return all
}
