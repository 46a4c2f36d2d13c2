package dra

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// A record that can't be read concerns its claim alone: Prepare and Unprepare of that one need no record, and other claims have theirs. What it may
// hold is given out through no other API:
//
//   - a GPU that is offered through another API has no claim: it was moved there when no claim had it;
//   - a claim that a pod has is in the kubelet's list, with its name, and the API server has the rest: its record is made again;
//   - a claim that no complete list has for some minutes holds nothing: its record is set aside. (Not in the list are claims of init
//     containers that end, pkg/kubelet/apis/podresources/server_v1.go.)
//
// Through DRA devices are given out as soon as the kubelet has listed all pods: the scheduler has the allocation of the claim.

// Unread returns the records that can't be read, of claims that may hold any of mayHaveClaims.
func (a *Adapter) Unread() []prepared.Unread {
	if a.isLoaded() {
		return a.store.Load().Unread()
	}
	if dir := a.loadErr.Load(); dir != nil {
		return []prepared.Unread{*dir}
	}
	return nil
}

// mayHaveClaims returns the GPUs that are not offered through another API, and so may have a claim.
func (a *Adapter) mayHaveClaims() (all []gpu.DeviceID) {
	inv, last := a.src.Current(), gpu.DeviceID("")
	for d := range inv.Hardware() {
		if of := d.At.GPU; of != last && mayHaveClaim(inv, of) {
			all, last = append(all, of), of
		}
	}
	return all
}

func mayHaveClaim(inv *inventory.Allocatable, of gpu.DeviceID) bool {
	one, assigned := inv.Owner(of)
	return !assigned || one.API == "" || one.API == inventory.DRA
}

// setAsideUnread sets records aside that could not be read before an answer of the kubelet that has all pods, if no such answer of the last minutes
// has their claims.
func (a *Adapter) setAsideUnread(store *prepared.Store, unread []prepared.Unread) {
	now, unlisted := time.Now(), map[string]time.Time{}
	var empty []prepared.Unread
	for _, u := range unread {
		since, known := a.unlisted[u.UID]
		if !known {
			since = now
		}
		if unlisted[u.UID] = since; now.Sub(since) >= a.limits.abandoned {
			empty = append(empty, u)
		}
	}
	a.unlisted = unlisted
	store.SetAside(empty)
}
