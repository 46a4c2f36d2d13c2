package monitor_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// limiter makes the sessions of a machine have limits.
type limiter struct {
	*coretest.Machine
	hang chan struct{} // calls wait for it; nil = they return at once

	mu    sync.Mutex
	calls []string // groups, in the order of the calls
}

type limitedSession struct {
	monitor.Session
	l *limiter
}

func (l *limiter) Open() (monitor.Session, error) {
	s, err := l.Machine.Open()
	return limitedSession{s, l}, err
}

func (l *limiter) made() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls)
}

func (l *limiter) call(group string) {
	l.mu.Lock()
	l.calls = append(l.calls, group)
	hang := l.hang
	l.mu.Unlock()
	if hang != nil {
		<-hang
	}
}

func (s limitedSession) LimitsUnsupported() string { return "" }

func (s limitedSession) MemoryLimits(queries []gpu.LimitQuery) (answers []gpu.LimitAnswer, err error) {
	for _, q := range queries {
		s.l.call("get " + q.Group)
		answers = append(answers, gpu.LimitAnswer{LimitQuery: q, Limit: gpu.MemoryLimit{Hard: 7}})
	}
	return answers, nil
}

func (s limitedSession) SetMemoryLimit(c gpu.LimitChange) error {
	s.l.call("set " + c.Group)
	return gpu.ErrLimitInvalid
}

// withLimits runs test in a synctest bubble with a monitor of a driver with limits.
func withLimits(t *testing.T, test func(*testing.T, *limiter, *running)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &limiter{Machine: coretest.NewMachine(coretest.GPUs(2))}
		test(t, l, startOn(t, l.Open, setup{}))
	})
}

func query(group string) []gpu.LimitQuery { return []gpu.LimitQuery{{Group: group}} }

func set(ctx context.Context, r *running, group string) error {
	return r.SetMemoryLimit(ctx, gpu.LimitChange{LimitQuery: gpu.LimitQuery{Group: group}})
}

// Limits are read and set through the session, with its errors; without a session, or by one without limits, there are none.
func TestLimits(t *testing.T) {
	withLimits(t, func(t *testing.T, l *limiter, r *running) {
		if why, known := r.LimitsUnsupported(); why != "" || !known {
			t.Errorf("%q, %v", why, known)
		}
		answers, err := r.MemoryLimits(t.Context(), query("/a"))
		if err != nil || len(answers) != 1 || answers[0].Limit.Hard != 7 {
			t.Errorf("%+v, %v", answers, err)
		}
		if err := set(t.Context(), r, "/b"); !errors.Is(err, gpu.ErrLimitInvalid) {
			t.Error(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := set(ended, r, "/c"); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if made := l.made(); !slices.Equal(made, []string{"get /a", "set /b"}) {
			t.Error(made)
		}
		l.FailOpen(gpu.ErrNoDriver)
		l.FailSession(gpu.ErrDriverLost)
		r.after(time.Minute)
		_, err = r.MemoryLimits(t.Context(), query("/a"))
		if _, known := r.LimitsUnsupported(); !errors.Is(err, gpu.ErrNoDriver) || !errors.Is(set(t.Context(), r, "/a"), gpu.ErrNoDriver) || known {
			t.Error("without a driver:", err, known)
		}
	})
	onGPUs(t, 1, func(t *testing.T, _ *coretest.Machine, r *running) {
		_, err := r.MemoryLimits(t.Context(), query("/a"))
		if why, known := r.LimitsUnsupported(); !errors.Is(err, gpu.ErrLimitsUnsupported) || !errors.Is(set(t.Context(), r, "/a"), gpu.ErrLimitsUnsupported) || why == "" || !known {
			t.Errorf("of a session without limits: %v; %q, %v", err, why, known)
		}
	})
}

// While the driver hangs in a call, callers wait as long as they want to, a Set whose caller has left is not made, and the others are made when it answers again.
// When the session ends, those that still wait have an answer.
func TestLimitsOfHungDriver(t *testing.T) {
	withLimits(t, func(t *testing.T, l *limiter, r *running) {
		hang := make(chan struct{})
		l.mu.Lock()
		l.hang = hang
		l.mu.Unlock()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		answers := make(chan error, 4)
		for i, c := range []struct {
			ctx   context.Context
			group string
		}{{short, "/hangs"}, {short, "/left"}, {t.Context(), "/waits"}} {
			go func() { answers <- set(c.ctx, r, c.group) }()
			synctest.Wait()
			if i == 0 && !slices.Equal(l.made(), []string{"set /hangs"}) {
				t.Error(l.made())
			}
		}
		r.after(2 * time.Second)
		for range 2 {
			if err := <-answers; !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		}
		l.mu.Lock()
		l.hang = nil
		l.mu.Unlock()
		close(hang)
		synctest.Wait()
		if err := <-answers; !errors.Is(err, gpu.ErrLimitInvalid) || !slices.Equal(l.made(), []string{"set /hangs", "set /waits"}) {
			t.Error(err, l.made())
		}

		release := l.Hang("Usage", gpu.Node)
		defer release()
		go func() { _, _ = r.Usage(t.Context()) }()
		synctest.Wait()
		go func() { answers <- set(context.Background(), r, "/ends") }()
		synctest.Wait()
		must(t, r.stop())
		if err := <-answers; !errors.Is(err, gpu.ErrNoDriver) {
			t.Error(err)
		}
	})
}

// Neither do callers for limits keep checks and usage from being made, nor those for usage limits.
func TestLimitsTakeTurns(t *testing.T) {
	withLimits(t, func(t *testing.T, l *limiter, r *running) {
		l.Delay("Usage", time.Second)
		l.Delay("Probe", time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		for range 3 {
			callers.Go(func() {
				for ctx.Err() == nil {
					_, _ = r.Usage(ctx)
				}
			})
			callers.Go(func() {
				for watch.Sleep(ctx, 100*time.Millisecond) {
					_, _ = r.MemoryLimits(ctx, query("/a"))
				}
			})
		}
		before, limits := l.Calls(), len(l.made())
		r.after(time.Minute)
		after := l.Calls()
		if probes, usage, limits := after["Probe"]-before["Probe"], after["Usage"]-before["Usage"], len(l.made())-limits; probes < 2 || usage < 15 || limits < 15 {
			t.Errorf("in a minute %d checks, %d readings of usage, %d of limits", probes, usage, limits)
		}
		cancel()
		callers.Wait()
	})
}
