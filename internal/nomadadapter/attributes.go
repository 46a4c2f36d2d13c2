package nomadadapter

import (
	"maps"
	"strconv"

	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core"
)

// attribute is a number with a unit, or a text.
type attribute struct {
	number int64
	unit   string // of a number; one of those that Nomad knows
	text   string
}

func (a attribute) wire() *structs.Attribute {
	if a.text != "" {
		return structs.NewStringAttribute(a.text)
	}
	return structs.NewIntAttribute(a.number, a.unit)
}

// attributes are facts that jobs may ask for, by key: ${device.attr.memory}. What is not known has no key, so that
// is_set tells and a comparison is false. Of one key all values are numbers, or all texts: Nomad compares nothing
// else (plugins/shared/structs/attribute.go).
type attributes map[string]attribute

// amount adds a number that is not known if it is zero.
func (all attributes) amount(key string, n uint64, unit string) {
	if n > 0 {
		all[key] = attribute{number: int64(n), unit: unit}
	}
}

// count adds a number that may be zero.
func (all attributes) count(key string, n int) { all[key] = attribute{number: int64(n)} }

// word adds a text that is not known if it is empty.
func (all attributes) word(key, text string) {
	if text != "" {
		all[key] = attribute{text: text}
	}
}

// attributesOf are the facts about a unit. The first nine are those of nomad-device-nvidia, names, units and types
// alike.
//
// Versions are texts, because Nomad's version constraint compares those; ">" would compare letters.
func attributesOf(driver core.Driver, u core.Unit) attributes {
	d, all := u.Device, attributes{}
	all.amount("memory", d.Memory>>20, structs.UnitMiB)
	all.amount("power", d.PowerLimit/1000, structs.UnitW)
	all.amount("bar1", d.BAR1>>20, structs.UnitMiB)
	all.word("driver_version", driver.Version)
	all.amount("cores_clock", d.CoreClock, structs.UnitMHz)
	all.amount("memory_clock", d.MemoryClock, structs.UnitMHz)
	all.amount("pci_bandwidth", uint64(d.PCIBandwidth()), structs.UnitMBPerS)
	all.word("display_state", d.DisplayState.String())
	all.word("persistence_mode", d.PersistenceMode.String())

	all.word("cuda_version", driver.CUDA)
	if d.Compute != (core.Compute{}) {
		all.word("compute_capability", d.Compute.String())
	}
	all.word("product", d.Product())
	all.word("architecture", d.Architecture)
	all.word("brand", d.Brand)
	all.word("ecc_mode", d.ECC.String())
	all.amount("nvlinks", uint64(max(d.NVLinks, 0)), "")
	if d.NUMANode >= 0 {
		all.count("numa_node", d.NUMANode)
	}
	if d.Serial != "" {
		all["unique.serial"] = serial(d.Serial)
	}
	all.addSlices(d)
	all.addSharing(u.Sharing)
	return all
}

// addSlices adds what a MIG instance has of its GPU. The driver tells all of it or nothing.
func (all attributes) addSlices(d core.Device) {
	all.word("mig_profile", d.Profile)
	if d.Slices == (core.Slices{}) {
		return
	}
	all.count("gpu_slices", d.Slices.GPU)
	all.count("compute_slices", d.Slices.Compute)
	all.count("multiprocessors", d.Slices.Multiprocessors)
	all.count("copy_engines", d.Slices.CopyEngines)
	all.count("decoders", d.Slices.Decoders)
	all.count("encoders", d.Slices.Encoders)
	all.count("jpeg_decoders", d.Slices.JPEGDecoders)
	all.count("ofas", d.Slices.OFAs)
}

// addSharing adds how a device is shared; memory and all else are of the whole device.
func (all attributes) addSharing(s core.Sharing) {
	if s.Mode == core.Exclusive {
		return
	}
	all.word("sharing", s.Mode.String())
	all.count("replicas", s.Replicas)
	all.amount("mps_memory_limit", s.Memory>>20, structs.UnitMiB)
	all.amount("mps_thread_limit", uint64(max(s.Threads, 0)), "") // percent, which is no unit of Nomad's
}

// serial is a number if it looks like one, because the same letters in a constraint are one to Nomad
// (structs.ParseAttribute), and a number never equals a text.
func serial(s string) attribute {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > 0 {
		return attribute{number: n}
	}
	return attribute{text: s}
}

// shared are the attributes that all units have, with the same values.
func shared(driver core.Driver, units []core.Unit) (common attributes) {
	for i, u := range units {
		if i > 0 && u.Device == units[i-1].Device && u.Sharing == units[i-1].Sharing { // another replica
			continue
		}
		own := attributesOf(driver, u)
		if i == 0 {
			common = own
			continue
		}
		maps.DeleteFunc(common, func(key string, a attribute) bool { return own[key] != a })
	}
	return common
}
