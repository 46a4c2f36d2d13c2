package publisher

import (
	"crypto/sha256"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// fingerprint is a hash of a value's JSON.
type fingerprint [sha256.Size]byte

func fingerprintOf(v any) fingerprint {
	content, err := json.Marshal(v)
	if err != nil {
		return fingerprint{} // a wire type can always be encoded
	}
	return sha256.Sum256(content)
}

// equalSpec compares field by field. Fields that this client lacks make a difference.
func equalSpec(a, b kubeapi.ResourceSliceSpec) bool {
	return a.Driver == b.Driver && a.NodeName == b.NodeName && a.Pool == b.Pool && a.Unknown == b.Unknown && equalDevices(a.Devices, b.Devices)
}

// equalDevices compares in order: the scheduler takes the first device that fits.
func equalDevices(a, b []kubeapi.Device) bool {
	if len(a) > 0 && len(a) == len(b) && &a[0] == &b[0] {
		return true // the same memory
	}
	return slices.EqualFunc(a, b, equalDevice)
}

func equalDevice(a, b kubeapi.Device) bool {
	return a.Name == b.Name && a.AllowMultipleAllocations == b.AllowMultipleAllocations &&
		maps.EqualFunc(a.Attributes, b.Attributes, equalAttribute) && maps.EqualFunc(a.Capacity, b.Capacity, equalCapacity) &&
		slices.EqualFunc(a.Taints, b.Taints, equalTaint)
}

func equalTaint(a, b kubeapi.DeviceTaint) bool {
	return a.Key == b.Key && a.Value == b.Value && a.Effect == b.Effect && a.TimeAdded.Equal(b.TimeAdded)
}

func equalAttribute(a, b kubeapi.DeviceAttribute) bool {
	return equal(a.Int, b.Int) && equal(a.Bool, b.Bool) && equal(a.String, b.String) && equal(a.Version, b.Version)
}

func equal[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

func equalCapacity(a, b kubeapi.DeviceCapacity) bool {
	if !equalQuantity(a.Value, b.Value) || (a.RequestPolicy == nil) != (b.RequestPolicy == nil) {
		return false
	}
	if a.RequestPolicy == nil {
		return true
	}
	x, y := a.RequestPolicy.ValidRange, b.RequestPolicy.ValidRange
	if !equalQuantity(a.RequestPolicy.Default, b.RequestPolicy.Default) || (x == nil) != (y == nil) {
		return false
	}
	return x == nil || equalQuantity(x.Min, y.Min) && equalQuantity(x.Max, y.Max) && equalQuantity(x.Step, y.Step)
}

// equalQuantity compares values: the API server stores 1024Mi as 1Gi.
func equalQuantity(a, b string) bool {
	if a == b {
		return true
	}
	x, ok := kubeapi.ParseQuantity(a)
	y, also := kubeapi.ParseQuantity(b)
	return ok && also && x.Cmp(y) == 0
}

// addsTaint reports whether a taint that keeps pods away has to be published: each moment without it may give the device out. published
// are the devices in the API by name.
func addsTaint(desired []kubeapi.Device, published map[string]kubeapi.Device) bool {
	return slices.ContainsFunc(desired, func(d kubeapi.Device) bool {
		was, ok := published[d.Name]
		return ok && slices.ContainsFunc(d.Taints, func(t kubeapi.DeviceTaint) bool { return blocks(t) && !hasTaint(was, t) })
	})
}

func blocks(t kubeapi.DeviceTaint) bool {
	return t.Effect == kubeapi.NoSchedule || t.Effect == kubeapi.NoExecute
}

// hasTaint reports whether a device has a taint of this key, value and effect: a claim may tolerate another value.
func hasTaint(d kubeapi.Device, t kubeapi.DeviceTaint) bool {
	return slices.ContainsFunc(d.Taints, func(u kubeapi.DeviceTaint) bool { return u.Key == t.Key && u.Value == t.Value && u.Effect == t.Effect })
}

// withTaintTimes returns devices with the time of each taint, in whole seconds as the API server stores it. A taint without a time gets that which
// it has among the devices before, or now: the server would set the time of each write.
func withTaintTimes(devices, before []kubeapi.Device, now time.Time) []kubeapi.Device {
	devices = slices.Clone(resourceslice.Stamp(devices, before, now))
	for i, d := range devices {
		devices[i].Taints = slices.Clone(d.Taints)
		for j, t := range d.Taints {
			devices[i].Taints[j].TimeAdded = t.TimeAdded.UTC().Truncate(time.Second)
		}
	}
	return devices
}
