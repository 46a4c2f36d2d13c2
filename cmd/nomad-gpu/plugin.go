package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/footprint"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
)

// serve answers Nomad until it wants no more, the agent is gone or a new process is needed, and returns
// the exit code. It ends in time even while the driver hangs.
func serve(stderr io.Writer) int {
	parent := os.Getppid()
	footprint.Reduce()
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: stderr, JSONFormat: true})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)

	go watchParent(ctx, parent, end)
	f := follower{began: time.Now(), end: end}
	nomadadapter.Serve(ctx, nomadadapter.New(ctx, version, f.start, log), log)

	// What still runs ends with the process. It is not waited for: a session needs up to a second to
	// leave the driver's event wait, a hanging driver never lets go, and after two Nomad would kill us.
	if errors.Is(context.Cause(ctx), core.ErrDriverStale) {
		return exitFailed
	}
	return exitOK
}

// follower follows the machine with one monitor at a time: a process has one NVML.
type follower struct {
	began time.Time // of the process
	end   context.CancelCauseFunc

	mu   sync.Mutex
	last <-chan struct{} // closed when the latest monitor has ended; nil before the first
}

// start is a nomadadapter.StartFunc.
func (f *follower) start(ctx context.Context, s nomadadapter.Settings, log *slog.Logger) nomadadapter.Source {
	m := monitor.New(opener(s.Core.Roots), s.Core, log, nil)
	done := make(chan struct{})
	f.mu.Lock()
	before := f.last
	f.last = done
	f.mu.Unlock()
	go func() {
		defer close(done)
		if before != nil {
			<-before
		}
		if err := m.Run(ctx); err != nil {
			f.giveUp(ctx, log, err)
		}
	}()
	return m
}

// giveUp ends the process, as a new one is needed. Nomad starts that at once and as often as it takes,
// hence the pause: the next process may well find what this one found.
func (f *follower) giveUp(ctx context.Context, log *slog.Logger, err error) {
	pause := linger(time.Since(f.began))
	log.Error("a new process is needed", "error", err, "exit_in", pause)
	select {
	case <-time.After(pause):
		f.end(err)
	case <-ctx.Done():
	}
}

// linger is how long a process that has lived for age shall stay: a minute in all, and always long
// enough for Nomad to hear why.
func linger(age time.Duration) time.Duration { return max(time.Minute-age, 5*time.Second) }

// opener opens the driver of this machine.
func opener(roots core.Roots) func() (monitor.Session, error) {
	return func() (monitor.Session, error) {
		s, err := nvidia.Open(nvidia.Options{Roots: roots})
		if err != nil {
			return nil, err // not s: a nil *Session is no nil monitor.Session
		}
		return s, nil
	}
}
