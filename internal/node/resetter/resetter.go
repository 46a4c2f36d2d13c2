package resetter

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/recordfile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Taken is a GPU that no API gives out.
type Taken interface {
	WantedBack() <-chan struct{} // closed when the reset is not to begin; one that has begun goes on

	// ReleaseDriver has every agent of the node close the driver, and OpenDriver open it again. They return at once.
	ReleaseDriver()
	OpenDriver()

	Release()
}

// Node is what a Resetter asks of the agent, and does to it. Its methods are safe for concurrent use.
type Node interface {
	// See returns what the agent sees now, without resets. It makes no driver call.
	See() reset.Node

	// Take takes a GPU away from every API, when it was free for long enough and no process uses it. It waits for that until ctx ends.
	Take(ctx context.Context, id gpu.DeviceID) (Taken, error)

	// Target returns where a GPU is; false if that is not known.
	Target(id gpu.DeviceID) (gpureset.Target, bool)

	// IsAgent reports whether a process is an agent of the node, which closes the driver for a reset.
	IsAgent(gpureset.Client) bool

	// EndsWhenTaken reports whether a process that has a GPU open ends when the GPU is taken: the MPS control daemon of
	// a pool without work.
	EndsWhenTaken(id gpu.DeviceID, c gpureset.Client) bool

	// AwaitReleased waits until this agent has closed the driver, AwaitReading until it has read all GPUs after it has opened it again.
	AwaitReleased(ctx context.Context) error
	AwaitReading(ctx context.Context) error

	// WasReset records that a GPU was reset.
	WasReset(id gpu.DeviceID)
}

// Options configure a Resetter.
type Options struct {
	Node     Node
	Policy   reset.Policy
	Resetter gpureset.Resetter
	File     string             // of the state; "" = it is forgotten with the process
	Pause    reset.Pause        // the programs that watch GPUs, and are stopped for a reset
	Folder   string             // in which the commands of Pause have their working folders; required for Pause
	On       []reconcile.Source // what See depends on
	Log      *slog.Logger       // required

	// Runs reports whether an nvidia-smi may still reset a GPU, also one of an earlier process; nil = none does.
	Runs func() (bool, error)

	// Command runs a command of Pause; nil = proofcommand.Run.
	Command func(context.Context, proofcommand.Proof) proofcommand.Result
}

// Resetter resets GPUs. Make one with New, call Run once, and End when the agent ends. Its methods are safe for concurrent use.
type Resetter struct {
	opts     Options
	shown    atomic.Pointer[reset.Result]
	progress atomic.Pointer[Progress]
	resets   *watch.Value[gpu.DeviceID] // the GPU whose reset runs; "" = none does
	problems problemset.Set
	changed  chan struct{}
	work     sync.WaitGroup

	mu      sync.Mutex // is held while the file is written
	state   reset.State
	loaded  bool
	file    *recordfile.File[reset.State]
	ending  bool
	cancel  context.CancelCauseFunc // of the reset that runs, until nvidia-smi is called; nil = none
	restore context.CancelFunc      // of the goroutine that restores persistence modes; nil = none runs
	ready   readiness
	pausing sync.Mutex              // held while a command of Pause runs
	orphan  time.Time               // since when an nvidia-smi was seen that this process does not wait for; zero = none is
	told    map[gpu.DeviceID]string // with reset.Report: the faults that were logged, by GPU
}

// Times that are no settings.
const (
	passAtMost = 30 * time.Second // for a pass, before the watchdog reports it
	retryStore = 10 * time.Second

	takeWithin    = 90 * time.Second // to take the GPUs: they are free for the settle time before, by all that is seen
	releaseWithin = 10 * time.Second // for this agent to close the driver, and then for the others
	lookEvery     = 500 * time.Millisecond
	readWithin    = time.Minute // for the first reading after a reset
	restoreEvery  = time.Minute
	busyEvery     = 5 * time.Second // while the nvidia-smi of an earlier process runs
)

// New returns a Resetter. It reads nothing.
func New(o Options) *Resetter {
	if o.Command == nil {
		o.Command = proofcommand.Run
	}
	r := &Resetter{
		opts: o, problems: problemset.Set{Log: o.Log}, changed: make(chan struct{}, 1), resets: watch.NewValue[gpu.DeviceID](""),
		told: map[gpu.DeviceID]string{},
	}
	r.file = recordfile.New(recordfile.Options[reset.State]{
		Path: o.File, MaxBytes: reset.MaxBytes, Parse: reset.Parse, Encode: reset.State.Encode, Problems: &r.problems, Code: problem.ResetState,
		Name: "the record of resets", Without: "no GPU is reset", Damaged: "earlier resets do not count",
	})
	r.shown.Store(&reset.Result{})
	return r
}

// Decision is the latest one. It is not to be changed.
func (r *Resetter) Decision() reset.Result { return *r.shown.Load() }

// Resets returns the GPU whose reset runs; "" = none does. Changed is for passes that depend on it.
func (r *Resetter) Resets() gpu.DeviceID { return r.resets.Load() }

// Changed returns a channel that is closed when a reset begins or has ended.
func (r *Resetter) Changed() <-chan struct{} { return r.resets.Changed() }

