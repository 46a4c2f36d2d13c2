package watch_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// RunUntil returns with the function, and without one that hangs some time after the end of the context.
func TestRunUntil(t *testing.T) {
	for name, tc := range map[string]struct {
		takes time.Duration // after the end of the context, which is after a minute
		ended bool
		after time.Duration
	}{
		"ends before": {-30 * time.Second, true, 30 * time.Second},
		"ends soon":   {time.Second, true, 61 * time.Second},
		"hangs":       {time.Hour, false, 65 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				ended := watch.RunUntil(ctx, 5*time.Second, func() { time.Sleep(time.Minute + tc.takes) })
				if took := time.Since(began); ended != tc.ended || took != tc.after {
					t.Errorf("%v after %v, want %v after %v", ended, took, tc.ended, tc.after)
				}
				time.Sleep(2 * time.Hour) // until the abandoned goroutine has ended
			})
		})
	}
}
