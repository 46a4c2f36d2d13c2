package monitor

import (
	"context"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// logAtMost is how long the first reading waits for the kernel log: to read all of it takes milliseconds.
const logAtMost = time.Second

// pastLog is what the kernel log had when the agent started. It belongs to Run's goroutine.
type pastLog struct {
	read chan struct{} // closed when it was taken in; nil = it is not read
	done bool          // read is closed
}

// AwaitLog has Run take in what the kernel log had at the start before it reads the machine, so that no GPU is offered
// as healthy that has an XID in the log. A LogRead observation ends it. Call it before Run.
func (m *Monitor) AwaitLog() { m.past.read = make(chan struct{}) }

// awaitLog waits for what the log had, but not for long: what comes later counts, too.
func (m *Monitor) awaitLog(ctx context.Context) {
	if m.past.read == nil {
		return
	}
	patient, cancel := context.WithTimeout(ctx, logAtMost)
	defer cancel()
	_, _ = standby(patient, m, m.past.read) // an end of maintenance, or of the patience, is no failure
}

// logWasRead notes that what the log had is taken in.
func (p *pastLog) logWasRead(obs []core.Observation) {
	if p.read != nil && !p.done && slices.ContainsFunc(obs, func(o core.Observation) bool { return o.Kind == core.KernelLogRead }) {
		p.done = true
		close(p.read)
	}
}

// Restored waits until Run has taken up the history, so that State has it, and reports whether that came before the end
// of ctx.
func (m *Monitor) Restored(ctx context.Context) bool {
	select {
	case <-m.known:
		return true
	case <-ctx.Done():
		return false
	}
}
