package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// rebuildLost makes the records again that are lost. The devices of one that it can't make are held, as the kubelet
// lists them. If one of these is not known, no device may be given out.
func (a *Adapter) rebuildLost(ctx context.Context, store *prepared.Store, f *found) {
	var unavailable error
	for name, lost := range a.lost(store, f.answer) {
		err := unavailable
		if err == nil {
			err = a.rebuild(ctx, lost, store)
		}
		if errors.Is(err, kubeapi.ErrUnavailable) { // one wait is enough
			unavailable = err
		}
		if err == nil {
			continue
		}
		text := fmt.Sprintf("the record of claim %s (pod %s) is lost and can't be made again: %s", name, lost[0].Pod, oneLine(err))
		if held, known := a.heldByPods(lost); known {
			f.lost = append(f.lost, held...)
			f.lostTexts = append(f.lostTexts, text+"; no other work gets its devices")
		} else {
			f.foreign = append(f.foreign, obstacle{lost[0].Namespace, text})
		}
	}
	slices.SortFunc(f.lost, holders.Holder.Compare)
	slices.Sort(f.lostTexts)
	slices.SortFunc(f.foreign, func(a, b obstacle) int { return strings.Compare(a.text, b.text) })
}

// heldByPods returns what pods have through a claim; known is false if a device is not.
func (a *Adapter) heldByPods(pods []PodClaim) (all []holders.Holder, known bool) {
	for _, p := range pods {
		d, share, known := hardwareOf(a.src.Current(), p.Device)
		if !known {
			return nil, false
		}
		h := holders.Holder{
			Work: holders.Work{Orchestrator: holders.Kubernetes, Namespace: p.Namespace, Claim: p.Name},
			API:  inventory.DRA, Device: d.ID, At: d.At,
		}
		if share != "" {
			h.Sharing, h.Unit = "not known", inventory.UnitID(string(d.ID)+"::"+share)
		}
		if !slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	return all, true
}

// rebuild makes the record of a claim again, from the claim and from what a pod has of it. The API server has its UID, which Unprepare
// will name. The next Prepare completes the record. A claim that was unprepared meanwhile has no record:
//
//	kubelet    list of pods ... with the claim       Unprepare
//	agent                                            record removed    rebuild: Removed, or RemovedElsewhere by another process
func (a *Adapter) rebuild(ctx context.Context, pods []PodClaim, store *prepared.Store) error {
	limit, cancel := context.WithTimeout(ctx, a.limits.query)
	defer cancel()
	claim, err := a.opts.API.Claim(limit, pods[0].Namespace, pods[0].Name)
	if err != nil {
		return err
	}
	uid := claim.Metadata.UID
	if err := prepared.CheckUID(uid); err != nil {
		return err
	}
	release, err := a.locks.lock(limit, uid)
	if err != nil {
		return err
	}
	defer release()
	if _, known := store.Get(uid); known || store.Removed(uid) || store.RemovedElsewhere(uid) {
		return nil
	}
	if claim.Status.Allocation == nil {
		return ErrNotAllocated
	}
	c := prepared.Claim{BootID: a.opts.BootID, Namespace: pods[0].Namespace, Name: pods[0].Name, UID: uid, State: prepared.Started}
	for _, one := range claim.Status.Allocation.Devices.Results {
		if one.Driver != resourceslice.Driver {
			continue
		}
		r, err := a.rebuiltResult(one, pods)
		if err != nil {
			return err
		}
		c.Results = append(c.Results, r)
	}
	if len(c.Results) == 0 {
		return ErrNoDevices
	}
	c.Pod, _ = a.podToLimit(claim.Status.ReservedFor, c) // the next Prepare has the error
	a.opts.Log.Warn("the record of a prepared claim was lost and is made again", "namespace", c.Namespace, "claim", c.Name, "uid", uid, "pod", pods[0].Pod)
	if err := store.Put(c); err != nil {
		return err // it is reserved all the same
	}
	return nil
}

// rebuiltResult is the record of a result of which the container has the device. A GPU that is not in the inventory is known by its name.
// The name of a MIG instance does not have its GPU: without that, the GPU and its other instances would count as free.
func (a *Adapter) rebuiltResult(one kubeapi.DeviceRequestAllocationResult, pods []PodClaim) (prepared.Result, error) {
	request, _, _ := strings.Cut(one.Request, "/")
	r := prepared.Result{Request: request, Pool: one.Pool, Device: one.Device, ShareID: one.ShareID, Admin: one.AdminAccess}
	for _, p := range pods {
		if p.Device == one.Device {
			for _, name := range p.CDI { // the kubelet's list has the names of all devices of the claim, several times
				if !slices.Contains(r.CDI, name) {
					r.CDI = append(r.CDI, name)
				}
			}
		}
	}
	inv := a.src.Current()
	shares, err := consumedShares(one)
	if err != nil {
		return r, err
	}
	if u, ok := resourceslice.Resolve(inv, one.Device); ok {
		if u, err = asAllocated(one, u); err == nil {
			r.Unit, r.At, r.Exclusive, r.Published = u.ID, u.Device.At, u.Sharing.Mode == inventory.Exclusive, a.published(inv, one.Device, u)
			if !r.Exclusive {
				err = setShare(&r, one, u)
			}
			return r, err
		}
	}
	d, share, known := hardwareOf(inv, one.Device)
	if !known {
		return r, unknownDevice(inv, one.Device)
	}
	if r.Unit, r.At, r.Exclusive = inventory.UnitID(d.ID), d.At, share == "" && one.ShareID == ""; !r.Exclusive {
		r.Unit, r.Shares = inventory.UnitID(string(d.ID)+"::"+cmp.Or(share, "0")), shares
	}
	return r, nil
}

// hardwareOf returns the device of a name in a slice that is not offered, and the number of the share; false if the GPU is not known.
func hardwareOf(inv *inventory.Allocatable, device string) (d gpu.Device, share string, known bool) {
	name, share, _ := strings.Cut(device, "-s")
	for d := range inv.Hardware() {
		if resourceslice.DeviceName(inventory.Unit{Device: d}) == name {
			return d, share, true
		}
	}
	uuid, isGPU := strings.CutPrefix(name, "gpu-")
	id := gpu.DeviceID("GPU-" + uuid)
	return gpu.Device{ID: id, At: gpu.WholeGPU(id)}, share, isGPU && ownDeviceName.MatchString(device)
}

// checkVanished deals with records whose file is gone. If another process has unprepared the claim, it is forgotten. Else the file
// was removed by hand: it is written again if a pod has the claim, or the kubelet may not know all pods.
func (a *Adapter) checkVanished(store *prepared.Store, answer PodClaims) {
	a.forgetUnprepared(store)
	for _, c := range store.Vanished() {
		a.withClaim(c.UID, func() {
			now, ok := store.Get(c.UID)
			if !ok || store.Removed(c.UID) || store.RemovedElsewhere(c.UID) {
				return
			}
			if !answer.Partial && !answer.have(c) {
				a.opts.Log.Info("the record of a claim that no pod has was removed", "namespace", c.Namespace, "claim", c.Name, "uid", c.UID)
				_ = a.specs.remove(c.UID) // else at the next start
				store.Forget(c.UID)
				return
			}
			a.opts.Log.Warn("the record of a prepared claim was removed: it is written again", "namespace", c.Namespace, "claim", c.Name, "uid", c.UID)
			if err := store.Put(now); err != nil {
				a.setProblems(problem.ClaimState, oneLine(err))
			}
		})
	}
}

// forgetUnprepared frees the devices of claims that another process has unprepared: during an update the kubelet calls one of two.
func (a *Adapter) forgetUnprepared(store *prepared.Store) {
	for _, c := range store.Vanished() {
		a.withClaim(c.UID, func() {
			if !store.Removed(c.UID) && store.RemovedElsewhere(c.UID) {
				a.opts.Log.Info("claim unprepared by another process", "namespace", c.Namespace, "claim", c.Name, "uid", c.UID)
				store.Forget(c.UID)
			}
		})
	}
}

// have reports whether a pod has a claim.
func (p PodClaims) have(c prepared.Claim) bool {
	return slices.ContainsFunc(p.Claims, func(p PodClaim) bool { return p.Namespace == c.Namespace && p.Name == c.Name })
}

// removeAbandoned removes records for which Unprepare will never come: after the kubelet's own record (dra_manager_state) was deleted, it does not
// know which claims it has prepared. A record is removed when for some minutes no pod had the claim and the API server did not have it,
// or not allocated: it removes an allocation only when all pods of the claim have ended.
func (a *Adapter) removeAbandoned(ctx context.Context, store *prepared.Store, answer PodClaims) {
	now, gone := time.Now(), map[string]time.Time{}
	for _, c := range store.All() {
		if answer.Partial || answer.have(c) {
			continue
		}
		if isGone, err := a.isGone(ctx, c); err != nil {
			return // the API server does not answer
		} else if !isGone {
			continue
		}
		since, known := a.abandoned[c.UID]
		if !known {
			since = now
		}
		if gone[c.UID] = since; now.Sub(since) < a.limits.abandoned {
			continue
		}
		a.withClaim(c.UID, func() {
			if isGone, err := a.isGone(ctx, c); err != nil || !isGone { // it was allocated and prepared anew meanwhile
				return
			}
			a.opts.Log.Warn("prepared claim removed: neither the kubelet nor the API server has it", "namespace", c.Namespace, "claim", c.Name, "uid", c.UID)
			if err := a.remove(c.UID, store); err != nil {
				a.setProblems(problem.ClaimState, oneLine(err))
			}
		})
	}
	a.abandoned = gone
}

// isGone reports whether the API server does not have a claim, or not allocated.
func (a *Adapter) isGone(ctx context.Context, c prepared.Claim) (bool, error) {
	limit, cancel := context.WithTimeout(ctx, a.limits.query)
	defer cancel()
	now, err := a.opts.API.Claim(limit, c.Namespace, c.Name)
	if answer, ok := errors.AsType[*kubeapi.StatusError](err); ok && answer.Unserved() {
		return false, err // of a server that has no claims at all, or is none
	}
	if errors.Is(err, kubeapi.ErrNotFound) {
		return true, nil
	}
	return now.Metadata.UID != c.UID || now.Status.Allocation == nil, err
}
