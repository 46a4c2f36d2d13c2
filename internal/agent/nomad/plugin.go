// Package nomad composes the agent under Nomad: the device plugin, the pages, the record of allocations.
package nomad

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Name is that of the binary, and of the agent's files in the state directory.
const Name = "nomad-gpu"

// Options are what a process gives its agent.
type Options struct {
	Version string
	Log     hclog.Logger
	End     context.CancelCauseFunc // of the context of Run
}

// Agent is a plugin of Nomad, and the agents of this process behind it, one after another. Make one with New, then call Run once. The other
// methods are safe for concurrent use.
type Agent struct {
	opts    Options
	parent  int // process ID
	agents  *agent.Supervisor
	plugin  *nomadadapter.Plugin // set by Run
	pages   pages
	hangups chan struct{}
}

// New returns an agent that is not running.
func New(o Options) *Agent {
	return &Agent{
		opts: o, parent: os.Getppid(), agents: agent.NewSupervisor(o.End), pages: pages{version: o.Version}, hangups: make(chan struct{}, 1),
	}
}

// Run serves Nomad until it stops the plugin, the Nomad agent ends or a new process is needed, which is an error. It returns in time even
// while the driver, the disk or the reader of the log hangs.
func (a *Agent) Run(ctx context.Context) error {
	p := nomadadapter.New(ctx, a.opts.Version, a.start, a.opts.Log)
	a.plugin, a.pages.plugin = p, p
	p.ObserveReloads(&a.pages.reload)
	p.PersistPolicy(process.Incarnation(a.parent))
	p.PersistGroups(history.BootID)
	go process.WatchParent(ctx, a.parent, a.opts.End)
	go reload(ctx, p, a.hangups)
	process.Serve(ctx, p, a.opts.Log)

	// The driver session ends with the process and is not waited for: it needs up to a second to leave the driver's event wait, a
	// call that hangs never returns, and Nomad kills the plugin after two seconds.
	a.opts.End(nil)
	a.agents.AwaitFiles(p.Flushed())
	cause := context.Cause(ctx)
	if _, stuck := errors.AsType[*watchdog.StuckError](cause); stuck || errors.Is(cause, gpu.ErrDriverStale) {
		return cause
	}
	return nil
}

// start starts the agent of a configuration.
func (a *Agent) start(ctx context.Context, s nomadadapter.Settings, log *slog.Logger) nomadadapter.Source {
	o, client := pluginOptions(s, log, &a.pages)
	o.Explain = explainAdapter(s, a.plugin.Group)
	return source{a.agents.Start(ctx, o), client}
}

// Hangup makes the devices and the policy file be read again. It does not block.
func (a *Agent) Hangup() {
	a.opts.Log.Info("SIGHUP: devices and policy file are read again; a changed plugin block needs an agent restart")
	a.agents.Rescan("SIGHUP")
	watch.Notify(a.hangups) // one request that is pending stands for all
}

// Forward sends a signal for quiesce or resume to the agent. It does not block.
func (a *Agent) Forward(s os.Signal) { a.agents.Forward(s) }

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

// pluginOptions are those of an agent under Nomad, with its pages; the client reads the allocations, nil = they are not read.
func pluginOptions(s nomadadapter.Settings, log *slog.Logger, h *pages) (agent.Options, *agentapi.Client) {
	o := AgentOptions(s)
	o.Log = log
	o.Use = usage.Options{Orchestrator: use.Nomad, MappingDir: s.Operations.MappingDir}
	client := allocations(s, log)
	o.Adapter = func(a *agent.Agent) agent.Adapter {
		adapter := h.adapter(s, log, a)
		adapter.APIs = []inventory.API{inventory.Nomad}
		adapter.Readers = assignment.Readers{inventory.Nomad: allocationReader{client, a.Current, a.Assignments}.read}
		if client != nil {
			adapter.Holders = client.Read
			adapter.Tasks = append(adapter.Tasks, func(ctx context.Context) error { client.Run(ctx, a.Watchdog(), a.WakeUse); return nil })
		}
		return adapter
	}
	return o, client
}

// allocations asks the Nomad agent which allocations have devices; nil without its address.
func allocations(s nomadadapter.Settings, log *slog.Logger) *agentapi.Client {
	if s.Operations.NomadAddress == "" || s.Core.Occupancy == inventory.OccupancyOff {
		return nil
	}
	return agentapi.New(agentapi.Options{
		Address: s.Operations.NomadAddress, TokenFile: s.Operations.NomadTokenFile, Log: log, LookupEnv: os.LookupEnv,
	})
}

// reload reads the policy file again at each SIGHUP until ctx ends. It is a goroutine of its own, because reading the file may
// hang.
func reload(ctx context.Context, p *nomadadapter.Plugin, hangups <-chan struct{}) {
	for {
		select {
		case <-hangups:
			p.Reload(ctx)
		case <-ctx.Done():
			return
		}
	}
}
