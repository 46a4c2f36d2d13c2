package agent

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// flushTimeout is how long a process waits for its last writes to disk. Nomad kills a plugin two seconds after it asked it to end.
const flushTimeout = time.Second

// Supervisor starts the agents of a process whose orchestrator configures it. They run one at a time: a process has one NVML. It
// is safe for concurrent use.
type Supervisor struct {
	started time.Time // of the process
	end     context.CancelCauseFunc
	signals chan os.Signal

	mu      sync.Mutex
	latest  *Agent            // nil before the first
	pending []<-chan struct{} // each closed when an agent has finished some work on disk
}

// NewSupervisor returns a supervisor that calls end, with the error, when an agent has failed: only a new process can work.
func NewSupervisor(end context.CancelCauseFunc) *Supervisor {
	return &Supervisor{started: time.Now(), end: end, signals: make(chan os.Signal, 4)}
}

// Forward sends a signal for quiesce or resume to the agent. Without an agent it is dropped. It does not block.
func (s *Supervisor) Forward(sig os.Signal) {
	select {
	case s.signals <- sig:
	default:
	}
}

// Start runs an agent until ctx ends. Its driver session begins when that of the agent before has ended, its proofs when those have.
func (s *Supervisor) Start(ctx context.Context, o Options) *Agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	o.Signals = s.signals
	o.OnFailure = func(ctx context.Context, err error) { s.fail(ctx, o.Log, err) }
	if s.latest != nil {
		o.After, o.Earlier, o.Recorded = s.latest.MonitorDone(), s.latest.ProofsDone(), s.latest.LimitsDone()
	}
	a := New(o)
	s.latest, s.pending = a, append(s.pending, a.FilesDone()...)
	go func() { _ = a.Run(ctx) }() // OnFailure has the error
	return a
}

// Rescan makes the agent read the node again.
func (s *Supervisor) Rescan(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest != nil {
		s.latest.Report(health.Observation{At: gpu.Node, Detail: reason})
	}
}

// AwaitFiles waits until every agent has finished its work on disk and other is closed, but not longer than a second.
func (s *Supervisor) AwaitFiles(other <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	timeout := time.After(flushTimeout)
	for _, done := range append(s.pending, other) {
		select {
		case <-done:
		case <-timeout:
			return
		}
	}
}

// fail ends the process, because only a new one can work, and the orchestrator starts it immediately. It waits for nothing else:
// Nomad has read this line of the log even after the process ended, and to keep an unusable driver session only makes
// reservations fail that the next process grants.
func (s *Supervisor) fail(ctx context.Context, log *slog.Logger, err error) {
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
