package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A failed process exits immediately, unless it is so young that the next may fail soon, too.
func TestExitDelay(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{0: 5 * time.Second, 2 * time.Second: 3 * time.Second, 5 * time.Second: 0, time.Hour: 0} {
		if got := exitDelay(age); got != want {
			t.Errorf("aged %s: %s, want %s", age, got, want)
		}
	}
}

func TestShutdownTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		defer close(stuck)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		err := RunUntil(ctx, func() error { <-stuck; return nil })
		if took := time.Since(began) - time.Hour; !errors.Is(err, ErrShutdownTimeout) || took != ShutdownTimeout || took >= 2*time.Second {
			t.Errorf("%v after %v", err, took)
		}
	})
}
