package dra

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// A record that can't be read concerns its claim alone: Prepare and Unprepare of that one need no record, and other
// claims have theirs. What it may hold is given out to no other work: the GPUs that a damaged one names, or else any.
// Through other APIs that is until one of these shows what it holds:
//
//   - a GPU that is offered through another API has no claim: it was moved there when no claim had it;
//   - a claim that a pod has is in the kubelet's list, with its name, and the API server has the rest: its record is made again;
//   - a claim that no complete list has for some minutes holds nothing: its record is set aside. (Not in the list are claims of init
//     containers that end, pkg/kubelet/apis/podresources/server_v1.go.)
//
// Through DRA a GPU that a damaged record names waits for the same. If a record names none, all devices wait until the
// kubelet has listed all pods; then the scheduler has the allocation of the claim.

// Unread returns the records that can't be read, of claims that may hold any of mayHold.
func (a *Adapter) Unread() []prepared.Unread {
	if a.isLoaded() {
		return a.store.Load().Unread()
	}
	if dir := a.loadErr.Load(); dir != nil {
		return []prepared.Unread{*dir}
	}
	return nil
}

// mayHold returns the GPUs that the claim of a record may hold which can't be read. named means that these are the ones
// that the record names.
func (a *Adapter) mayHold(u prepared.Unread) (gpus []gpu.DeviceID, named bool) {
	inv := a.src.Current()
	for d := range inv.Hardware() {
		if of := d.At.GPU; mayHaveClaim(inv, of) && (u.Names(d.ID) || u.Names(of)) {
			gpus = append(gpus, of)
		}
	}
	if len(gpus) > 0 {
		return slices.Compact(gpus), true
	}
	return a.mayHaveClaims(), false
}

// conflictsUnread returns *UnreadError if a claim may have a device whose record is damaged. Of a record that names no
// device, the admission decides.
func (a *Adapter) conflictsUnread(w want, r claimRef, unread []prepared.Unread) error {
	for _, u := range unread {
		if u.UID == r.uid || w.Admin {
			continue
		}
		if gpus, named := a.mayHold(u); named && slices.Contains(gpus, w.At.GPU) {
			return &UnreadError{Device: w.Device, Record: u, Namespace: r.namespace}
		}
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
