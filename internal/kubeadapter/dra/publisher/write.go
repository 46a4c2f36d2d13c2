package publisher

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// parallelWrites is how many slices are created, or get taints, at the same time: with one after the other, those of a large node take as many
// answers of the server as there are slices.
const parallelWrites = 4

// batchSize returns how many of the writes are sent at the same time, the first ones; 0 = not before pause is over.
func (p *Publisher) batchSize(writes []write) (n int, pause time.Duration) {
	if writes[0].verb != create {
		return 1, 0
	}
	for n < min(len(writes), parallelWrites) && writes[n].verb == create {
		if pause = p.creates.take(time.Now()); pause > 0 {
			break
		}
		n++
	}
	return n, pause
}

// dryRunPlan does a plan as dry runs: a write that is refused would leave the pool incomplete. It reports whether there has to be another plan.
func (p *Publisher) dryRunPlan(ctx context.Context, todo plan) (again bool, err error) {
	for _, w := range todo.writes {
		if w.verb == remove {
			continue
		}
		_, err := answer(ctx, p, func() (kubeapi.ResourceSlice, error) { return request(ctx, p.opts.API, w, kubeapi.DryRun) })
		if errors.Is(err, kubeapi.ErrInvalid) {
			err = p.findRefused(ctx, w.slice.Spec.Devices, err)
			return err == nil, err
		}
		if err != nil {
			return p.handleFailure(ctx, w, err)
		}
	}
	return false, nil
}

// write does the writes of a plan. It reports whether another plan has to follow at once.
func (p *Publisher) write(ctx context.Context, todo plan, changes <-chan change) (again bool, err error) {
	var firstErr error
	planned := p.due
	p.creates.limitCreates(todo.slices)
	for rest := todo.writes; len(rest) > 0; {
		n, pause := p.batchSize(rest)
		if n == 0 {
			p.compareAt(time.Now().Add(pause))
			return false, firstErr
		}
		for i, err := range p.send(ctx, rest[:n]) {
			w := rest[i]
			switch {
			case err == nil:
			case w.foreign: // the own slices have a higher generation
				firstErr = cmp.Or(firstErr, p.other.failed(err, time.Now()))
			case errors.Is(err, kubeapi.ErrInvalid) && w.verb != remove:
				err = p.findRefused(ctx, w.slice.Spec.Devices, err)
				return err == nil, err
			default:
				return p.handleFailure(ctx, w, err)
			}
		}
		p.takeDevices()
		p.applyChanges(changes)
		if p.due.Before(planned) && !p.due.After(time.Now()) {
			return true, nil
		}
		rest = rest[n:]
	}
	return firstErr == nil, firstErr
}

// send sends writes at the same time, and takes their answers.
func (p *Publisher) send(ctx context.Context, writes []write) []error {
	got, errs := make([]kubeapi.ResourceSlice, len(writes)), make([]error, len(writes))
	var sent sync.WaitGroup
	for i, w := range writes {
		sent.Go(func() { got[i], errs[i] = request(ctx, p.opts.API, w, kubeapi.Store) })
	}
	_ = p.await(ctx, func() error { sent.Wait(); return nil }) // each has its own
	for i, w := range writes {
		p.writes.count(w.verb, errs[i])
		if errs[i] == nil {
			p.current.LastWrite = time.Now()
			p.retry.reset()
			p.recordWrite(w, got[i])
			if w.foreign {
				p.other.deleted(time.Now())
				p.log.Warn("slice of another driver of this name deleted: it is not published by this agent", "slice", w.slice.Metadata.Name)
			}
		}
	}
	return errs
}

// request sends a write and returns the slice as the server stored it. A delete is never a dry run.
func request(ctx context.Context, api *kubeapi.Client, w write, mode kubeapi.Write) (kubeapi.ResourceSlice, error) {
	switch w.verb {
	case create:
		return api.CreateSlice(ctx, w.slice, mode)
	case update:
		return api.UpdateSlice(ctx, w.slice, mode)
	case remove:
		err := api.DeleteSlice(ctx, w.slice.Metadata.Name, w.slice.Metadata.UID)
		if errors.Is(err, kubeapi.ErrNotFound) {
			err = nil
		}
		return kubeapi.ResourceSlice{}, err
	}
	return kubeapi.ResourceSlice{}, nil
}

// recordWrite records the answer to a write.
func (p *Publisher) recordWrite(w write, got kubeapi.ResourceSlice) {
	name := w.slice.Metadata.Name
	if w.verb == remove {
		p.cache.recordDelete(name)
		return
	}
	p.compareAnswer(w.slice.Spec, got.Spec)
	if equalDevices(w.slice.Spec.Devices, got.Spec.Devices) {
		got.Spec.Devices = w.slice.Spec.Devices // one copy in memory
	} else {
		p.altered[name] = newSentAndStored(w.slice.Spec, got.Spec)
	}
	p.cache.recordWrite(got)
}
