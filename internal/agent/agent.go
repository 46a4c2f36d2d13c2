// Package agent composes an agent: driver session, monitor, sources of health information apart from the driver, control socket and
// watchdog. Both commands run the same composition; each adds its orchestrator's adapter.
package agent

import (
	"context"
	"iter"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/node/prover"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// Options are what an agent is composed from. A nil field of a pointer, channel or function type is not used.
type Options struct {
	Name    string        // of the agent's files in the state directory
	Core    core.Config   // with the settings of Health applied
	Health  config.Health // state directory, kernel log and simulation included
	MPSRoot string        // folder of the MPS control daemons, as this process sees it; "" = none
	CDI     cdi.Options   // of the specifications that are written if the policy needs them; Log is that of the agent

	// Open opens a session with the driver: OpenDriver, but in tests.
	Open func() (monitor.Session, error)

	Reset      reset.Policy // when GPUs are reset; the zero value = only by a person
	ResetPause reset.Pause  // the programs that watch GPUs, and are stopped for a reset

	Resetter gpureset.Resetter // calls nvidia-smi: this process, or a component of its own that has the rights for it; required

	LimitSetter limits.Setter // sets limits of device memory, with the rights for it; nil = they are only read

	Handover  *Handover                    // of the history between runs of this process
	After     <-chan struct{}              // the driver is not opened before this is closed: a process has one NVML
	Earlier   <-chan struct{}              // no GPU is proved before this is closed: proofs of an earlier agent of the process end
	Recorded  <-chan struct{}              // no limit is read or set before this is closed: an earlier agent of the process writes the same record of limits
	Ending    <-chan struct{}              // when this is closed, the process ends: nothing waits for a reset of a GPU then
	Signals   <-chan os.Signal             // quiesce and resume: see control.Follow
	Reload    *ReloadStatus                // of the configuration, for Problems
	OnFailure func(context.Context, error) // called when the monitor or the watchdog fails, before the other tasks are stopped
	Adapter   func(*Agent) Adapter         // called once by New
	Use       usage.Options                // orchestrator, job files; the other fields are set by New
	Prove     proof.Policy                 // when GPUs are proved; the zero value = never
	NoRecord  *use.Unknown                 // why the orchestrator's record of work is not read, by the settings; nil = it is
	Explain   explain.Adapter              // of the orchestrator, for the command explain
	Log       *slog.Logger                 // required
}

// Adapter is what an orchestrator's adapter adds to an agent. Every field may be nil.
type Adapter struct {
	Tasks     []func(context.Context) error                       // run beside the agent's own; each returns when its context ends
	View      func(*inventory.Allocatable) *inventory.Allocatable // the inventory as the orchestrator sees it, for operators
	Problems  func() []problem.Problem                            // of the adapter
	Endpoints func() []report.Endpoint                            // for the debug view

	// APIs are those through which this process offers devices, that of the settings first. Readers read which work has GPUs
	// through each. Without APIs no GPU moves between APIs.
	APIs    []inventory.API
	Readers ownership.Readers
	Holders usage.Holders                     // the orchestrator's record for the table of Use
	Lookup  limits.Lookup                     // of one allocation of Nomad
	Pods    func() ([]limit.Pod, bool)        // see limits.Options
	Claims  reconcile.Source                  // of Pods
	Extend  func(report.Report) report.Report // the report with what the adapter has beside
}

// Agent is a composed agent. Its methods are safe for concurrent use. It implements control.Agent.
type Agent struct {
	*monitor.Monitor
	opts     Options
	sources  *sources
	cdi      *cdi.Writer
	socket   *control.Socket
	use      *usage.Watcher
	prover   *prover.Prover // nil = no GPU is proved
	resetter *resetter.Resetter
	limiter  *limits.Limiter
	adapter  Adapter
	flush    *flushNotifier

	monitorDone, socketDone, hostDone, proofsDone, limitsDone chan struct{}
}

// New composes an agent. It reads the boot ID of the node and nothing else; Run starts the work.
func New(o Options) *Agent {
	o.CDI.Log = o.Log
	a := &Agent{
		opts: o, sources: newSources(o), cdi: cdi.New(o.CDI), socket: control.NewSocket(control.Path(o.Health.StateDir, o.Name)),
		monitorDone: make(chan struct{}), socketDone: make(chan struct{}), hostDone: make(chan struct{}), proofsDone: make(chan struct{}), limitsDone: make(chan struct{}),
	}
	o.Use.Mode, o.Use.ProcRoot, o.Use.Log = o.Core.Occupancy, o.Core.Roots.Proc, o.Log
	o.Use.Running = func(p gpu.Process) bool { return nvidia.ProcessRunning(o.Core.Roots, p) }
	store := a.sources.store()
	if o.Handover != nil {
		store = o.Handover.next(store, a.sources.boot)
	}
	if store != nil {
		a.flush = &flushNotifier{Store: store, flushed: make(chan struct{})}
		store = a.flush
	}
	a.Monitor = monitor.New(o.Open, o.Core, o.Log, store)
	a.SetDriverProbe(func() string { return nvidia.DriverFingerprint(o.Core.Roots) })
	a.SetProcessCheck(o.Use.Running)
	a.AwaitLog() // sources.follow reports it
	if o.Adapter != nil {
		a.adapter = o.Adapter(a)
		a.sources.host.agents.Serve(a.adapter.APIs, a.adapter.Readers)
	}
	o.Use.Holders = a.adapter.Holders
	a.use = usage.New(o.Use)
	a.resetter = a.newResetter()
	a.prover = a.newProver()
	a.limiter = a.newLimiter()
	return a
}

// stuckTimeout is how long Run waits for the other tasks when the monitor's own loop is stuck.
const stuckTimeout = 2 * time.Second

// Run runs every task of the agent until ctx ends or one of them fails, waits for all of them and returns the first failure. A
// reset of a GPU that has begun is awaited before that, see afterResets. A monitor whose driver call hangs is abandoned by monitor.Run
// itself. If the monitor's own loop is stuck, Run abandons it and returns *watchdog.StuckError: only a new process helps.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := a.afterResets(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	if a.flush != nil {
		a.flush.stopping = ctx.Done()
	}
	for _, p := range processProblems(a.opts.Core) {
		a.opts.Log.Warn(p.String())
	}
	start := func(task func()) { group.Go(func() error { task(); return nil }) }
	start(func() { a.sources.host.runDaemons(ctx, a.Monitor) })
	start(func() { defer close(a.hostDone); a.sources.host.agents.Run(ctx, a.Monitor) })
	start(func() { a.sources.follow(ctx, a.Monitor) })
	start(func() { a.cdi.Run(ctx, a.Monitor) })
	start(func() { a.use.Run(ctx, a.Monitor) })
	start(func() { defer close(a.proofsDone); a.prove(ctx) })
	start(func() { a.reset(ctx) })
	start(func() { defer close(a.limitsDone); a.limit(ctx) })
	start(func() { control.Follow(ctx, a.opts.Signals, a, a.opts.Log) })
	start(func() {
		defer close(a.socketDone)
		a.socket.Serve(ctx, a, control.Options{
			Config: a.opts.Core, Simulation: a.opts.Health.Simulation, Problems: a.Problems, Endpoints: a.adapter.Endpoints, Explain: a.opts.Explain,
			Ownership: a.ownershipFacts, Resets: a.resetter, Log: a.opts.Log,
		})
	})
	stuck := make(chan error, 1)
	group.Go(func() error {
		err := a.failed(ctx, a.Watchdog().Watch(ctx, a.opts.Log, monitor.TaskName))
		if err != nil {
			stuck <- err
		}
		return err
	})
	group.Go(func() error {
		defer close(a.monitorDone)
		if a.opts.After != nil {
			<-a.opts.After
		}
		a.sources.host.awaitFirst(ctx)
		return a.failed(ctx, a.Monitor.Run(ctx))
	})
	for _, task := range a.adapter.Tasks {
		group.Go(func() error { return task(ctx) })
	}
	ended := make(chan error, 1)
	go func() { ended <- group.Wait() }()
	select {
	case err := <-ended:
		return err
	case err := <-stuck:
		select {
		case err := <-ended:
			return err
		case <-time.After(stuckTimeout):
			return err
		}
	}
}

