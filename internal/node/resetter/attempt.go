package resetter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// attempt is one reset. It is of one goroutine.
type attempt struct {
	*Resetter
	reset.Begin
	policy reset.Policy
	cancel context.CancelCauseFunc

	began       time.Time
	taken       []Taken // the GPU itself first
	called      bool    // nvidia-smi
	persistence bool    // is to be restored
}

// cancelError ends a reset that has not called nvidia-smi, and does not mean that something has the GPU.
type cancelError struct{ why string }

func (e *cancelError) Error() string { return e.why }

// ErrEnding is why no reset begins while the agent ends, and one that has not called nvidia-smi ends.
var ErrEnding error = &cancelError{"the agent ends"}

var errWantedBack error = &cancelError{"the GPU is wanted back"}

// run makes the reset, and records its end before the GPUs are given back.
func (a *attempt) run(ctx context.Context) {
	a.began = time.Now()
	a.opts.Log.Info("reset begins", "id", a.GPU, "cause", a.Cause, "with", a.With)
	err := a.reset(ctx)
	end := reset.End{
		Number: a.Number, Outcome: outcomeOf(err, a.called), At: time.Now(), Took: time.Since(a.began), Cause: a.Cause, Text: textOf(err),
	}
	a.change(func(s reset.State) reset.State {
		a.Resetter.cancel = nil
		s = s.Ended(a.GPU, end, end.At)
		if a.called && !a.persistence {
			s = s.Restored(a.GPU)
		}
		return s
	})
	for _, t := range a.taken {
		if t != nil {
			t.Release()
		}
	}
	a.report(end)
	a.show(func(p *Progress) { p.End = &end })
	a.resets.Store("")
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.opts.Policy.On() {
		a.review() // no pass does
	}
	a.beginRestore()
	a.wake()
}

// reset does all that comes before the record of the end.
func (a *attempt) reset(ctx context.Context) error {
	if err := a.takeAll(ctx); err != nil {
		return err
	}
	target, err := a.look(ctx)
	if err != nil {
		return err
	}
	if err := a.stopWatchers(ctx, target); err != nil {
		return err
	}
	a.phase("closing the driver")
	a.taken[0].ReleaseDriver()
	err = a.call(ctx, target)
	a.phase("opening the driver")
	a.taken[0].OpenDriver()
	if a.called {
		ctx = context.WithoutCancel(ctx)
		if err == nil {
			a.opts.Node.WasReset(a.GPU)
		}
	}
	reading, stop := context.WithTimeout(ctx, readWithin)
	defer stop()
	if unread := a.opts.Node.AwaitReading(reading); unread != nil && ctx.Err() == nil {
		a.opts.Log.Warn("the GPUs are not read after a reset", "id", a.GPU, "error", unread)
	}
	return err
}

