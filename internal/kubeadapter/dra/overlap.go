package dra

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// want is a device that a claim is to get.
type want struct {
	prepared.Result
	replicas int // shares that the device has; 0 = it is exclusive
}

// claimsBeside returns the claims that hold devices in this boot, without the one with a UID; "" = all of them.
func claimsBeside(uid, bootID string, all []prepared.Claim) (held []prepared.Claim) {
	for _, c := range all {
		if c.UID != uid && c.Holds(bootID) {
			held = append(held, c)
		}
	}
	return held
}

// conflict returns why a claim can't have a device beside what has devices, itself among them: *HeldError or *SharesError. Admin access holds
// nothing and conflicts with nothing.
func conflict(w want, held ...holders.Set) error {
	if w.Admin {
		return nil
	}
	h := w.Holder()
	shares := &SharesError{Device: w.Device, Want: max(w.Shares, 1), All: w.replicas}
	for _, set := range held {
		if other, ok := set.Conflict(h); ok {
			return &HeldError{w.Device, other.Work.String()}
		}
		by, n := set.Shares(h.Device, h.At)
		shares.Held += n
		for _, other := range by {
			shares.Holders = append(shares.Holders, other.Work.String())
		}
	}
	if shares.Holders = slices.Compact(shares.Holders); shares.All > 0 && shares.Held+shares.Want > shares.All {
		return shares
	}
	return nil
}

// heldBy are claims as holders of their devices.
func heldBy(claims []prepared.Claim) (all []holders.Holder) {
	for _, c := range claims {
		all = append(all, c.Holders()...)
	}
	return all
}
