// Package reconcile has Loop, which makes a pass whenever something has changed that the pass depends on, and when it is time.
package reconcile

import (
	"context"
	"reflect"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Loop repeats a pass, which reads everything that it depends on: it does not matter what has changed, or how often. Changes while a pass runs
// are followed by one more pass.
type Loop struct {
	On    []Source       // what a pass depends on; none = only time
	Task  *watchdog.Task // of the goroutine that calls Run; nil = none
	Limit time.Duration  // of a pass, for the watchdog; 0 = it may take any time
}

// Source is called before each pass. It returns a channel that is closed or receives a value at the next change; nil = there is none to wait
// for. watch.Value has such a method.
type Source func() <-chan struct{}

// Signal is the source of a channel of capacity 1 to which watch.Notify sends.
func Signal(c <-chan struct{}) Source { return func() <-chan struct{} { return c } }

// Cause is why a pass is made.
type Cause int

// Causes.
const (
	Start  Cause = iota // it is the first one
	Change              // a source has reported a change
	Due                 // the time is over that the pass before has returned
)

// Never is returned by a pass after which only a change is followed by another one.
const Never time.Duration = -1

// Run makes a pass at once, after each change and when the time is over that the pass before has returned, until ctx ends. The passes run in
// the goroutine of the caller. None but the first begins after the end of ctx.
func (l Loop) Run(ctx context.Context, pass func(context.Context, Cause) (next time.Duration)) {
	for cause, again := Start, true; again; {
		changed := make([]<-chan struct{}, len(l.On))
		for i, source := range l.On {
			changed[i] = source()
		}
		l.Task.Heartbeat(l.Limit)
		next := pass(ctx, cause)
		l.Task.Heartbeat(max(next, 0))
		cause, again = await(ctx, changed, next)
	}
}

// await waits for the first change, but at most for d, and reports whether ctx has not ended.
func await(ctx context.Context, changed []<-chan struct{}, d time.Duration) (Cause, bool) {
	var due <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		due = t.C
	}
	cases := []reflect.SelectCase{receive(ctx.Done()), receive(due)}
	for _, c := range changed {
		cases = append(cases, receive(c))
	}
	chosen, _, _ := reflect.Select(cases)
	if chosen == 1 {
		return Due, ctx.Err() == nil
	}
	return Change, ctx.Err() == nil
}

func receive[T any](c <-chan T) reflect.SelectCase {
	return reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)}
}
