package prover

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/recordfile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Taken is a GPU that no API gives out.
type Taken interface {
	WantedBack() <-chan struct{} // closed when the proof is to end
	Release()
}

// Node is what a Prover asks of the agent, and does to it. Its methods are safe for concurrent use.
type Node interface {
	// See returns what the agent sees now, without proofs. It makes no driver call.
	See() proof.Node

	// Take takes a GPU away from every API, when it was free for long enough and no process uses it. It waits for that until ctx ends.
	Take(ctx context.Context, id gpu.DeviceID) (Taken, error)

	// Failed and Passed record a verdict. When they return, it is published. HasFailed reports whether a failure is recorded, which an operator may
	// have cleared.
	Failed(ctx context.Context, id gpu.DeviceID, f health.ProofFailure) error
	Passed(ctx context.Context, id gpu.DeviceID) error
	HasFailed(id gpu.DeviceID) bool

	// Decided has these GPUs of a node, and no others, take no work until they are proved, and shows when GPUs passed their proof, by a state.
	Decided(proof.Node, []proof.Withheld, proof.State)
}

// Options configure a Prover.
type Options struct {
	Node        Node
	Policy      proof.Policy
	File        string             // of the state; "" = it is forgotten with the process
	Folder      string             // in which proofs have their working folders; required for a policy that is on
	LibraryPath string             // for the command: see proofcommand.Proof
	On          []reconcile.Source // what See depends on
	Log         *slog.Logger       // required

	// Command runs the command; nil = proofcommand.Run.
	Command func(context.Context, proofcommand.Proof) proofcommand.Result
}

// Prover proves GPUs. Make one with New, then call Run once. The other methods are safe for concurrent use.
type Prover struct {
	opts     Options
	shown    atomic.Pointer[proof.Result]
	problems problemset.Set
	changed  chan struct{}
	runs     *watch.Value[int] // proofs that run

	mu    sync.Mutex
	taken []proof.Begin // whose command runs since a moment ago
	ended []ended

	// Of the goroutine of Run.

	state   proof.State
	file    *recordfile.File[proof.State]
	running map[uint64]context.CancelCauseFunc // by proof.Begin.Number
	proofs  sync.WaitGroup
}

// ended is a proof that has ended, with the GPU that it still has.
type ended struct {
	proof.End
	release func()
}

// Times that are no settings.
const (
	passAtMost   = 30 * time.Second // for a pass, before the watchdog reports it: it awaits a call of the monitor for each verdict
	recordAtMost = 5 * time.Second  // for a verdict to be published
	retryStore   = 10 * time.Second
)

// New returns a Prover. It reads nothing.
func New(o Options) *Prover {
	if o.Command == nil {
		o.Command = proofcommand.Run
	}
	p := &Prover{opts: o, problems: problemset.Set{Log: o.Log}, changed: make(chan struct{}, 1), runs: watch.NewValue(0), running: map[uint64]context.CancelCauseFunc{}}
	p.file = recordfile.New(recordfile.Options[proof.State]{
		Path: o.File, MaxBytes: proof.MaxBytes, Parse: proof.Parse, Encode: proof.State.Encode, Problems: &p.problems, Code: problem.ProofState,
		Name: "the record of proofs", Without: "no GPU is proved", Damaged: "no GPU counts as proved",
	})
	p.shown.Store(&proof.Result{})
	return p
}

// Decision is the latest one. It is not to be changed.
func (p *Prover) Decision() proof.Result { return *p.shown.Load() }

// Runs returns how many proofs run. Changed returns a channel that is closed when that changes.
func (p *Prover) Runs() int { return p.runs.Load() }

// Changed is for passes that depend on Runs.
func (p *Prover) Changed() <-chan struct{} { return p.runs.Changed() }

// Problems has what keeps GPUs from being proved.
func (p *Prover) Problems() []problem.Problem { return p.problems.List() }

// Run proves GPUs until ctx ends, then ends the proofs that run and waits for their ends.
func (p *Prover) Run(ctx context.Context, w *watchdog.Registry) {
	task := w.Register("proofs")
	defer task.Done()
	on := append(slices.Clone(p.opts.On), reconcile.Signal(p.changed))
	reconcile.Loop{On: on, Task: task, Limit: passAtMost}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		return p.pass(ctx)
	})
	for _, cancel := range p.running {
		cancel(errors.New(proof.Shutdown.String()))
	}
	p.proofs.Wait()
	p.settle(context.WithoutCancel(ctx))
	if p.file.Loaded() {
		_ = p.file.Store(p.state)
	}
}

// Await waits until the prover of an earlier agent of this process has ended (nil = there was none), also after the end of ctx. Meanwhile which GPUs take
// no work until they are proved is decided by the record that that prover writes.
func (p *Prover) Await(ctx context.Context, earlier <-chan struct{}) {
	if earlier == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		<-earlier
		cancel()
	}()
	reconcile.Loop{On: p.opts.On}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		node := p.opts.Node.See()
		s, _ := p.file.Read() // Run reports that it can't be read
		p.opts.Node.Decided(node, p.opts.Policy.Withheld(s, node), s)
		return reconcile.Never
	})
	<-earlier
}

