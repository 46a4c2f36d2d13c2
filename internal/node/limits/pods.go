package limits

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// LimitPod limits the group of a pod on a GPU to what all its claims have there, of which this is one (Work.Claim), with so many bytes, and reads it back. It is
// called before any container of the pod starts. The same call again changes nothing. An error means that the pod is not limited, and that nothing is kept of the
// call; gpu.ErrNoDriver that the driver is not open, as at the start of the agent: try again.
func (l *Limiter) LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error {
	if err := l.lock(ctx); err != nil {
		return err
	}
	defer l.unlock()
	if l.monitor == nil {
		return errNotRunning
	}
	if err := l.file.Load(&l.saved); err != nil {
		return err
	}
	before := l.saved
	l.saved = before.WithPod(limit.Pod{Work: pod, GPU: id, Bytes: bytes})
	if err := l.limitPod(ctx, pod, id); err != nil {
		l.saved = l.saved.WithoutPod(pod)
		for _, p := range before.Pods {
			if p.Work == pod {
				l.saved = l.saved.WithPod(p)
			}
		}
		_ = l.passNow(context.WithoutCancel(ctx)) // err is what the caller has to know
		_ = l.save(l.saved)
		return fmt.Errorf("%s is not limited to %d MiB of %s: %w", pod, bytes>>20, id, err)
	}
	return nil
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
	case s.State != limit.Limited:
		return fmt.Errorf("%s: %s", s.State, s.Reason)
	}
	return nil
}

// errNotInTable is a pod that another caller has released meanwhile.
var errNotInTable = errors.New("it was released")

// passNow makes a pass for a caller that waits for it. The caller has the lock.
func (l *Limiter) passNow(ctx context.Context) error {
	n, open := l.see(ctx)
	if !open {
		return gpu.ErrNoDriver
	}
	r, err := l.decide(ctx, n)
	if err != nil { // the next pass publishes that
		l.passes.basis = basis{}
		watch.Notify(l.changed)
		return err
	}
	l.publish(ctx, n, r)
	return nil
}

// ReleasePod ends what a claim has of a pod's limits: with the last one the limit ends, before the group does. A pod that has none is no error.
func (l *Limiter) ReleasePod(ctx context.Context, pod holders.Work) error {
	if err := l.lock(ctx); err != nil {
		return err
	}
	defer l.unlock()
	if err := l.file.Load(&l.saved); err != nil {
		return err
	}
	before := len(l.saved.Pods)
	if l.saved = l.saved.WithoutPod(pod); len(l.saved.Pods) == before {
		return nil
	}
	err := l.save(l.saved)
	if l.monitor != nil {
		_ = l.passNow(ctx) // the next pass does it otherwise
	}
	return err
}
