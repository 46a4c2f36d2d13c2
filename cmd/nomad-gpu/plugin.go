package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
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

	// The driver ends with the process. It is not waited for: a session needs up to a second to leave the
	// driver's event wait, a hanging driver never lets go, and after two Nomad would kill us.
	end(nil)
	f.part()
	if errors.Is(context.Cause(ctx), core.ErrDriverStale) {
		return exitFailed
	}
	return exitOK
}

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
