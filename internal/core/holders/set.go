package holders

import (
	"cmp"
	"iter"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Holder is work that has a device, or may have it. It is comparable.
type Holder struct {
	Work     Work
	API      inventory.API    // through which it has the device
	Resource string           // name of the resource in the request, such as "nvidia.com/gpu" or "nvidia/gpu"; "" = a resource claim
	Unit     inventory.UnitID // of a device or a replica of it; "" = not known which
	Device   gpu.DeviceID
	At       gpu.Placement // of the device; the zero value = not known: see Locate

	Sharing string // how the device is shared; "" = the work has all of it
	Shares  int    // that the work has of a shared device; 0 = 1
	Memory  uint64 // bytes of the device to which its container was limited when it was given out, for all shares together; 0 = no limit, or it is not recorded

	// Observed means that a process is the only evidence: no record shows what its work holds.
	Observed bool
}

// Compare is the order of holders: by work, resource, device and unit.
func (h Holder) Compare(other Holder) int {
	return cmp.Or(h.Work.Compare(other.Work), cmp.Compare(h.Resource, other.Resource), cmp.Compare(h.Device, other.Device), cmp.Compare(h.Unit, other.Unit))
}

// overlaps reports whether two holders have the same hardware. A MIG instance that was made again may have the ID of one that is held, in
// another place.
func (h Holder) overlaps(other Holder) bool {
	return h.At.GPU == other.At.GPU && (h.Device == other.Device || h.At.Overlaps(other.At))
}

// excludes reports whether work can't have a device beside a holder of overlapping hardware:
//
//	through another API                                   it can't
//	by the same resource of a device plugin               the same device, shared as before or not shared as before: the kubelet, or Nomad,
//	                                                      gives each unit out once, and finds the end of work before this agent does
//	by resource claims                                    shares of the same device, shared in the same way, that are not the same share
//	anything else                                         it can't
//
// Whether shares are left is not in this table: the orchestrators count them; see Shares.
func (h Holder) excludes(want Holder) bool {
	switch {
	case h.API != want.API || h.Device != want.Device || h.Resource != want.Resource || h.Sharing != want.Sharing:
		return true
	case want.Resource != "":
		return false
	}
	return want.Sharing == "" || want.Unit != "" && h.Unit == want.Unit
}

// Set has holders by GPU. It is immutable; the zero value is empty.
type Set struct {
	byGPU map[gpu.DeviceID][]Holder
}

// NewSet returns the set of holders whose placement is known. On a GPU they are in the order of the arguments.
func NewSet(all ...[]Holder) Set {
	s := Set{map[gpu.DeviceID][]Holder{}}
	for _, some := range all {
		for _, h := range some {
			if h.At.GPU != "" {
				s.byGPU[h.At.GPU] = append(s.byGPU[h.At.GPU], h)
			}
		}
	}
	return s
}

// On yields the holders of hardware at a placement of a GPU.
func (s Set) On(at gpu.Placement) iter.Seq[Holder] {
	return func(yield func(Holder) bool) {
		for _, h := range s.byGPU[at.GPU] {
			if h.At.Overlaps(at) && !yield(h) {
				return
			}
		}
	}
}

// Conflict returns the first holder beside which the work of another one can't have its device.
func (s Set) Conflict(want Holder) (Holder, bool) {
	for _, h := range s.byGPU[want.At.GPU] {
		if h.overlaps(want) && h.excludes(want) {
			return h, true
		}
	}
	return Holder{}, false
}

// Shares returns the holders of shares of a device, and how many shares these have together.
func (s Set) Shares(device gpu.DeviceID, at gpu.Placement) (by []Holder, n int) {
	for _, h := range s.byGPU[at.GPU] {
		if h.Device == device && h.Sharing != "" {
			by, n = append(by, h), n+max(h.Shares, 1)
		}
	}
	return by, n
}
