package agent

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// host finds out what the node has apart from the driver and CDI specifications: MPS control daemons, and what its agents offer.
type host struct {
	daemons *mps.Watcher
	agents  *ownership.Watcher
}

func newHost(o Options) *host {
	return &host{daemons: mps.NewWatcher(mps.Of(o.Core.Policy, o.MPSRoot, o.Health.StateDir), o.Log), agents: ownership.New(ownershipOptions(o))}
}

// readHost reads the node for a process that is not the agent.
func readHost(o Options, state core.State) inventory.Host {
	h := ownership.ReadOnce(ownershipOptions(o), state)
	h.MPS = mps.Of(o.Core.Policy, o.MPSRoot, o.Health.StateDir).Answering(state.Inventory)
	return h
}

// runDaemons checks the MPS control daemons until ctx ends.
func (h *host) runDaemons(ctx context.Context, m *monitor.Monitor) {
	h.daemons.Run(ctx, m, func(answering []string) {
		m.UpdateHost(func(h *inventory.Host) { h.MPS = answering })
	})
}

// firstAtMost is for how long the first inventory waits for what the node limits, as a disk can hang.
const firstAtMost = time.Second

// awaitFirst waits until both were read once, but not for long.
func (h *host) awaitFirst(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstAtMost)
	defer cancel()
	for _, first := range []<-chan struct{}{h.daemons.First(), h.agents.First()} {
		select {
		case <-first:
		case <-ctx.Done():
		}
	}
}
