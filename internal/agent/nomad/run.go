package nomad

import (
	"context"
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

// run is the agent of one configuration.
type run struct {
	*Agent
	settings    config.Nomad
	allocations *agentapi.Client // set by adapter; nil = they are not read
	log         *slog.Logger
}

// start starts the agent of a configuration.
func (a *Agent) start(ctx context.Context, s config.Nomad, log *slog.Logger) nomadadapter.Source {
	r := &run{Agent: a, settings: s, log: log}
	started := a.agents.Start(ctx, r.options()) // calls adapter
	return source{started, r.allocations}
}

func (r *run) options() agent.Options {
	o := AgentOptions(r.settings)
	o.Use = usage.Options{Orchestrator: holders.Nomad, MappingDir: r.settings.Operations.MappingDir}
	o.Explain, o.Adapter, o.Log = explainAdapter(r.settings, r.plugin.Group), r.adapter, r.log
	o.Ending = r.ending
	return o
}

// adapter returns what an agent runs for Nomad, with its pages.
func (r *run) adapter(a *agent.Agent) agent.Adapter {
	r.allocations = newAllocations(r.settings, func() map[gpu.DeviceID]gpu.Placement { return a.Current().Placements() }, r.log)
	made := agent.Adapter{
		Holders:  unread(r.settings),
		APIs:     []inventory.API{inventory.Nomad},
		Readers:  ownership.Readers{inventory.Nomad: (&allocationReader{client: r.allocations, current: a.Current, leaving: a.Draining}).read},
		Problems: r.plugin.Problems,
	}
	r.addPages(a, &made)
	if r.allocations != nil {
		made.Holders, made.Lookup = r.allocations.Read, r.allocations.Lookup
		made.Tasks = append(made.Tasks, func(ctx context.Context) error { r.allocations.Run(ctx, a.Watchdog(), a.WakeUse); return nil })
	}
	return made
}

// source is an agent and, if it reads them, the allocations to which it gives devices.
type source struct {
	*agent.Agent
	allocations *agentapi.Client // nil = they are not read
}

// CheckReservation implements nomadadapter.Source. A reservation that it does not refuse succeeds.
func (s source) CheckReservation(units []inventory.Unit) ([]inventory.Finding, error) {
	findings, err := s.Agent.CheckReservation(units)
	if err == nil && s.allocations != nil {
		s.allocations.Reserved(units)
	}
	return findings, err
}
