package agent

import (
	"context"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// host is what the host has apart from the driver: MPS control daemons, and what its agents offer. The monitor gets both as one value.
type host struct {
	daemons *mps.Watcher
	agents  *ownership.Watcher

	mu    sync.Mutex
	value inventory.Host
}

func newHost(o Options) *host {
	return &host{daemons: mps.NewWatcher(mps.Of(o.Core.Policy, o.MPSRoot), o.Log), agents: ownership.New(ownershipOptions(o))}
}

// readHost reads the host for a process that is not the agent.
func readHost(o Options, state core.State) inventory.Host {
	h := ownership.ReadOnce(ownershipOptions(o), state)
	h.MPS = mps.Of(o.Core.Policy, o.MPSRoot).Answering(state.Inventory)
	return h
}

// ownershipMonitor is the monitor for the agents of the host.
type ownershipMonitor struct {
	*monitor.Monitor
	host *host
}

// SetHost sets what the agents of the host offer.
func (m ownershipMonitor) SetHost(h inventory.Host) {
	m.host.set(m.Monitor, func(is *inventory.Host) {
		h.MPS = is.MPS
		*is = h
	})
}

// runDaemons checks the MPS control daemons until ctx ends.
func (h *host) runDaemons(ctx context.Context, m *monitor.Monitor) {
	h.daemons.Run(ctx, m, func(answering []string) {
		h.set(m, func(is *inventory.Host) { is.MPS = answering })
	})
}

// runAgents records what this agent offers, and reads what the others do, until ctx ends.
func (h *host) runAgents(ctx context.Context, m *monitor.Monitor) {
	h.agents.Run(ctx, ownershipMonitor{m, h})
}

func (h *host) set(m *monitor.Monitor, change func(*inventory.Host)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.value)
	m.SetHost(h.value) // never blocks
}

// firstAtMost is for how long the first inventory waits for what the host limits, as a disk can hang.
const firstAtMost = time.Second

// awaitFirst waits until both were read once, but not for long.
func (h *host) awaitFirst(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstAtMost)
	defer cancel()
	h.daemons.AwaitFirst(ctx)
	h.agents.AwaitFirst(ctx)
}
