package limits

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// LimitPod limits the group of a pod on a GPU to what all its claims have there, of which this is one (Work.Claim), with so many bytes, and reads it back. It is
// called before any container of the pod starts. The same call again changes nothing. An error means that the pod is not limited so far: later passes try again while
// the claim is prepared (Options.Pods), or until ReleasePod. With gpu.ErrNoDriver the driver is not open, as at the start of the agent, and with limit.ErrElsewhere
// another process of the agent has not ended: try again. With errors.ErrUnsupported that is in vain.
func (l *Limiter) LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error {
	if err := l.lock(ctx); err != nil {
		return err
	}
	defer l.unlock()
	if err := l.begins(); err != nil {
		return err
	}
	l.saved = l.saved.WithPod(limit.Pod{Work: pod, GPU: id, Bytes: bytes})
	if err := l.limitPod(ctx, pod, id); err != nil {
		l.soon()
		return fmt.Errorf("%s is not limited to %d MiB of %s: %w", pod, bytes>>20, id, err)
	}
	return nil
}

// begins begins a change for a caller that waits for it. The caller has the lock.
func (l *Limiter) begins() error {
	if l.monitor == nil {
		return errNotRunning
	}
	return l.load(true)
}

func (l *Limiter) limitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID) error {
	if err := l.save(l.saved); err != nil { // after a restart the limit would be no work's
		return err
	}
	if err := l.passNow(ctx); err != nil {
		return err
	}
	s, known := l.Table().Share(pod, id)
	switch {
	case !known:
		return errNotInTable
	case l.Table().Node.Unsupported != "":
		return fmt.Errorf("%s: %w", s.Reason, errors.ErrUnsupported)
	case s.State != limit.Limited:
		return fmt.Errorf("%s: %s", s.State, s.Reason)
	}
	return nil
}

// errNotInTable is a pod that another caller has released meanwhile.
var errNotInTable = errors.New("it was released")

// passNow makes a pass for a caller that waits for it. The caller has the lock.
func (l *Limiter) passNow(ctx context.Context) error {
	n, open, err := l.see(ctx)
	switch {
	case !open:
		return gpu.ErrNoDriver
	case err != nil:
		l.soon()
		return err
	}
	r, err := l.decide(ctx, n)
	if err != nil { // the next pass publishes that
		l.soon()
		return err
	}
	l.publish(ctx, n, r)
	return nil
}

// soon has a pass be made at once. The caller has the lock.
func (l *Limiter) soon() {
	l.passes.basis = basis{}
	watch.Notify(l.changed)
}

// ReleasePod ends what a claim that is not prepared any more has of a pod's limits: with the last one the limit ends, before the group does. A pod that has none is
// no error. After an error the next pass does it.
func (l *Limiter) ReleasePod(ctx context.Context, pod holders.Work) error {
	if err := l.lock(ctx); err != nil {
		return err
	}
	defer l.unlock()
	before := l.saved.Pods
	if err := l.begins(); err != nil {
		return err
	}
	l.saved = l.saved.WithoutPod(pod)
	l.followClaims() // a claim that was prepared again has it
	if slices.Equal(before, l.saved.Pods) {
		return nil
	}
	return errors.Join(l.save(l.saved), l.passNow(ctx))
}
