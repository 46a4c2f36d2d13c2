package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
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
		err := RunUntil(ctx, func() time.Duration { return ShutdownTimeout }, func() error { <-stuck; return nil })
		if took := time.Since(began) - time.Hour; !errors.Is(err, ErrShutdownTimeout) || took != ShutdownTimeout || took >= 2*time.Second {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// blockingLog is a log handler that does not return from one message before blocked is closed.
type blockingLog struct {
	slog.Handler
	message string
	blocked chan struct{}
}

func (h blockingLog) Enabled(context.Context, slog.Level) bool { return true }

func (h blockingLog) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.message {
		<-h.blocked
	}
	return nil
}

// The loop of the monitor is stuck: Run returns, so that the process ends and is started again.
func TestRunEndsWhenTheMonitorIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options(config.Health{}, core.DefaultConfig())
		o.Open = coretest.NewMachine(coretest.GPUs(1)).Open
		h := blockingLog{Handler: slog.DiscardHandler, message: "driver ready", blocked: make(chan struct{})}
		defer close(h.blocked)
		o.Log = slog.New(h)
		err := New(o).Run(t.Context())
		if _, ok := errors.AsType[*watchdog.StuckError](err); !ok {
			t.Errorf("Run returned %v", err)
		}
	})
}