// pass records what has ended, decides, and begins and ends proofs. It returns when the next pass is due.
func (p *Prover) pass(ctx context.Context) time.Duration {
	if err := p.file.Load(&p.state); err != nil { // which GPUs are proved, and which failed, is not known
		p.opts.Node.Decided(p.opts.Node.See(), nil, proof.State{}) // no GPU is missing because of a file
		return retryStore
	}
	p.settle(ctx)
	node, now := p.opts.Node.See(), time.Now()
	p.clear(now)
	r := p.opts.Policy.Next(p.state, node, now)
	if err := p.file.Store(r.State); err != nil {
		for _, b := range r.Begin { // what runs must be on disk
			r.State, _ = r.State.Ended(proof.End{GPU: b.GPU, Number: b.Number, Outcome: proof.Cancelled}, now)
		}
		r.Begin, r.Wake = nil, now.Add(retryStore)
	}
	p.state = r.State
	p.shown.Store(&r)
	p.notRun(node)
	p.opts.Node.Decided(node, r.Withheld, r.State)
	for _, c := range r.Cancel {
		if cancel, ok := p.running[c.Number]; ok {
			cancel(errors.New(c.Why.String()))
		}
	}
	for _, b := range r.Begin {
		p.begin(ctx, b)
	}
	switch {
	case !r.Wake.IsZero() && p.file.OnDisk():
		return min(max(r.Wake.Sub(now), 0), statefile.LookEvery)
	case !r.Wake.IsZero():
		return max(r.Wake.Sub(now), 0)
	case p.file.OnDisk():
		return statefile.LookEvery
	}
	return reconcile.Never
}

// begin has a goroutine prove a GPU.
func (p *Prover) begin(ctx context.Context, b proof.Begin) {
	ctx, cancel := context.WithCancelCause(ctx)
	p.running[b.Number] = cancel
	p.runs.Store(len(p.running))
	p.proofs.Go(func() {
		defer cancel(nil)
		end := p.prove(ctx, b)
		p.mu.Lock()
		p.ended = append(p.ended, end)
		p.mu.Unlock()
		watch.Notify(p.changed)
	})
}

// settle records which commands run, and what has ended: the condition first, which takes a GPU that failed from new work before it is given out again.
func (p *Prover) settle(ctx context.Context) {
	p.mu.Lock()
	taken, all := p.taken, p.ended
	p.taken, p.ended = nil, nil
	p.mu.Unlock()
	for _, b := range taken {
		p.state = p.state.Runs(b, time.Now())
	}
	for _, e := range all {
		delete(p.running, e.Number)
		next, counts := p.state.Ended(e.End, time.Now())
		if counts && !p.record(ctx, e.End, next) {
			e.Outcome = proof.Cancelled
			next, counts = p.state.Ended(e.End, time.Now())
		}
		e.release()
		p.state = next
		p.report(e.End, counts)
		p.runs.Store(len(p.running))
	}
}

// record publishes a verdict. Without that the proof has none.
func (p *Prover) record(ctx context.Context, e proof.End, next proof.State) bool {
	ctx, cancel := context.WithTimeout(ctx, recordAtMost)
	defer cancel()
	var err error
	switch e.Outcome {
	case proof.Failed:
		r, _ := next.Of(e.GPU)
		f := p.opts.Policy.Failure(r)
		err = p.opts.Node.Failed(ctx, e.GPU, health.ProofFailure{Summary: cmp.Or(f.Summary, "exit status 1"), State: f.State, Service: f.NeedsService})
	case proof.Passed:
		err = p.opts.Node.Passed(ctx, e.GPU)
	case proof.Cancelled, proof.NotRun:
	}
	if err != nil {
		p.opts.Log.Warn("the result of a proof is not recorded, so the GPU is proved again", "id", e.GPU, "outcome", e.Outcome, "error", err)
	}
	return err == nil
}

// clear records the failures that an operator has cleared.
func (p *Prover) clear(now time.Time) {
	for _, r := range p.state.Records {
		if r.Failed() && !p.opts.Node.HasFailed(r.GPU) {
			p.state, _ = p.state.Clear(r.GPU, now)
		}
	}
}

// report logs the end of a proof. One that could not run is a problem: see notRun.
func (p *Prover) report(e proof.End, counts bool) {
	log := p.opts.Log.With("id", e.GPU, "took", e.Took, "summary", e.Summary)
	switch {
	case !counts || e.Outcome == proof.Cancelled:
		log.Info("proof was ended without a result", "reason", e.Detail)
	case e.Outcome == proof.Failed:
		log.Warn("GPU failed its proof")
	case e.Outcome == proof.Passed:
		log.Info("GPU passed its proof")
	}
}

// notRun keeps a problem for each GPU whose check could not run, by the state: also after a restart, and until the GPU is gone.
func (p *Prover) notRun(n proof.Node) {
	here := map[string]bool{}
	for i := range n.GPUs {
		r, _ := p.state.Of(n.GPUs[i].ID)
		if r.Tries == nil || r.Tries.Count == 0 {
			continue
		}
		here[string(r.GPU)] = true
		one := problem.Problem{
			Code: problem.ProofNotRun, Object: string(r.GPU), Text: "the check of " + string(r.GPU) + " could not run: " + r.Tries.Detail,
			Remedy: "run the command of prove.command by hand; it is tried again at " + r.Tries.Retry.Format(time.RFC3339),
		}
		p.problems.Put(one, slog.LevelWarn, "the check of a GPU could not run", "id", r.GPU, "reason", r.Tries.Detail, "again", r.Tries.Retry)
	}
	for _, one := range p.problems.List() {
		if one.Code == problem.ProofNotRun && !here[one.Object] {
			p.problems.End(one.Code, one.Object, "the check of a GPU runs again, or the GPU is gone", "id", one.Object)
		}
	}
}