func (a *Agent) failed(ctx context.Context, err error) error {
	if err != nil && a.opts.OnFailure != nil {
		a.opts.OnFailure(ctx, err)
	}
	return err
}

// MonitorDone is closed when the monitor of a run has closed its driver session, or abandoned it.
func (a *Agent) MonitorDone() <-chan struct{} { return a.monitorDone }

// ProofsDone is closed when, after the context of Run ended, no proof runs any more, also none of an earlier agent.
func (a *Agent) ProofsDone() <-chan struct{} { return a.proofsDone }

// LimitsDone is closed when, after the context of Run ended, no limit is set any more and the record of limits is written.
func (a *Agent) LimitsDone() <-chan struct{} { return a.limitsDone }

// FilesDone returns channels which are all closed when, after the context of Run ended, the agent has written its history and its record of limits for
// the last time and has removed its socket and its lock.
func (a *Agent) FilesDone() []<-chan struct{} {
	done := []<-chan struct{}{a.socketDone, a.hostDone, a.limitsDone}
	if a.flush != nil {
		done = append(done, a.flush.flushed)
	}
	return done
}

// State is the monitor's state with the inventory as the orchestrator sees it.
func (a *Agent) State() core.State {
	s := a.Monitor.State()
	if a.adapter.View != nil {
		s.Allocatable = a.adapter.View(s.Allocatable)
	}
	return s
}

