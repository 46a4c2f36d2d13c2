package dra

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
)

// want is a device that a claim is to get.
type want struct {
	prepared.Result
	replicas int // shares that the device has; 0 = it is exclusive
}

// others returns the claims that hold devices in this boot, without the one with a UID.
func others(uid, bootID string, all []prepared.Claim) (held []prepared.Claim) {
	for _, c := range all {
		if c.UID != uid && c.Holds(bootID) {
			held = append(held, c)
		}
	}
	return held
}

// conflict returns why a claim can't have a device beside those that claims hold, itself among them: *HeldError or *SharesError. Admin access
// holds nothing and conflicts with nothing.
//
//	wanted      held on overlapping hardware       allowed
//	exclusive   anything                           no: a GPU and its MIG instances are the same hardware
//	share       share of the same device           if it is shared in the same way, and shares are left
//	share       anything else                      no
func conflict(w want, held []prepared.Claim) error {
	if w.Admin {
		return nil
	}
	shares := &SharesError{Device: w.Device, Want: max(w.Shares, 1), All: w.replicas}
	for _, c := range held {
		n := 0
		for _, r := range c.Results {
			switch {
			case r.Admin || !overlaps(w.Result, r):
			case w.Exclusive || r.Exclusive || !sameDevice(w.Result, r) || w.Sharing != r.Sharing:
				return &HeldError{w.Device, holderOf(c)}
			case w.Device != wholeName(w.Result) && w.Device == r.Device: // a share that is a device of its own
				return &HeldError{w.Device, holderOf(c)}
			default:
				n += max(r.Shares, 1)
			}
		}
		if n > 0 {
			shares.Held += n
			shares.Holders = append(shares.Holders, holderOf(c))
		}
	}
	if shares.All > 0 && shares.Held+shares.Want > shares.All {
		return shares
	}
	return nil
}

// overlaps reports whether two results are on the same hardware. A MIG instance that was made again may have the ID of one that is held, in
// another place.
func overlaps(a, b prepared.Result) bool { return sameDevice(a, b) || a.At.Overlaps(b.At) }

func sameDevice(a, b prepared.Result) bool {
	x, _ := a.Unit.Split()
	y, _ := b.Unit.Split()
	return x == y
}

// holder returns the claim that holds hardware of a placement.
func holder(at gpu.Placement, bootID string, held []prepared.Claim) (string, bool) {
	for _, c := range held {
		if !c.Holds(bootID) {
			continue
		}
		for _, r := range c.Results {
			if !r.Admin && r.At.Overlaps(at) {
				return holderOf(c), true
			}
		}
	}
	return "", false
}

// wholeName is the name of the device that a result is, or has a share of.
func wholeName(r prepared.Result) string {
	id, _ := r.Unit.Split()
	return resourceslice.DeviceName(inventory.Unit{Device: gpu.Device{ID: id}})
}
