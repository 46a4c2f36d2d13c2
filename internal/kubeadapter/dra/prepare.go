package dra

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// claimRef is a claim as the kubelet names it.
type claimRef struct{ namespace, name, uid string }

// prepare prepares a claim and returns its record. A claim that is prepared has the same answer again, from the record alone if the API
// server does not answer, and else unless it was allocated anew since (see allocatedAnew). After an error, or the end of the process at any
// point, the next call completes what this one began:
//
//	devices reserved    in memory
//	record "started"    only for a client of an MPS control daemon
//	specification       the same
//	record "complete"
//	records of others read again
//	memory of the pod limited    only in pools with a limit: see LimitedPods
//	answer
func (a *Adapter) prepare(ctx context.Context, ref claimRef, step *step) (prepared.Claim, error) {
	if err := prepared.CheckUID(ref.uid); err != nil {
		return prepared.Claim{}, err
	}
	step.set("an earlier call for this claim has not ended; does the disk of " + a.claimsDir() + " respond?")
	release, err := a.locks.lock(ctx, ref.uid)
	if err != nil {
		return prepared.Claim{}, err
	}
	defer release()
	step.set("the prepared claims in " + a.claimsDir() + " are not read; does the disk respond?")
	store, err := a.awaitStore(ctx)
	if err != nil {
		return prepared.Claim{}, err
	}
	if store.RemovedElsewhere(ref.uid) {
		store.Forget(ref.uid)
	}
	var claim kubeapi.ResourceClaim
	anew := false
	c, ok := store.Get(ref.uid)
	if ok && c.State == prepared.Complete && c.Holds(a.opts.BootID) {
		if claim, anew = a.allocatedAnew(ctx, ref, c); !anew {
			step.set("the CDI specification in " + a.specs.folder + " is not written; does the disk respond?")
			if err := a.specs.ensure(c); err != nil {
				return c, err
			}
			return c, a.limitPod(ctx, c, claim, step)
		}
	} else {
		step.set("the API server does not answer")
		if claim, err = a.readClaim(ctx, ref); err != nil {
			return prepared.Claim{}, err
		}
	}
	step.set("the prepared claims in " + a.claimsDir() + " are not read; does the disk respond?")
	if err := a.readOthers(store); err != nil {
		return prepared.Claim{}, err
	}
	a.forgetUnprepared(store)
	step.set("the devices are not available")
	got, err := a.reserve(ctx, ref, claim, store)
	if err != nil {
		return prepared.Claim{}, err
	}
	step.set("the prepared claim in " + a.claimsDir() + " is not written; does the disk respond?")
	if err := a.record(got.claim, store); err != nil {
		return prepared.Claim{}, err
	}
	if err := a.confirm(got, store); err != nil {
		return prepared.Claim{}, err
	}
	if anew {
		a.releasePod(ctx, c)
	}
	c, _ = store.Get(ref.uid)
	if err := a.limitPod(ctx, c, claim, step); err != nil {
		return prepared.Claim{}, err
	}
	if a.opts.Reserved != nil {
		a.opts.Reserved(got.devices)
	}
	return c, nil
}

// confirm fails if another process has stored a claim on the same devices since they were found free, and removes the record again. Of two
// processes the one that stores its record last finds that of the other; both may.
//
//	this process      records read    device free    record stored                           records read: conflict, record removed
//	another one                 records read     device free    record stored    records read: conflict, record removed
func (a *Adapter) confirm(got reservation, store *prepared.Store) error {
	if err := a.readOthers(store); err != nil {
		store.Reserve(got.claim) // "started", so that the next Prepare does not answer from it
		return err
	}
	held := holders.NewSet(heldBy(claimsBeside(got.claim.UID, a.opts.BootID, store.All())))
	own := got.claim
	for i, w := range got.wants {
		own.Results = got.claim.Results[:i]
		if err := conflict(w, held, holders.NewSet(own.Holders())); err != nil {
			store.Reserve(got.claim) // the same, if it can't be removed
			if left := a.remove(got.claim.UID, store); left != nil {
				return joined{err, left}
			}
			return err
		}
	}
	return nil
}

// record stores a claim whose devices are reserved. A specification must not be left behind by a process that is killed, so the record comes
// first; a claim without one is stored once, since each write waits for the disk.
func (a *Adapter) record(c prepared.Claim, store *prepared.Store) error {
	if c.HasSpec() {
		c.State = prepared.Started
		if err := store.Put(c); err != nil {
			store.Unreserve(c.UID)
			return err
		}
		if err := a.specs.ensure(c); err != nil {
			return err
		}
	}
	c.State, c.Since = prepared.Complete, time.Now().UTC().Truncate(time.Second)
	err := store.Put(c)
	if err != nil {
		store.Unreserve(c.UID)
	}
	return err
}

// reserve reserves the devices of a claim. While a condition lasts that is expected to end soon, it waits until ctx ends: the kubelet tries
// again only after a minute.
func (a *Adapter) reserve(ctx context.Context, ref claimRef, claim kubeapi.ResourceClaim, store *prepared.Store) (reservation, error) {
	r, err := a.newRequest(ref, claim)
	if err != nil {
		return reservation{}, err
	}
	began := time.Now()
	for {
		_, changed := a.changes.LoadNext()
		got, wait, err := a.tryReserve(r, store)
		if err == nil || !wait {
			return got, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return got, &PendingError{What: "not available in time", Waited: time.Since(began), Err: err}
		}
	}
}

// unprepare ends what prepare did, from disk alone. A claim that is not prepared is no error.
func (a *Adapter) unprepare(ctx context.Context, ref claimRef, step *step) error {
	if err := prepared.CheckUID(ref.uid); err != nil {
		return err
	}
	step.set("an earlier call for this claim has not ended; does the disk of " + a.claimsDir() + " respond?")
	release, err := a.locks.lock(ctx, ref.uid)
	if err != nil {
		return err
	}
	defer release()
	step.set("the prepared claims in " + a.claimsDir() + " are not read; does the disk respond?")
	store, err := a.awaitStore(ctx)
	if err != nil {
		return err
	}
	c, _ := store.Get(ref.uid)
	step.set("what was prepared in " + a.specs.folder + " and " + a.claimsDir() + " is not removed; do the disks respond?")
	if err := a.remove(ref.uid, store); err != nil {
		return err
	}
	a.releasePod(ctx, c)
	return nil
}

// remove removes the specification of a claim, and then its record. The caller has the lock of the claim.
func (a *Adapter) remove(uid string, store *prepared.Store) error {
	if err := a.specs.remove(uid); err != nil {
		return err
	}
	return store.Remove(uid)
}