// takeAll takes the GPU and its P2P group.
func (a *attempt) takeAll(ctx context.Context) error {
	a.phase("taking " + all(a.Begin) + " from every API, when nothing has had it for 30 s")
	taking, stop := context.WithTimeout(ctx, takeWithin)
	defer stop()
	ids := slices.Concat([]gpu.DeviceID{a.GPU}, a.With)
	a.taken = make([]Taken, len(ids))
	group, taking := errgroup.WithContext(taking)
	for i, id := range ids {
		group.Go(func() (err error) {
			if a.taken[i], err = a.opts.Node.Take(taking, id); err != nil {
				a.taken[i] = nil // not a nil pointer in an interface
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	for _, t := range a.taken {
		go func() {
			select {
			case <-t.WantedBack():
				a.cancel(errWantedBack)
			case <-ctx.Done():
			}
		}()
	}
	return nil
}

// look looks once more whether the reset may begin, and whether anything but the agents has the GPUs open.
func (a *attempt) look(ctx context.Context) (target gpureset.Target, err error) {
	a.phase("looking for processes that have it open")
	a.mu.Lock()
	s := a.state
	a.mu.Unlock()
	if why, ok := a.policy.Still(s, a.opts.Node.See(), a.GPU); !ok {
		return target, &cancelError{why}
	}
	for _, id := range a.With {
		if _, err := a.lookAt(ctx, id); err != nil {
			return target, err
		}
	}
	return a.lookAt(ctx, a.GPU)
}

// lookAt returns where a GPU is, and fails with *gpureset.InUseError if something has it open but agents, and programs
// that are stopped for a reset.
func (r *Resetter) lookAt(ctx context.Context, id gpu.DeviceID) (gpureset.Target, error) {
	target, known := r.opts.Node.Target(id)
	if !known {
		return target, &cancelError{"the driver does not list " + string(id)}
	}
	look, err := r.opts.Resetter.Look(ctx, target)
	if err != nil {
		return target, err
	}
	closes := func(c gpureset.Client) bool { return r.opts.Node.IsAgent(c) || r.opts.Pause.Has(c.Name) }
	if others := slices.DeleteFunc(look.Clients, closes); len(others) > 0 {
		return target, &gpureset.InUseError{GPU: id, Clients: others}
	}
	return target, nil
}

// call calls nvidia-smi, when the driver is closed.
func (a *attempt) call(ctx context.Context, target gpureset.Target) error {
	closing, stop := context.WithTimeout(ctx, releaseWithin)
	defer stop()
	if err := a.opts.Node.AwaitReleased(closing); err != nil {
		return cmp.Or(context.Cause(ctx), fmt.Errorf("this agent has the driver open: %w", err))
	}
	look, err := a.awaitClosed(ctx, target)
	if err != nil {
		return err
	}
	if err := a.commit(ctx, look.Persistence); err != nil {
		return err
	}
	a.phase("resetting it by nvidia-smi")
	left, err := splitPersistence(a.opts.Resetter.Reset(context.WithoutCancel(ctx), target))
	a.persistence = left != nil
	if left != nil {
		a.notePersistence(a.GPU, left.Err)
	}
	return err
}

// awaitClosed waits until no process has the GPU open: other agents of the node close it.
func (a *attempt) awaitClosed(ctx context.Context, target gpureset.Target) (gpureset.Look, error) {
	for deadline := time.Now().Add(releaseWithin); ; {
		look, err := a.opts.Resetter.Look(ctx, target)
		switch {
		case ctx.Err() != nil:
			return look, context.Cause(ctx)
		case err != nil:
			return look, fmt.Errorf("whether processes have it open is not known: %w", err)
		case len(look.Clients) == 0:
			return look, nil
		case time.Now().After(deadline):
			return look, &gpureset.InUseError{GPU: target.GPU, Clients: look.Clients}
		}
		watch.Sleep(ctx, lookEvery)
	}
}

// commit records on disk that nvidia-smi is called. From then on the reset is not cancelled.
func (a *attempt) commit(ctx context.Context, persistence bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s := a.state.Calls(a.GPU, persistence)
	if err := a.file.Store(s); err != nil {
		return &cancelError{"the record of resets can't be written: " + err.Error()}
	}
	a.set(s)
	a.called, a.Resetter.cancel = true, nil
	return nil
}

// outcomeOf is the outcome of a reset by its error. What is found before nvidia-smi is called, and is no reason to cancel, counts as a GPU in use, also if it
// is only that this can't be known: a reset that is cancelled is tried again soon, and would take the GPU and release the driver again and again.
func outcomeOf(err error, called bool) reset.Outcome {
	_, cancelled := errors.AsType[*cancelError](err)
	_, inUse := errors.AsType[*gpureset.InUseError](err)
	_, unavailable := errors.AsType[*gpureset.UnavailableError](err) // then nothing was called
	_, busy := errors.AsType[*gpureset.BusyError](err)
	refused, ok := errors.AsType[*gpureset.RefusedError](err)
	switch {
	case err == nil:
		return reset.Done
	case ok && slices.Contains([]gpureset.Refusal{gpureset.NotSupported, gpureset.Linked, gpureset.NotPermitted}, refused.Refusal):
		return reset.Refused
	case !called && cancelled:
		return reset.Cancelled
	case !called, inUse, unavailable, busy && !ok, ok && refused.Refusal == gpureset.InUse:
		return reset.InUse
	}
	return reset.Failed
}

// textOf is what an operator reads of an error; that of nvidia-smi alone, if it has one.
func textOf(err error) string {
	if refused, ok := errors.AsType[*gpureset.RefusedError](err); ok && refused.Text != "" {
		return refused.Text
	}
	return text(err)
}

// splitPersistence returns that the persistence mode is not as it was, and apart from it the failure of a reset.
func splitPersistence(err error) (left *gpureset.PersistenceError, failed error) {
	var list interface{ Unwrap() []error }
	switch {
	case errors.As(err, &list):
		var others []error
		for _, one := range list.Unwrap() {
			p, one := splitPersistence(one)
			others, left = append(others, one), cmp.Or(left, p)
		}
		return left, errors.Join(others...)
	case errors.As(err, &left):
		return left, nil
	}
	return nil, err
}

// report logs the end of a reset.
func (a *attempt) report(e reset.End) {
	log := a.opts.Log.With("id", a.GPU, "cause", a.Cause, "took", since(a.began))
	switch e.Outcome {
	case reset.Done:
		log.Info("GPU was reset")
	case reset.Cancelled:
		log.Info("reset was cancelled before nvidia-smi was called", "reason", e.Text)
	case reset.InUse:
		log.Warn("GPU was not reset: it is in use", "reason", e.Text)
	default:
		log.Warn("GPU was not reset", "outcome", e.Outcome, "reason", e.Text)
	}
}

// all names the GPUs of a reset.
func all(b reset.Begin) string {
	if n := len(b.With); n > 0 {
		return fmt.Sprintf("%s and the %d other GPUs of its P2P group", b.GPU, n)
	}
	return string(b.GPU)
}
