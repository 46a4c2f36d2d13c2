package main

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/operator/control"
)

var errTerminated = errors.New("terminated by SIGTERM")

// handlers are the reactions of the plugin to signals. They are called one at a time and must not block.
type handlers map[os.Signal]func()

// newHandlers returns the handlers of a plugin that Nomad started.
//
//	SIGTERM  ends the plugin in order.
//	SIGINT   is ignored: Ctrl-C at the Nomad agent's terminal reaches its whole process group, and the agent ends its plugins
//	         itself. go-plugin ignores it, too, but later.
//	SIGHUP   makes the devices and the policy file be read again. It also comes from the agent's terminal when that closes.
//	SIGUSR1  quiesces the driver, SIGUSR2 resumes it.
//	SIGPIPE  is ignored: a line of the log causes it when the agent has ended. watchParent ends the plugin in order.
func newHandlers(end context.CancelCauseFunc, onHangup func(), forward func(os.Signal)) handlers {
	ignore := func() {}
	return handlers{
		syscall.SIGTERM: func() { end(errTerminated) },
		syscall.SIGINT:  ignore,
		syscall.SIGHUP:  onHangup,
		syscall.SIGPIPE: ignore,

		control.QuiesceSignal: func() { forward(control.QuiesceSignal) },
		control.ResumeSignal:  func() { forward(control.ResumeSignal) },
	}
}

// handle calls the handlers until ctx ends. From then on SIGINT and SIGTERM have their default effect, so that a second signal
// ends a process that does not stop.
func (h handlers) handle(ctx context.Context) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, slices.Collect(maps.Keys(h))...)
	go func() {
		for {
			select {
			case s := <-signals:
				h[s]()
			case <-ctx.Done():
				signal.Reset(syscall.SIGINT, syscall.SIGTERM)
				return
			}
		}
	}()
}
