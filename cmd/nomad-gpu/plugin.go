package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
	"github.com/tandem-gpu/tandem/internal/util/asynclog"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// serve serves Nomad until it stops the plugin, the Nomad agent ends or a new process is needed, and returns the exit code. It
// returns in time even while the driver, the disk or the reader of the log hangs.
func serve(stderr io.Writer) int {
	parent := os.Getppid()
	ctx, end := context.WithCancelCause(context.Background())
	defer end(nil)
	lines := asynclog.New(stderr, lostLines)
	defer lines.Flush(agent.FlushTimeout)
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: lines, JSONFormat: true})
	sup := agent.NewSupervisor(end)
	var pages pages
	var p *nomadadapter.Plugin
	p = nomadadapter.New(ctx, version, func(ctx context.Context, s nomadadapter.Settings, log *slog.Logger) nomadadapter.Source {
		o, client := pluginOptions(s, log, &pages)
		o.Explain = explainAdapter(s, func(inv *inventory.Inventory, id inventory.UnitID) (nomadadapter.GroupInfo, bool) {
			return p.Group(inv, id)
		})
		return source{sup.Start(ctx, o), client}
	}, log)
	pages.plugin = p
	p.ObserveReloads(&pages.reload)
	p.PersistPolicy(process.Incarnation(parent))
	p.PersistGroups(history.BootID)
	hangups := make(chan struct{}, 1)
	onHangup := func() {
		log.Info("SIGHUP: devices and policy file are read again; a changed plugin block needs an agent restart")
		sup.Rescan("SIGHUP")
		watch.Notify(hangups) // one request that is pending stands for all
	}
	newHandlers(end, onHangup, sup.Forward).handle(ctx)
	agent.LimitRuntime()

	go process.WatchParent(ctx, parent, end)
	go reload(ctx, p, hangups)
	process.Serve(ctx, p, log)

	// The driver session ends with the process and is not waited for: it needs up to a second to leave the driver's event wait, a
	// call that hangs never returns, and Nomad kills the plugin after two seconds.
	end(nil)
	sup.AwaitFiles(p.Flushed())
	cause := context.Cause(ctx)
	if _, stuck := errors.AsType[*watchdog.StuckError](cause); stuck || errors.Is(cause, gpu.ErrDriverStale) {
		return cli.ExitFailed
	}
	return cli.ExitOK
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

// pluginOptions are those of an agent under Nomad, with its pages; the client reads the allocations, nil = they are not read.
func pluginOptions(s nomadadapter.Settings, log *slog.Logger, h *pages) (agent.Options, *agentapi.Client) {
	o := agentOptions(s)
	o.Log = log
	o.Use = usage.Options{Orchestrator: use.Nomad, MappingDir: s.Operations.MappingDir}
	client := allocations(s, log)
	if client != nil {
		o.Use.Holders = client.Read
	}
	o.Adapter = func(a *agent.Agent) agent.Adapter {
		adapter := h.adapter(s, log, a)
		adapter.APIs = []inventory.API{inventory.Nomad}
		adapter.Readers = assignment.Readers{inventory.Nomad: allocationReader{client, a.Current, a.Assignments}.read}
		if client != nil {
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

// lostLines is a line of the log, in the format that Nomad reads, about the lines that are missing from it.
func lostLines(lines int64) []byte {
	var line bytes.Buffer
	hclog.New(&hclog.LoggerOptions{Output: &line, JSONFormat: true}).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}
