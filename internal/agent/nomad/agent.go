// Package nomad composes the agent under Nomad: the device plugin, its agents one after another, the record of allocations, the pages.
package nomad

import (
	"context"
	"errors"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
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
	opts      Options
	parent    int // process ID
	agents    *agent.Supervisor
	plugin    *nomadadapter.Plugin // set by Run
	reload    agent.ReloadStatus
	durations metrics.Durations
	hangups   chan struct{}
	servers   servers
	ending    <-chan struct{} // closed when the process ends; set by Run
}

// New returns an agent that is not running.
func New(o Options) *Agent {
	return &Agent{opts: o, parent: os.Getppid(), agents: agent.NewSupervisor(o.End), durations: newDurations(), hangups: make(chan struct{}, 1)}
}

// Run serves Nomad until it stops the plugin, the Nomad agent ends, or a new process is needed, which is an error, as it is if the plugin can't be
// served. It returns in time even while the driver, the disk or the reader of the log hangs.
func (a *Agent) Run(ctx context.Context) error {
	a.ending = ctx.Done()
	p := nomadadapter.New(ctx, a.opts.Version, a.start, a.opts.Log)
	a.plugin = p
	p.ObserveReloads(&a.reload)
	p.ObserveDurations(a.durations.Observe)
	p.PersistPolicy(process.Incarnation(a.parent))
	p.PersistGroups(history.BootID)
	go process.WatchParent(ctx, a.parent, a.opts.End)
	go a.followHangups(ctx)
	err := process.Serve(ctx, p, a.opts.Log)

	// The driver session ends with the process and is not waited for: it needs up to a second to leave the driver's event wait, a
	// call that hangs never returns, and Nomad kills the plugin after two seconds.
	a.opts.End(nil)
	a.agents.AwaitFiles(p.Flushed())
	cause := context.Cause(ctx)
	if _, stuck := errors.AsType[*watchdog.StuckError](cause); stuck || errors.Is(cause, gpu.ErrDriverStale) {
		return cause
	}
	return err
}

// Hangup makes the devices and the policy file be read again. It does not block.
func (a *Agent) Hangup() {
	a.opts.Log.Info("SIGHUP: devices and policy file are read again; a changed plugin block needs an agent restart")
	a.agents.Rescan("SIGHUP")
	watch.Notify(a.hangups) // one request that is pending stands for all
}

// Forward sends a signal for quiesce or resume to the agent. It does not block.
func (a *Agent) Forward(s os.Signal) { a.agents.Forward(s) }

// followHangups reads the policy file again at each SIGHUP until ctx ends. It is a goroutine of its own, because reading the file may
// hang.
func (a *Agent) followHangups(ctx context.Context) {
	for {
		select {
		case <-a.hangups:
			a.plugin.Reload(ctx)
		case <-ctx.Done():
			return
		}
	}
}
