package main

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/asynclog"
	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/footprint"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// serve answers Nomad until it wants no more, the agent is gone or a new process is needed, and returns
// the exit code. It ends in time even while the driver, the disk or the agent's log hangs.
func serve(stderr io.Writer) int {
	parent := os.Getppid()
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	lines := asynclog.New(stderr, missing)
	defer lines.Flush()
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: lines, JSONFormat: true})
	f := newFollower(end)
	p := nomadadapter.New(ctx, version, f.start, log)
	p.PersistPolicy(lifeOf(parent))
	p.PersistGroups(checkpoint.BootID)
	hangups := make(chan struct{}, 1)
	pluginReactions(end, func() { f.onHangup(log); note(hangups) }, f.order).heed(ctx)
	footprint.Reduce()
	defer ownSocketDir()()

	go watchParent(ctx, parent, end)
	go reread(ctx, p, hangups)
	nomadadapter.Serve(ctx, p, log)

	// The driver ends with the process. It is not waited for: a session needs up to a second to leave the
	// driver's event wait, a hanging driver never lets go, and after two Nomad would kill us.
	end(nil)
	f.part(p.Flushed())
	cause := context.Cause(ctx)
	if _, stuck := errors.AsType[*watchdog.StuckError](cause); stuck || errors.Is(cause, core.ErrDriverStale) {
		return exitFailed
	}
	return exitOK
}

// note has a hang-up attended to. One that waits stands for all, as each has the whole policy read.
func note(hangups chan<- struct{}) {
	select {
	case hangups <- struct{}{}:
	default:
	}
}

// reread has the policy file read again at each hang-up until ctx ends. Where the file is may hang, so signals do
// not wait for it.
func reread(ctx context.Context, p *nomadadapter.Plugin, hangups <-chan struct{}) {
	for {
		select {
		case <-hangups:
			p.Reload(ctx)
		case <-ctx.Done():
			return
		}
	}
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
