// Package resourceslice translates an inventory into the devices of ResourceSlices (resource.k8s.io/v1), under the names of NVIDIA's DRA
// driver. It is pure.
package resourceslice

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// Driver is the name of the driver: that of NVIDIA's, which it replaces.
const Driver = "gpu.nvidia.com"

// MaxDevices is the largest number of devices in a slice: a slice in which one device has a taint may have 64 devices, one without
// taints 128 (ResourceSliceMaxDevicesWithTaintsOrConsumesCounters of k8s.io/api/resource/v1). With 64 the first taint never needs
// another slice.
const MaxDevices = 64

// Input is what slices are made from.
type Input struct {
	Allocatable *inventory.Allocatable
	Prepared    []prepared.Claim
	BootID      string // claims that were prepared in another boot hold nothing

	// SharesAsDevices publishes each share of a device as a device of its own, because the API server drops the fields of consumable
	// capacity (Kubernetes before 1.36).
	SharesAsDevices bool

	// LastDriver has the versions of the driver when it could be asked last. The devices of one that is unloaded keep them: a version of 0.0.0
	// would change what an expression selects, and without the attribute the expression would be an error, because the scheduler evaluates it
	// before it looks at taints.
	LastDriver gpu.Driver

	Evict    bool   // devices whose hardware is broken evict the pods that run on them: effect NoExecute
	Cordoned string // why no device takes new work; "" = they do
}

// DeviceName is the name of a unit's device in a slice: a DNS label that is stable over boots and reloads of the driver. All units of a
// shared device have one name.
func DeviceName(u inventory.Unit) string { return deviceName(u.Device.ID) }

// maxName is the maximum length of a device's name: a DNS label has 63 characters, and that of a share ends with "-s" and its number.
const maxName = 63 - len("-s99999")

// deviceName returns the lower-case UUID. A character that a DNS label can't have becomes '-': drivers before 470 have "/" in the UUIDs
// of MIG instances. What is no label even so ends with a hash: the API server would refuse the slice because of one such name.
func deviceName(id gpu.DeviceID) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '-':
			return r
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, string(id))
	if label := strings.Trim(name, "-"); label == name && name != "" && len(name) <= maxName {
		return name
	}
	hash := sha256.Sum256([]byte(id))
	suffix := hex.EncodeToString(hash[:8])
	return strings.TrimLeft(name[:min(len(name), maxName-1-len(suffix))]+"-"+suffix, "-")
}

// shareName is the name of one share that is published as a device.
func shareName(u inventory.Unit) string { return DeviceName(u) + "-s" + strconv.Itoa(u.Replica) }

// Resolve returns the unit of a device in a slice; false if it is not offered through DRA any more. For a shared device it is the first
// of its units, for a share that is published as a device ("<uuid>-s<i>") that share.
func Resolve(inv *inventory.Allocatable, name string) (found inventory.Unit, ok bool) {
	for u := range inv.Units() {
		if u.API != inventory.DRA || !isNameOf(u, name) {
			continue
		}
		if u.Health.Reason != health.ReasonWithdrawn {
			return u, true
		}
		if !ok {
			found, ok = u, true
		}
	}
	return found, ok
}

func isNameOf(u inventory.Unit, name string) bool {
	rest, ok := strings.CutPrefix(name, DeviceName(u))
	return ok && (rest == "" || u.Sharing.Mode != inventory.Exclusive && rest == "-s"+strconv.Itoa(u.Replica))
}

// Devices returns the devices that the node's slices have, in canonical order: those of the inventory that are offered through DRA, then
// those that prepared claims hold and that are not offered any more. It is nil if nothing is known so far, and empty if there is nothing
// to offer. The input is not changed. Equal inputs result in equal devices; the times of some taints are zero (see Stamp).
//
// A device that a prepared claim holds never leaves, because the scheduler would hand out the same hardware under another name. If its
// form would change (exclusive or shared, its pool, its capacities), it stays as it was published, with the taint "withdrawn", until the
// claims end: a share whose capacity vanishes from the slice counts as free.
func Devices(in Input) []kubeapi.Device {
	if in.Allocatable.Provisional() {
		return nil
	}
	all := []kubeapi.Device{}
	for _, l := range in.listings() {
		all = append(all, l.device)
	}
	return all
}

// Chunk distributes devices to slices, in their order.
func Chunk(devices []kubeapi.Device) [][]kubeapi.Device {
	return slices.Collect(slices.Chunk(devices, MaxDevices))
}

// ByName returns devices by their names.
func ByName(devices []kubeapi.Device) map[string]kubeapi.Device {
	all := make(map[string]kubeapi.Device, len(devices))
	for _, d := range devices {
		all[d.Name] = d
	}
	return all
}

// listing is a device in a slice.
type listing struct {
	unit   inventory.Unit // zero if the inventory has it no more
	device kubeapi.Device
}

// listings returns the devices in the order of Devices, each with the unit that it stands for.
func (in Input) listings() []listing {
	all := in.offers()
	held := in.held()
	kept := map[string]bool{} // devices that are listed, but not as they are offered
	for i := range all {
		l := &all[i]
		h, ok := held[l.device.Name]
		if ok && !sameForm(h.published, l.device) {
			l.device, kept[l.device.Name] = h.asPublished(), true
		}
		l.device.Held = ok
	}
	offered := map[string]bool{}
	for _, l := range all {
		offered[l.device.Name] = !kept[l.device.Name]
	}
	others := notOffered(held, offered)
	for i := range all {
		l := &all[i]
		l.device.Taints = in.taints(l.unit, kept[l.device.Name], l.overlaps(others))
	}
	return append(all, in.retained(held, offered)...)
}

// Device returns the device of a unit, without taints.
func (in Input) Device(u inventory.Unit) kubeapi.Device {
	driver := in.Allocatable.Driver()
	driver.Version, driver.CUDA = cmp.Or(driver.Version, in.LastDriver.Version), cmp.Or(driver.CUDA, in.LastDriver.CUDA)
	d := newDevice(driver, u, in.Allocatable.LimitPolicy(), in.SharesAsDevices)
	if on, proves := in.Allocatable.ProvedOn(u.Device.At.GPU); proves && len(d.Attributes)+len(d.Capacity) < maxAttributes {
		d.Attributes[attrProvedOn] = text(on)
	}
	return d
}

// offers returns the devices of the inventory that are offered through DRA, without taints.
func (in Input) offers() []listing {
	var all []listing
	at := map[string]int{}
	for u := range in.Allocatable.Units() {
		if u.API != inventory.DRA {
			continue
		}
		name := DeviceName(u)
		if in.SharesAsDevices && u.Sharing.Mode != inventory.Exclusive {
			name = shareName(u)
		}
		i, ok := at[name]
		switch {
		case !ok:
			at[name] = len(all)
			all = append(all, listing{unit: u})
		case all[i].unit.Health.Reason == health.ReasonWithdrawn && u.Health.Reason != health.ReasonWithdrawn:
			all[i].unit = u // a unit that retires has another form of the device
		}
	}
	for i := range all {
		all[i].device = in.Device(all[i].unit)
	}
	return all
}
