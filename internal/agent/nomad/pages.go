package nomad

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/status"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// addPages adds the HTTP server of an agent; nothing without an address.
func (r *run) addPages(a *agent.Agent, to *agent.Adapter) {
	s := r.settings
	if s.Operations.HTTPAddress == "" {
		return
	}
	page := statuspage.New(statuspage.Options{
		Agent: Name, Version: r.opts.Version, Node: statuspage.NodeName(),
		Report: func() report.Report { return control.Describe(a, s.Core, a.Problems) },
	})
	server := status.New(status.Options{
		Address: s.Operations.HTTPAddress, Name: Name, Version: r.opts.Version, Agent: a, Adapter: view{r.plugin, r.durations}, Reload: &r.reload,
		Config: s.Core, Sources: a.SourcesUp, Problems: a.Problems, Proofs: a.Proofs, Resets: a.Resets, Limits: a.KnownLimits, DriverCalls: agent.DriverCalls,
		Handlers: page.Handlers(), Log: r.log,
	})
	previous, ended := r.servers.next()
	to.Tasks = append(to.Tasks,
		func(ctx context.Context) error {
			defer close(ended)
			if previous != nil {
				watch.Await(ctx, previous, closeTimeout)
			}
			server.Run(ctx)
			return nil
		},
		func(ctx context.Context) error { page.Run(a.WatchUse(ctx)); return nil },
	)
	to.Problems = func() []problem.Problem { return slices.Concat(server.ListenProblems(), r.plugin.Problems()) }
}

// closeTimeout is how long a server waits for the end of the one before, which may have the same address.
const closeTimeout = 2 * time.Second

// servers are the HTTP servers of the agents of this process. They listen one at a time.
type servers struct {
	mu     sync.Mutex
	latest <-chan struct{} // closed when the server that was made last has ended; nil = none was made
}

// next returns the end of the server before, and the channel to close at the end of the next one.
func (s *servers) next() (previous <-chan struct{}, ended chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	previous, ended = s.latest, make(chan struct{})
	s.latest = ended
	return previous, ended
}
