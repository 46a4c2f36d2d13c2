package nomad

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/status"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// pages makes the HTTP servers of the agents of this process. They listen one at a time.
type pages struct {
	version string
	plugin  *nomadadapter.Plugin
	reload  agent.ReloadStatus

	mu     sync.Mutex
	latest <-chan struct{} // closed when the server that was made last has ended; nil = none was made
}

// closeTimeout is how long a server waits for the end of the one before, which may have the same address.
const closeTimeout = 2 * time.Second

// adapter is what an agent with these settings runs for its pages, which is nothing without an address; and the warnings of the plugin and the
// server.
func (h *pages) adapter(s config.Nomad, log *slog.Logger, a *agent.Agent) agent.Adapter {
	if s.Operations.HTTPAddress == "" {
		return agent.Adapter{Warnings: h.plugin.Warnings}
	}
	page := statuspage.New(statuspage.Options{
		Agent: Name, Version: h.version, Node: statuspage.NodeName(),
		Report: func() report.Report { return control.Describe(a, s.Core, a.Warnings) },
	})
	server := status.New(status.Options{
		Address: s.Operations.HTTPAddress, Name: Name, Version: h.version, Agent: a, Adapter: View{Plugin: h.plugin}, Reload: &h.reload,
		Config: s.Core, Sources: a.SourcesUp, Warnings: a.Warnings, DriverCalls: agent.DriverCalls,
		Handlers: page.Handlers(), Log: log,
	})
	previous, ended := h.next()
	return agent.Adapter{
		Tasks: []func(context.Context) error{func(ctx context.Context) error {
			defer close(ended)
			if previous != nil {
				watch.Await(ctx, previous, closeTimeout)
			}
			server.Run(ctx)
			return nil
		}, func(ctx context.Context) error {
			page.Run(a.WatchUse(ctx))
			return nil
		}},
		Warnings: func() []string { return slices.Concat(server.ListenWarnings(), h.plugin.Warnings()) },
	}
}

// next returns the end of the server before, and the channel to close at the end of the next one.
func (h *pages) next() (previous <-chan struct{}, ended chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	previous, ended = h.latest, make(chan struct{})
	h.latest = ended
	return previous, ended
}
