package main

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/control"
)

var errTerminated = errors.New("asked to end by SIGTERM")

// reactions say what a signal asks of the plugin. They are called one at a time and must not block.
type reactions map[os.Signal]func()

// pluginReactions are those of a plugin under Nomad.
//
//	SIGTERM  ends the plugin in order.
//	SIGINT   is the agent's: Ctrl-C at its terminal reaches its whole process group, and it ends its plugins
//	         itself. go-plugin ignores it, too, but later.
//	SIGHUP   comes from the agent's terminal when that closes, and from who wants a configuration read again.
//	SIGUSR1  has the driver left alone (quiesce), SIGUSR2 taken back (resume).
//	SIGPIPE  is what a line of the log gives when the agent is dead. The end in order is watchParent's.
func pluginReactions(end context.CancelCauseFunc, onHangup func(), order func(os.Signal)) reactions {
	nothing := func() {}
	return reactions{
		syscall.SIGTERM: func() { end(errTerminated) },
		syscall.SIGINT:  nothing,
		syscall.SIGHUP:  onHangup,
		syscall.SIGPIPE: nothing,

		control.QuiesceSignal: func() { order(control.QuiesceSignal) },
		control.ResumeSignal:  func() { order(control.ResumeSignal) },
	}
}

// heed has the process react to signals as r says until ctx ends. From then on SIGINT and SIGTERM do what
// they do to any process: who asks a second time does not want to wait.
func (r reactions) heed(ctx context.Context) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, slices.Collect(maps.Keys(r))...)
	go func() {
		for {
			select {
			case s := <-signals:
				r[s]()
			case <-ctx.Done():
				signal.Reset(syscall.SIGINT, syscall.SIGTERM)
				return
			}
		}
	}()
}