// Extend implements control.Extender.
func (a *Agent) Extend(r report.Report) report.Report {
	if a.prover != nil {
		r = r.WithProofs(a.prover.Decision())
	}
	if resets := a.Resets(); resets != nil {
		r = r.WithResets(*resets)
	}
	if t := a.KnownLimits(); t != nil {
		r = r.WithMemoryLimits(*t)
	}
	if a.adapter.Extend == nil {
		return r
	}
	return a.adapter.Extend(r)
}

// KnownLimits is the latest table of limits of device memory for people and programs; nil if none was read so far, and while the policy has none and no other program
// has set one.
func (a *Agent) KnownLimits() *limit.Table {
	t := a.Limits()
	if t.At.IsZero() || !a.opts.Core.Policy.Limits.On && len(t.Shares) == 0 {
		return nil
	}
	t.Problems = a.limiter.Problems() // with those of the limiter itself
	return &t
}

// Reserved reports that devices were reserved for new work. It never blocks.
func (a *Agent) Reserved(devices []gpu.Device) {
	a.Monitor.Reserved(devices)
	a.sources.host.agents.Reserved(devices)
	a.use.Wake()
}

// Ownership returns the GPUs that have a target, or that the APIs of this agent share, and what their moves wait for.
func (a *Agent) Ownership() []ownership.Status { return a.sources.host.agents.Status() }

// Draining returns the GPUs that wait for the end of their work, to move to another API or to be no more this agent's.
func (a *Agent) Draining() []gpu.DeviceID { return a.sources.host.agents.Draining() }

// WakeUse makes the table of Use be read again soon: an orchestrator's record has changed. It never blocks.
func (a *Agent) WakeUse() { a.use.Wake() }

// Use returns the latest table of what the devices do and which work has them.
func (a *Agent) Use() use.Table { return a.use.Table() }

// WatchUse yields the latest table and then each newer one until ctx ends.
func (a *Agent) WatchUse(ctx context.Context) iter.Seq[use.Table] { return a.use.Watch(ctx) }

// Problems are those of the agent itself: configuration, sources, CDI specifications, socket, limits of device memory, adapter.
func (a *Agent) Problems() []problem.Problem {
	var adapter, proofs []problem.Problem
	if a.prover != nil {
		proofs = a.prover.Problems()
	}
	if a.adapter.Problems != nil {
		adapter = a.adapter.Problems()
	}
	return slices.Concat(a.opts.Reload.Problems(), a.sources.problems(), a.cdi.Problems(), a.socket.Problems(), processProblems(a.opts.Core), proofs,
		a.resetter.Problems(), a.limiter.Problems(), adapter)
}

// SourcesUp reports for each source of health information apart from the driver ("kernel_log", "history") whether it works. A source
// that is switched off is missing.
func (a *Agent) SourcesUp() map[string]bool { return a.sources.up() }

// LimitRuntime lowers GOMAXPROCS and GOGC, because an agent serves a few requests a minute and holds a few hundred kB (decision 20).
// GOMAXPROCS and GOGC in the environment take precedence. Call it once, at the start of the process.
func LimitRuntime() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // of Go code; driver calls are beside it
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(40)
	}
}
