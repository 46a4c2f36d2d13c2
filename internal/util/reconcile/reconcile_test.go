package reconcile_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// passes is a loop in a synctest bubble, with what its passes were.
type passes struct {
	reconcile.Loop
	began time.Time
	all   []string                    // time and cause of each
	pass  func() (next time.Duration) // nil = takes no time, and only a change is followed by another one
	end   func()
}

func start(t *testing.T, l reconcile.Loop, pass func() time.Duration) *passes {
	t.Helper()
	p := &passes{Loop: l, began: time.Now(), pass: pass}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.Run(ctx, func(_ context.Context, cause reconcile.Cause) time.Duration {
			p.all = append(p.all, fmt.Sprint([]string{"start", "change", "due"}[cause], " ", time.Since(p.began)))
			if p.pass == nil {
				return reconcile.Never
			}
			return p.pass()
		})
	}()
	p.end = func() { cancel(); <-ended }
	t.Cleanup(p.end)
	synctest.Wait()
	return p
}

// want checks which passes there were so far.
func (p *passes) want(t *testing.T, all ...string) {
	t.Helper()
	if synctest.Wait(); !slices.Equal(p.all, all) {
		t.Errorf("passes %q, want %q", p.all, all)
	}
}

// A pass is made at once, after each change of any source, and once for several changes.
func TestPassAfterChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		value, signal := watch.NewValue(0), make(chan struct{}, 1)
		p := start(t, reconcile.Loop{On: []reconcile.Source{value.Changed, reconcile.Signal(signal), reconcile.Signal(nil)}}, nil)
		time.Sleep(time.Hour)
		p.want(t, "start 0s")
		for range 3 {
			value.Store(1)
			watch.Notify(signal)
			watch.Notify(signal)
		}
		synctest.Wait()
		if len(p.all) > 3 { // the value and the signal may be noticed one after the other
			t.Errorf("passes %q", p.all)
		}
		p.all = nil
		time.Sleep(time.Hour)
		watch.Notify(signal)
		synctest.Wait()
		time.Sleep(time.Hour)
		value.Store(2)
		p.want(t, "change 2h0m0s", "change 3h0m0s")
	})
}

// Changes while a pass runs are followed by one more pass.
func TestChangesDuringAPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		value := watch.NewValue(0)
		p := start(t, reconcile.Loop{On: []reconcile.Source{value.Changed}}, func() time.Duration {
			time.Sleep(time.Minute)
			return time.Hour
		})
		time.Sleep(time.Second)
		value.Store(1)
		value.Store(2)
		time.Sleep(10 * time.Minute)
		p.want(t, "start 0s", "change 1m0s")
	})
}

// The time that a pass returns begins at its end, and a change is a new beginning.
func TestTimeOfThePassBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signal, times := make(chan struct{}, 1), []time.Duration{10 * time.Second, 0, 20 * time.Second, 30 * time.Second, reconcile.Never}
		p := start(t, reconcile.Loop{On: []reconcile.Source{reconcile.Signal(signal)}}, func() time.Duration {
			time.Sleep(time.Second)
			next := times[0]
			times = times[1:]
			return next
		})
		time.Sleep(20 * time.Second)
		watch.Notify(signal)
		time.Sleep(time.Hour)
		p.want(t, "start 0s", "due 11s", "due 12s", "change 20s", "due 51s")
	})
}

// With the end of the context the loop ends, also if there is a change at the same time, and no other pass begins.
func TestNoPassAfterTheEnd(t *testing.T) {
	for range 50 {
		synctest.Test(t, func(t *testing.T) {
			signal := make(chan struct{}, 1)
			p := start(t, reconcile.Loop{On: []reconcile.Source{reconcile.Signal(signal)}}, func() time.Duration {
				time.Sleep(time.Minute)
				return 0
			})
			watch.Notify(signal)
			p.end()
			p.want(t, "start 0s")
		})
	}
}

// The first pass is made with a context that has ended, too: others may wait for it.
func TestFirstPassIsAlwaysMade(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n := 0
	reconcile.Loop{}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration { n++; return 0 })
	if n != 1 {
		t.Errorf("%d passes", n)
	}
}

// A pass that takes longer than the limit is overdue, and so is a loop that does not go on in time. A wait for a change is not.
func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, signal, next, hang := watchdog.NewRegistry(), make(chan struct{}, 1), time.Minute, time.Duration(0)
		p := start(t, reconcile.Loop{On: []reconcile.Source{reconcile.Signal(signal)}, Task: registry.Register("loop"), Limit: 10 * time.Second}, func() time.Duration {
			time.Sleep(hang)
			return next
		})
		within := func(when string, want time.Duration) {
			t.Helper()
			if is := registry.Tasks()[0]; is.Within != want || is.Late(time.Now()) {
				t.Errorf("%s: within %v, want %v; late %t", when, is.Within, want, is.Late(time.Now()))
			}
		}
		within("it waits for a minute", time.Minute)
		next, hang = reconcile.Never, time.Hour
		watch.Notify(signal)
		synctest.Wait()
		within("a pass runs", 10*time.Second)
		time.Sleep(20 * time.Second)
		if len(registry.Late(time.Now())) != 1 {
			t.Error("a pass that hangs is not overdue")
		}
		time.Sleep(2 * time.Hour)
		within("it waits for a change", 0)
		p.end()
	})
}
