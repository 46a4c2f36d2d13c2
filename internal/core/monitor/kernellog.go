package monitor

import (
	"context"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// logAtMost is how long the first reading waits for the kernel log: to read all of it takes milliseconds.
const logAtMost = time.Second

// AwaitLog has Run apply what the kernel log contained at the start before it reads the driver, so that no GPU with an XID in
// the log is published as healthy. A KernelLogRead observation ends the wait. Call it before Run.
func (m *Monitor) AwaitLog() { m.logRead = make(chan struct{}, 1) }

// awaitLog waits for that for at most logAtMost: later observations count, too.
func (m *Monitor) awaitLog(ctx context.Context) {
	if m.logRead == nil {
		return
	}
	bounded, cancel := context.WithTimeout(ctx, logAtMost)
	defer cancel()
	_, _ = serveWithoutSession(bounded, m, m.logRead) // neither the end of maintenance nor the timeout is a failure
}

// noteLogRead ends awaitLog if observations include KernelLogRead.
func (m *Monitor) noteLogRead(obs []health.Observation) {
	if slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind == health.KernelLogRead }) {
		watch.Notify(m.logRead)
	}
}
