package draadapter

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/draadapter/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// claimRef is a claim as the kubelet names it.
type claimRef struct{ namespace, name, uid string }

// prepare prepares a claim and returns its record. A claim that is prepared has the same answer again, from the record alone if the API
// server does not answer, and else unless it was allocated anew since (see allocatedAnew). After an error, or the end of the process at any
// point, the next call completes what this one began:
//
//	devices held        in memory
//	record "started"    only for a client of an MPS control daemon
//	specification       the same
//	record "complete"
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
	if c, ok := store.Get(ref.uid); ok && c.State == prepared.Complete && c.Holds(a.opts.BootID) {
		var anew bool
		if claim, anew = a.allocatedAnew(ctx, ref, c); !anew {
			step.set("the CDI specification in " + a.specs.folder + " is not written; does the disk respond?")
			return c, a.specs.ensure(c)
		}
	} else {
		step.set("the API server does not answer")
		if claim, err = a.readClaim(ctx, ref); err != nil {
			return prepared.Claim{}, err
		}
	}
	step.set("the prepared claims in " + a.claimsDir() + " are not read; does the disk respond?")
	if err := store.Refresh(); err != nil {
		return prepared.Claim{}, err
	}
	a.forgetUnprepared(store)
	step.set("the devices are not available")
	c, devices, err := a.reserve(ctx, ref, claim, store)
	if err != nil {
		return prepared.Claim{}, err
	}
	step.set("the prepared claim in " + a.claimsDir() + " is not written; does the disk respond?")
	if err := a.record(c, store); err != nil {
		return prepared.Claim{}, err
	}
	if c, _ = store.Get(ref.uid); a.opts.Reserved != nil {
		a.opts.Reserved(devices)
	}
	return c, nil
}

// record stores a claim whose devices are held. A specification must not be left behind by a process that is killed, so the record comes
// first; a claim without one is stored once, since each write waits for the disk.
func (a *Adapter) record(c prepared.Claim, store *prepared.Store) error {
	if c.HasSpec() {
		c.State = prepared.Started
		if err := store.Put(c); err != nil {
			store.Release(c.UID)
			return err
		}
		if err := a.specs.ensure(c); err != nil {
			return err
		}
	}
	c.State, c.Since = prepared.Complete, time.Now().UTC().Truncate(time.Second)
	err := store.Put(c)
	if err != nil {
		store.Release(c.UID)
	}
	return err
}

// reserve holds the devices of a claim. While a condition lasts that is expected to end soon, it waits until ctx ends: the kubelet tries
// again only after a minute.
func (a *Adapter) reserve(ctx context.Context, ref claimRef, claim kubeapi.ResourceClaim, store *prepared.Store) (prepared.Claim, []gpu.Device, error) {
	r, err := a.newRequest(ref, claim)
	if err != nil {
		return prepared.Claim{}, nil, err
	}
	began := time.Now()
	for {
		_, changed := a.changes.LoadNext()
		c, devices, wait, err := a.tryReserve(r, store)
		if err == nil || !wait {
			return c, devices, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return c, nil, &PendingError{What: "not available in time", Waited: time.Since(began), Err: err}
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
	step.set("what was prepared in " + a.specs.folder + " and " + a.claimsDir() + " is not removed; do the disks respond?")
	return a.remove(ref.uid, store)
}

// remove removes the specification of a claim, and then its record. The caller has the lock of the claim.
func (a *Adapter) remove(uid string, store *prepared.Store) error {
	if err := a.specs.remove(uid); err != nil {
		return err
	}
	return store.Remove(uid)
}
