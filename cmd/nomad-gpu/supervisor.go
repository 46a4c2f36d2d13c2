package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
)

// agentName names the plugin's files in the state directory.
const agentName = "nomad-gpu"

// flushTimeout is how long the process waits for its last writes to disk. Nomad kills it after two seconds.
const flushTimeout = time.Second

// supervisor runs one agent at a time: a process has one NVML.
type supervisor struct {
	started time.Time // of the process
	end     context.CancelCauseFunc
	signals chan os.Signal // quiesce and resume

	mu      sync.Mutex
	latest  *agent.Agent      // nil before the first configuration
	pending []<-chan struct{} // each closed when an agent has finished some work on disk
}

func newSupervisor(end context.CancelCauseFunc) *supervisor {
	return &supervisor{started: time.Now(), end: end, signals: make(chan os.Signal, 4)}
}

// forward sends a signal to the agent. A plugin that is disabled has none, and drops it.
func (s *supervisor) forward(sig os.Signal) {
	select {
	case s.signals <- sig:
	default:
	}
}

// start is a nomadadapter.StartFunc.
func (s *supervisor) start(ctx context.Context, settings nomadadapter.Settings, log *slog.Logger) nomadadapter.Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := agent.Options{
		Name: agentName, Core: settings.Core, Health: settings.Health, MPSRoot: settings.MPSRoot,
		Open: agent.OpenDriver(settings.Core.Roots, false), Signals: s.signals, Log: log,
		OnFailure: func(ctx context.Context, err error) { s.fail(ctx, log, err) },
	}
	if s.latest != nil {
		o.After = s.latest.MonitorDone()
	}
	a := agent.New(o)
	s.latest, s.pending = a, append(s.pending, a.FilesDone()...)
	go func() { _ = a.Run(ctx) }() // OnFailure has the error
	return a.Monitor
}

// awaitFiles waits until every agent, and the plugin itself, has finished its work on disk, but not longer than flushTimeout.
func (s *supervisor) awaitFiles(plugin <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	timeout := time.After(flushTimeout)
	for _, done := range append(s.pending, plugin) {
		select {
		case <-done:
		case <-timeout:
			return
		}
	}
}

// rescan makes the agent read the node again. The configuration comes from Nomad and can't be read again.
func (s *supervisor) rescan(log hclog.Logger) {
	log.Info("SIGHUP: devices and policy file are read again; a changed plugin block needs an agent restart")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest != nil {
		s.latest.Report(health.Observation{At: gpu.Node, Detail: "SIGHUP"})
	}
}

// fail ends the process, because only a new one can work, and Nomad starts it immediately. It waits for nothing else: Nomad has
// read this line of the log even after the process ended, and to keep an unusable driver session only makes reservations fail
// that the next process grants.
func (s *supervisor) fail(ctx context.Context, log *slog.Logger, err error) {
	pause := exitDelay(time.Since(s.started))
	log.Error("a new process is needed", "error", err, "exit_in", pause)
	select {
	case <-time.After(pause):
		s.end(err)
	case <-ctx.Done():
	}
}

// exitDelay is how long a failed process of that age waits before it exits: the next one may fail for the same reason, and Nomad
// starts it without a pause.
func exitDelay(age time.Duration) time.Duration { return max(5*time.Second-age, 0) }
