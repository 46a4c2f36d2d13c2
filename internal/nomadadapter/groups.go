package nomadadapter

import (
	"maps"
	"slices"
	"strconv"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// vendor is the vendor of every group; a job requests "gpu", "nvidia/gpu" or "nvidia/gpu/<name>".
const vendor = "nvidia"

// group is the units that Nomad gets as one device group.
type group struct {
	key   groupKey
	name  string
	units []inventory.Unit // in the order of the inventory
}

// listing is one device group of a fingerprint. Listings are compared, so that only changes are sent.
type listing struct {
	groupType, name string
	attributes      attributes
	devices         []listedDevice
}

// listedDevice is one device of a listing. Health is not among the attributes, which are part of the node's computed class.
type listedDevice struct {
	id          inventory.UnitID
	healthy     bool
	description string         // "" = healthy without remarks
	pci         gpu.PCIAddress // "" = unknown
}

// unhealthyKey is the attribute with the number of devices in a group that accept no new work; a group without such
// devices does not have it. It changes the node's computed class while the node has unhealthy devices (see the package's
// documentation).
const unhealthyKey = "unhealthy"

// newListings returns the fingerprint of groups of an inventory, not nil. Equal groups give equal listings.
func newListings(inv *inventory.Allocatable, groups []group) []listing {
	all := make([]listing, 0, len(groups))
	for _, g := range groups {
		l := listing{groupType: g.key.groupType, name: g.name, attributes: commonAttributes(inv.Driver(), g.units)}
		unhealthy := 0
		l.devices = make([]listedDevice, len(g.units))
		for i := range g.units {
			u, d := &g.units[i], &l.devices[i]
			d.id, d.healthy, d.pci = u.ID, u.Health.Schedulable(), u.Device.PCI
			if !d.healthy {
				unhealthy++
			}
			if i > 0 && u.Device.ID == g.units[i-1].Device.ID && u.Health == g.units[i-1].Health { // another replica
				d.description = l.devices[i-1].description
			} else {
				d.description = descriptionOf(inv, *u)
			}
		}
		if unhealthy > 0 {
			l.attributes.addCount(unhealthyKey, unhealthy)
		}
		all = append(all, l)
	}
	return all
}

// descriptionOf is the health of a unit with all its conditions; "" = healthy without remarks.
func descriptionOf(inv *inventory.Allocatable, u inventory.Unit) string {
	if u.Health == (health.Health{}) {
		return ""
	}
	if all := inv.Conditions(u); len(all) > 0 {
		return faultreport.Describe(all)
	}
	return faultreport.Describe([]health.Health{u.Health})
}

func (l listing) equal(o listing) bool { return l.like(o) && slices.Equal(l.devices, o.devices) }

// equalButTexts reports whether l and o differ in descriptions at most.
func (l listing) equalButTexts(o listing) bool {
	return l.like(o) && slices.EqualFunc(l.devices, o.devices, func(a, b listedDevice) bool {
		a.description = b.description
		return a == b
	})
}

// like reports whether l and o differ in devices at most.
func (l listing) like(o listing) bool {
	return l.groupType == o.groupType && l.name == o.name && maps.Equal(l.attributes, o.attributes)
}

// wire returns the listing as Nomad's type; device.DeviceGroup.Validate accepts it.
func (l listing) wire() *device.DeviceGroup {
	g := &device.DeviceGroup{
		Vendor: vendor, Type: l.groupType, Name: l.name,
		Attributes: make(map[string]*structs.Attribute, len(l.attributes)),
	}
	for key, a := range l.attributes {
		g.Attributes[key] = a.wire()
	}
	all := make([]device.Device, len(l.devices))
	g.Devices = make([]*device.Device, len(l.devices))
	for i, d := range l.devices {
		w := &all[i]
		*w = device.Device{ID: string(d.id), Healthy: d.healthy, HealthDesc: d.description}
		if d.pci != "" {
			w.HwLocality = &device.DeviceLocality{PciBusID: string(d.pci)}
		}
		g.Devices[i] = w
	}
	return g
}

// attribute is a number with a unit, or a text.
type attribute struct {
	number int64
	unit   string // of number: one of Nomad's units, or ""
	text   string // "" = a number
}

func (a attribute) wire() *structs.Attribute {
	if a.text != "" {
		return structs.NewStringAttribute(a.text)
	}
	return structs.NewIntAttribute(a.number, a.unit)
}

// attributes are the properties that job constraints can refer to, by key: ${device.attr.memory}. An unknown property has
// no key, so that is_set is false and comparisons fail. All values of one key are numbers, or all are texts: Nomad
// compares nothing else (plugins/shared/structs/attribute.go).
type attributes map[string]attribute

// addKnown adds a number; 0 = unknown.
func (all attributes) addKnown(key string, n uint64, unit string) {
	if n > 0 {
		all[key] = attribute{number: int64(n), unit: unit}
	}
}

// addCount adds a number that may be 0.
func (all attributes) addCount(key string, n int) { all[key] = attribute{number: int64(n)} }

// addText adds a text; "" = unknown.
func (all attributes) addText(key, text string) {
	if text != "" {
		all[key] = attribute{text: text}
	}
}

// attributesOf returns the attributes of a unit. The first nine have the names, units and types of nomad-device-nvidia.
//
// Versions are texts, because Nomad's version constraint compares those; ">" would compare letters.
func attributesOf(driver gpu.Driver, u inventory.Unit) attributes {
	d, all := u.Device, attributes{}
	all.addKnown("memory", d.Memory>>20, structs.UnitMiB)
	all.addKnown("power", d.PowerLimit/1000, structs.UnitW)
	all.addKnown("bar1", d.BAR1>>20, structs.UnitMiB)
	all.addText("driver_version", driver.Version)
	all.addKnown("cores_clock", d.CoreClock, structs.UnitMHz)
	all.addKnown("memory_clock", d.MemoryClock, structs.UnitMHz)
	all.addKnown("pci_bandwidth", uint64(d.PCIBandwidth()), structs.UnitMBPerS)
	all.addText("display_state", d.DisplayState.String())
	all.addText("persistence_mode", d.PersistenceMode.String())

	all.addText("cuda_version", driver.CUDA)
	if d.Compute != (gpu.Compute{}) {
		all.addText("compute_capability", d.Compute.String())
	}
	all.addText("product", d.Product())
	all.addText("architecture", d.Architecture)
	all.addText("brand", d.Brand)
	all.addText("ecc_mode", d.ECC.String())
	all.addKnown("nvlinks", uint64(max(d.NVLinks, 0)), "")
	if d.NUMANode >= 0 {
		all.addCount("numa_node", d.NUMANode)
	}
	if d.Serial != "" {
		all["unique.serial"] = serial(d.Serial)
	}
	all.addMIG(d)
	all.addSharing(u)
	return all
}

// addMIG adds the resources of a MIG instance, of which the driver reports all or none.
func (all attributes) addMIG(d gpu.Device) {
	all.addText("mig_profile", d.Profile)
	if d.Slices == (gpu.Slices{}) {
		return
	}
	all.addCount("gpu_slices", d.Slices.GPU)
	all.addCount("compute_slices", d.Slices.Compute)
	all.addCount("multiprocessors", d.Slices.Multiprocessors)
	all.addCount("copy_engines", d.Slices.CopyEngines)
	all.addCount("decoders", d.Slices.Decoders)
	all.addCount("encoders", d.Slices.Encoders)
	all.addCount("jpeg_decoders", d.Slices.JPEGDecoders)
	all.addCount("ofas", d.Slices.OFAs)
}

// addSharing adds how a device is shared; the other attributes of a share are those of the whole device.
func (all attributes) addSharing(u inventory.Unit) {
	s := u.Sharing
	if s.Mode == inventory.Exclusive {
		return
	}
	all.addText("sharing", s.Mode.String())
	all.addCount("replicas", s.Replicas)
	all.addKnown("memory_limit", u.Memory>>20, structs.UnitMiB) // by the driver; a client of MPS may do without that of the daemon
	if s.Mode == inventory.MPS {
		all.addKnown("mps_memory_limit", s.Memory>>20, structs.UnitMiB)
	}
	all.addKnown("mps_thread_limit", uint64(max(s.Threads, 0)), "") // percent; Nomad has no such unit
}

// serial returns a number for a serial of digits: Nomad parses the same digits in a constraint as a number
// (structs.ParseAttribute), and a number never equals a text.
func serial(s string) attribute {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > 0 {
		return attribute{number: n}
	}
	return attribute{text: s}
}

// commonAttributes returns the attributes that have the same value for all units.
func commonAttributes(driver gpu.Driver, units []inventory.Unit) (common attributes) {
	for i := range units {
		u := &units[i]
		if i > 0 && u.Device == units[i-1].Device && u.Sharing == units[i-1].Sharing { // another replica
			continue
		}
		of := attributesOf(driver, *u)
		if i == 0 {
			common = of
			continue
		}
		maps.DeleteFunc(common, func(key string, a attribute) bool { return of[key] != a })
	}
	return common
}
