package watch

import (
	"context"
	"time"
)

// Sleep waits for d and reports true, or false if ctx ends first.
func Sleep(ctx context.Context, d time.Duration) bool { return !Await(ctx, nil, d) && ctx.Err() == nil }

// Await waits for at most d until done is closed or receives a value, and reports whether it did. It reports false after d
// and when ctx ends.
func Await(ctx context.Context, done <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// Notify sends to a channel of capacity 1, so that its receiver runs once for any number of calls before that. It never blocks.
func Notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// RunUntil runs f, which ends with ctx unless something hangs, and returns when f has, but at most d after the end of ctx: then it reports
// false, and the goroutine of f is abandoned.
func RunUntil(ctx context.Context, d time.Duration, f func()) bool {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f()
	}()
	select {
	case <-ended:
		return true
	case <-ctx.Done():
		return Await(context.Background(), ended, d)
	}
}