// Problems has what keeps GPUs from being reset, and what a reset has left to do.
func (r *Resetter) Problems() []problem.Problem { return r.problems.List() }

// Run resets GPUs by the policy until ctx ends. With a policy that is off it returns at once, when it has looked for what an earlier process has left.
func (r *Resetter) Run(ctx context.Context, w *watchdog.Registry) {
	if !r.opts.Policy.On() {
		if _, err := os.Stat(r.opts.File); err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			_ = r.load() // the file's problem has the error
		}
		return
	}
	task := w.Register("resets")
	defer task.Done()
	on := append(slices.Clone(r.opts.On), reconcile.Signal(r.changed))
	reconcile.Loop{On: on, Task: task, Limit: passAtMost}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		return r.pass(ctx)
	})
}

// End has no reset begin any more, and cancels the one that has not called nvidia-smi. The channel is closed when none runs. It does not block: mu is held
// while the file is written, and a disk can hang.
func (r *Resetter) End() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.end()
		r.work.Wait()
	}()
	return ended
}

func (r *Resetter) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ending = true
	if r.cancel != nil {
		r.cancel(ErrEnding)
	}
	if r.restore != nil {
		r.restore()
	}
	r.ready.stop()
}

// load reads the state once. A reset that is in it was interrupted. mu is locked.
func (r *Resetter) load() error {
	if r.loaded {
		return nil
	}
	if err := r.file.Load(&r.state); err != nil {
		return err
	}
	r.loaded = true
	r.review()
	r.beginRestore()
	return nil
}

// review has the state follow from what is seen, without a decision about resets. mu is locked.
func (r *Resetter) review() {
	res := reset.Policy{}.Next(r.state, r.opts.Node.See(), time.Now())
	r.state = res.State
	r.shown.Store(&res)
}

// pass decides, and begins a reset. It returns when the next pass is due.
func (r *Resetter) pass(ctx context.Context) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ending {
		return reconcile.Never
	}
	if err := r.load(); err != nil {
		return retryStore
	}
	r.checkReady(ctx)
	node, now := r.see(), time.Now()
	res := r.opts.Policy.Next(r.state, node, now)
	if err := r.file.Store(res.State); err != nil { // what runs must be on disk
		for _, b := range res.Begin {
			res.State = res.State.Ended(b.GPU, reset.End{Number: b.Number, Outcome: reset.Cancelled, At: now}, now)
		}
		res.Begin, res.Wake = nil, now.Add(retryStore)
	}
	r.state = res.State
	r.shown.Store(&res)
	r.note(node)
	r.beginRestore()
	if r.opts.Policy.Mode == reset.Act {
		for _, b := range res.Begin {
			r.begin(ctx, b, r.opts.Policy)
		}
	} else {
		r.tell(node, res)
	}
	next := readyEvery
	if !res.Wake.IsZero() {
		next = min(next, max(res.Wake.Sub(now), 0))
	}
	return next
}

// ending is why no reset begins after the end of one was recorded.
const ending = "the GPUs of the latest reset are not given back so far"

// see is what the agent sees, with whether GPUs can be reset. mu is locked.
func (r *Resetter) see() reset.Node {
	n := r.opts.Node.See()
	_, runs := r.state.Running()
	switch {
	case r.Resets() != "" && !runs: // its end is recorded, and its GPUs are not given back so far
		n.Paused = cmp.Or(n.Paused, ending)
	case r.state.Watchers && !runs:
		n.Paused = cmp.Or(n.Paused, resuming)
	case !r.ready.known:
		n.Paused = cmp.Or(n.Paused, "whether GPUs can be reset is not known yet")
	case r.ready.err != nil:
		n.Cannot = both(n.Cannot, r.ready.err)
	}
	return n
}

// note keeps the problem of a node on which no GPU can be reset.
func (r *Resetter) note(n reset.Node) {
	if n.Cannot == "" || r.opts.Policy.Mode != reset.Act {
		r.problems.End(problem.ResetCannot, "", "GPUs can be reset")
		return
	}
	one := problem.Problem{Code: problem.ResetCannot, Text: "reset.mode is act, and this agent can't reset a GPU: " + n.Cannot}
	r.problems.Put(one, slog.LevelWarn, one.Text)
}

// tell logs what would be reset with reset.Report, once for each fault.
func (r *Resetter) tell(n reset.Node, res reset.Result) {
	for i := range n.GPUs {
		if n.GPUs[i].TakesWork {
			delete(r.told, n.GPUs[i].ID)
		}
	}
	for _, b := range res.Begin {
		if r.told[b.GPU] != b.Cause {
			r.told[b.GPU] = b.Cause
			r.opts.Log.Info("GPU would be reset: reset.mode is report", "id", b.GPU, "cause", b.Cause)
		}
	}
}

// begin has a goroutine reset a GPU. mu is locked.
func (r *Resetter) begin(ctx context.Context, b reset.Begin, p reset.Policy) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r.cancel = cancel
	r.progress.Store(&Progress{Number: b.Number, GPU: b.GPU})
	r.resets.Store(b.GPU)
	r.work.Go(func() {
		defer cancel(nil)
		a := &attempt{Resetter: r, Begin: b, policy: p, cancel: cancel}
		a.run(ctx)
	})
}
