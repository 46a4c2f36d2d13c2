package main

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/asynclog"
	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// serve serves Nomad until it stops the plugin, the Nomad agent ends or a new process is needed, and returns the exit code. It
// returns in time even while the driver, the disk or the reader of the log hangs.
func serve(stderr io.Writer) int {
	parent := os.Getppid()
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	lines := asynclog.New(stderr, lostLines)
	defer lines.Flush()
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: lines, JSONFormat: true})
	sup := newSupervisor(end)
	p := nomadadapter.New(ctx, version, sup.start, log)
	p.PersistPolicy(incarnation(parent))
	p.PersistGroups(checkpoint.BootID)
	hangups := make(chan struct{}, 1)
	newHandlers(end, func() { sup.rescan(log); notify(hangups) }, sup.forward).handle(ctx)
	agent.ReduceMemory()
	defer ownSocketDir()()

	go watchParent(ctx, parent, end)
	go reload(ctx, p, hangups)
	nomadadapter.Serve(ctx, p, log)

	// The driver session ends with the process and is not waited for: it needs up to a second to leave the driver's event wait, a
	// call that hangs never returns, and Nomad kills the plugin after two seconds.
	end(nil)
	sup.awaitFiles(p.Flushed())
	cause := context.Cause(ctx)
	if _, stuck := errors.AsType[*watchdog.StuckError](cause); stuck || errors.Is(cause, gpu.ErrDriverStale) {
		return cli.ExitFailed
	}
	return cli.ExitOK
}

// notify requests a read of the policy file. One request that is pending stands for all.
func notify(hangups chan<- struct{}) {
	select {
	case hangups <- struct{}{}:
	default:
	}
}

// reload reads the policy file again at each SIGHUP until ctx ends. It is a goroutine of its own, because reading the file may
// hang.
func reload(ctx context.Context, p *nomadadapter.Plugin, hangups <-chan struct{}) {
	for {
		select {
		case <-hangups:
			p.Reload(ctx)
		case <-ctx.Done():
			return
		}
	}
}
