package resourceslice

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// heldDevice is a device that prepared claims hold.
type heldDevice struct {
	published kubeapi.Device // without taints
	result    prepared.Result
}

// Published returns a device for prepared.Result.Published: as it is in the slice, without taints.
func Published(d kubeapi.Device) json.RawMessage {
	d.Taints = nil
	text, err := json.Marshal(d)
	if err != nil { // a Device has no value that JSON can't have
		return nil
	}
	return text
}

// held returns the devices that prepared claims hold, by name. Of several claims on a device the first by UID counts. A claim with admin
// access holds nothing.
func (in Input) held() map[string]heldDevice {
	claims := slices.SortedFunc(slices.Values(in.Prepared), func(a, b prepared.Claim) int { return cmp.Compare(a.UID, b.UID) })
	all := map[string]heldDevice{}
	for _, c := range claims {
		if !c.Holds(in.BootID) {
			continue
		}
		for _, r := range c.Results {
			if _, ok := all[r.Device]; !ok && !r.Admin {
				all[r.Device] = heldDevice{decoded(r), r}
			}
		}
	}
	return all
}

// decoded returns the device of a result as it was published; one without attributes if the record lacks it.
func decoded(r prepared.Result) kubeapi.Device {
	var d kubeapi.Device
	if json.Unmarshal(r.Published, &d) != nil || d.Name != r.Device {
		d = kubeapi.Device{Name: r.Device}
	}
	d.Taints = nil
	return d
}

// asPublished returns the held device as it was published. A record of another version, or one that was made again without the GPU, may lack
// attributes and capacities: they are unknown then. An expression that reads one which is missing would be an error for the pod.
func (h heldDevice) asPublished() kubeapi.Device {
	id, shared := h.result.Unit.Split()
	unknown := inventory.Unit{Device: gpu.Device{ID: id, At: h.result.At, NUMANode: -1}}
	if shared {
		unknown.Sharing.Mode = inventory.TimeSlicing
	}
	d := h.published
	d.Attributes, d.Capacity = attributes(gpu.Driver{}, unknown), capacities(unknown.Device)
	maps.Copy(d.Attributes, h.published.Attributes)
	maps.Copy(d.Capacity, h.published.Capacity)
	return d
}

// sameForm reports whether a device can be published as b while claims hold it that were allocated when it was published as a.
func sameForm(a, b kubeapi.Device) bool {
	if a.AllowMultipleAllocations != b.AllowMultipleAllocations || len(a.Capacity) != len(b.Capacity) {
		return false
	}
	for name := range a.Capacity {
		if _, ok := b.Capacity[name]; !ok {
			return false
		}
	}
	for _, name := range []string{attrType, attrPool, attrSharing} {
		if x, y := a.Attributes[name].String, b.Attributes[name].String; x == nil || y == nil || *x != *y {
			return false
		}
	}
	return true
}

// overlaps reports whether claims hold the hardware of a device as another device, which is not offered beside it. Devices that are offered
// at the same time on the same hardware are the shares of one device.
func (l *listing) overlaps(notOffered holders.Set) bool {
	own := prepared.Result{Device: l.device.Name, Unit: l.unit.ID, At: l.unit.Device.At}.Holder()
	for h := range notOffered.On(own.At) {
		if h.Device != own.Device || h.Unit != own.Unit {
			return true
		}
	}
	return false
}

// notOffered returns the holders of devices that are not offered as they were published.
func notOffered(held map[string]heldDevice, offered map[string]bool) holders.Set {
	var all []holders.Holder
	for name, h := range held {
		if !offered[name] {
			all = append(all, h.result.Holder())
		}
	}
	return holders.NewSet(all)
}

// retained returns the devices that claims hold and that are offered no more, in the order of their names.
func (in Input) retained(held map[string]heldDevice, listed map[string]bool) (all []listing) {
	units := map[gpu.DeviceID]inventory.Unit{}
	for u := range in.Allocatable.Devices() {
		units[u.Device.ID] = u
	}
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if _, ok := listed[name]; ok {
			continue
		}
		h := held[name]
		id, _ := h.result.Unit.Split()
		l := listing{unit: units[id], device: h.asPublished()}
		l.device.Taints, l.device.Held = in.taints(l.unit, true, false), true
		all = append(all, l)
	}
	return all
}
