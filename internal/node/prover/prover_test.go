package prover_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/node/prover"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
)

// node is the agent of a test: a node with GPUs.
type node struct {
	*testing.T
	file    string
	command func(context.Context, proofcommand.Proof) proofcommand.Result
	policy  proof.Policy
	changed chan struct{}

	mu       sync.Mutex
	seen     proof.Node
	failed   map[gpu.DeviceID]health.ProofFailure
	withheld []proof.Withheld
	decided  int // GPUs of which that is known
	taken    map[gpu.DeviceID]*taken
	events   []string // in order
	takeErr  error    // of Take
	failErr  error    // of Failed and Passed
}

type taken struct {
	n    *node
	id   gpu.DeviceID
	back chan struct{}
}

func (t *taken) WantedBack() <-chan struct{} { return t.back }
func (t *taken) Release() {
	t.n.event("released " + string(t.id))
	t.n.mu.Lock()
	defer t.n.mu.Unlock()
	delete(t.n.taken, t.id)
}

func newNode(t *testing.T, gpus ...gpu.DeviceID) *node {
	n := &node{
		T: t, file: filepath.Join(t.TempDir(), "proofs.json"), policy: proof.Default(), changed: make(chan struct{}, 1),
		failed: map[gpu.DeviceID]health.ProofFailure{}, taken: map[gpu.DeviceID]*taken{},
		command: func(context.Context, proofcommand.Proof) proofcommand.Result {
			return proofcommand.Result{Outcome: proofcommand.Passed, Duration: time.Second, Summary: "fine"}
		},
	}
	n.policy.Command, n.policy.At, n.policy.Withhold = []string{"/check"}, []proof.Reason{proof.Boot, proof.Reset}, true
	n.seen = proof.Node{Name: "n", Boot: "b1", BootTime: time.Now()}
	for _, id := range gpus {
		n.seen.GPUs = append(n.seen.GPUs, proof.GPU{ID: id, Pools: []string{"gpu"}})
	}
	return n
}

func (n *node) event(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events = append(n.events, text)
}

func (n *node) See() proof.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.seen
	s.GPUs = slices.Clone(s.GPUs)
	return s
}

func (n *node) Take(ctx context.Context, id gpu.DeviceID) (prover.Taken, error) {
	n.mu.Lock()
	err := n.takeErr
	n.mu.Unlock()
	if err != nil {
		<-ctx.Done()
		return nil, err
	}
	n.event("taken " + string(id))
	t := &taken{n, id, make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken[id] = t
	return t, nil
}

func (n *node) Failed(_ context.Context, id gpu.DeviceID, f health.ProofFailure) error {
	n.event("failed " + string(id))
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failErr == nil {
		n.failed[id] = f
	}
	return n.failErr
}

func (n *node) Passed(_ context.Context, id gpu.DeviceID) error {
	n.event("passed " + string(id))
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.failed, id)
	return n.failErr
}

func (n *node) HasFailed(id gpu.DeviceID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.failed[id]
	return ok
}

func (n *node) Decided(of proof.Node, all []proof.Withheld, _ proof.State) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.withheld, n.decided = all, len(of.GPUs)
}

// change changes what is seen.
func (n *node) change(do func(*proof.Node)) {
	n.mu.Lock()
	do(&n.seen)
	n.mu.Unlock()
	watch.Notify(n.changed)
	synctest.Wait()
}

// with calls a function while nothing else reads or changes the node.
func (n *node) with(do func()) {
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	do()
}

// happened returns what happened since the last call.
func (n *node) happened() string {
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	all := strings.Join(n.events, ", ")
	n.events = nil
	return all
}

// start runs a Prover until stop is called.
func (n *node) start() (p *prover.Prover, stop func()) {
	ctx, cancel := context.WithCancel(n.Context())
	p = n.prover()
	done := make(chan struct{})
	go func() { p.Run(ctx, watchdog.NewRegistry()); close(done) }()
	synctest.Wait()
	return p, func() { cancel(); <-done }
}

func (n *node) prover() *prover.Prover {
	return prover.New(prover.Options{
		Node: n, Policy: n.policy, File: n.file, Folder: "/folder", On: []reconcile.Source{reconcile.Signal(n.changed)}, Log: slog.New(slog.DiscardHandler),
		Command: func(ctx context.Context, one proofcommand.Proof) proofcommand.Result {
			n.event("run " + string(one.GPU) + " " + one.Reason)
			return n.command(ctx, one)
		},
	})
}

// ready is after a boot, when no node waits for others any more: that is up to proof.Policy.Timeout.
const ready = proof.SettleTime + time.Minute

// A GPU is taken, proved and given back, once a boot, also over restarts of the agent.
func TestProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		p, stop := n.start()
		if got := n.happened(); got != "" {
			t.Errorf("before the settle time: %s", got)
		}
		time.Sleep(ready)
		if got := n.happened(); got != "taken GPU-1, run GPU-1 boot, passed GPU-1, released GPU-1" {
			t.Errorf("%s; %+v", got, p.Decision().Waits)
		}
		if r, _ := p.Decision().State.Of("GPU-1"); r.Last == nil || !r.Last.Passed || r.Last.Summary != "fine" || r.Running != nil {
			t.Errorf("%+v", r)
		}
		stop()
		_, stop = n.start()
		time.Sleep(time.Hour)
		if got := n.happened(); got != "" {
			t.Errorf("after a restart: %s", got)
		}
		stop()
		n.change(func(s *proof.Node) { s.Boot = "b2" })
		_, stop = n.start()
		time.Sleep(ready)
		if got := n.happened(); !strings.HasPrefix(got, "taken GPU-1, run GPU-1 boot") {
			t.Errorf("after a boot: %s", got)
		}
		stop()
	})
}

// A record that someone has removed is written again, although nothing is due: a restart proves no GPU twice.
func TestRemovedRecordIsWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		_, stop := n.start()
		defer stop()
		time.Sleep(ready)
		check.NoError(t, os.Remove(n.file))
		time.Sleep(statefile.LookEvery + time.Second)
		synctest.Wait()
		if _, err := os.Stat(n.file); err != nil {
			t.Error(err)
		}
	})
}

// While a proof runs, that is known to what must not run beside it, which is woken at its begin and its end.
func TestRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, end := newNode(t, "GPU-1"), make(chan struct{})
		passes := n.command
		n.command = func(ctx context.Context, one proofcommand.Proof) proofcommand.Result {
			<-end
			return passes(ctx, one)
		}
		p, stop := n.start()
		defer stop()
		changed := p.Changed()
		for _, runs := range []int{1, 0} {
			time.Sleep(ready)
			if <-changed; p.Runs() != runs {
				t.Errorf("%d proofs run, want %d", p.Runs(), runs)
			}
			if r, _ := p.Decision().State.Of("GPU-1"); runs == 1 && r.Running.Runs.IsZero() {
				t.Errorf("its command runs: %+v", r.Running)
			}
			if changed = p.Changed(); runs == 1 {
				close(end)
			}
		}
	})
}

// While the prover before ends, GPUs are withheld by its record, and none is proved.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1", "GPU-2")
		n.with(func() { n.seen.GPUs[1].Cancel = proof.Move })
		_, stop := n.start()
		time.Sleep(ready)
		stop()
		n.happened()
		n.withheld, n.decided = nil, 0
		p := n.prover()
		earlier, awaited := make(chan struct{}), make(chan struct{})
		go func() { p.Await(t.Context(), earlier); close(awaited) }()
		n.with(func() {
			if n.decided != 2 || len(n.withheld) != 1 || n.withheld[0].GPU != "GPU-2" {
				t.Errorf("%d decided, withheld %v", n.decided, n.withheld)
			}
			n.seen.Boot = "b2"
		})
		n.change(func(*proof.Node) {})
		n.with(func() {
			if len(n.withheld) != 2 {
				t.Errorf("after a boot: withheld %v", n.withheld)
			}
		})
		time.Sleep(time.Hour)
		select {
		case <-awaited:
			t.Error("it has not awaited the end")
		default:
		}
		close(earlier)
		<-awaited
		if got := n.happened(); got != "" {
			t.Error(got)
		}
	})
}

// case 2: a GPU that failed has its condition before it is given back. An operator can clear it, and a reset has it proved again. (case 8)
func TestFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		n.command = func(context.Context, proofcommand.Proof) proofcommand.Result {
			return proofcommand.Result{Outcome: proofcommand.Failed, Summary: "3 wrong words"}
		}
		p, stop := n.start()
		defer stop()
		time.Sleep(ready)
		if got := n.happened(); got != "taken GPU-1, run GPU-1 boot, failed GPU-1, released GPU-1" {
			t.Error(got)
		}
		if f := n.failed["GPU-1"]; f.Summary != "3 wrong words" || f.State != health.Unhealthy || f.Service {
			t.Errorf("%+v", f)
		}
		n.change(func(s *proof.Node) { s.GPUs[0].Reset = time.Now() })
		time.Sleep(ready)
		if f := n.failed["GPU-1"]; n.happened() == "" || !f.Service {
			t.Errorf("failed again after a reset: %+v", f)
		}
		n.with(func() { delete(n.failed, "GPU-1") })
		n.change(func(*proof.Node) {})
		if r, _ := p.Decision().State.Of("GPU-1"); r.Failed() || !r.Cleared {
			t.Errorf("cleared by an operator: %+v", r)
		}
	})
}

// case 3: a check that could not run is no result. It is a problem with its remedy, and is tried again after an hour.
func TestCouldNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		outcome := proofcommand.CouldNotRun
		n.command = func(context.Context, proofcommand.Proof) proofcommand.Result {
			return proofcommand.Result{Outcome: outcome, Cause: proofcommand.Signal, Text: "ended by SIGSEGV"}
		}
		p, stop := n.start()
		defer stop()
		time.Sleep(ready)
		if got := n.happened(); got != "taken GPU-1, run GPU-1 boot, released GPU-1" {
			t.Error(got)
		}
		if all := p.Problems(); len(all) != 1 || !strings.Contains(all[0].Text, "GPU-1 could not run: ended by SIGSEGV") || all[0].Remedy == "" {
			t.Errorf("%v", all)
		}
		n.with(func() { outcome = proofcommand.Passed })
		time.Sleep(59 * time.Minute)
		if got := n.happened(); got != "" {
			t.Errorf("before an hour: %s", got)
		}
		time.Sleep(2 * time.Minute)
		if got := n.happened(); !strings.Contains(got, "passed") || len(p.Problems()) != 0 {
			t.Errorf("%s, %v", got, p.Problems())
		}
	})
}

// A check that could not run is a problem also after a restart, in which it is not tried again, and after the agent was killed in a proof; it ends with
// the GPU.
func TestCouldNotRunAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		n.command = func(context.Context, proofcommand.Proof) proofcommand.Result {
			return proofcommand.Result{Outcome: proofcommand.CouldNotRun, Text: "exit status 2"}
		}
		_, stop := n.start()
		time.Sleep(ready)
		stop()
		n.happened()
		p, stop := n.start()
		time.Sleep(time.Minute)
		if all := p.Problems(); n.happened() != "" || len(all) != 1 || !strings.Contains(all[0].Text, "exit status 2") {
			t.Errorf("%v", all)
		}
		n.change(func(s *proof.Node) { s.GPUs = nil })
		if all := p.Problems(); len(all) != 0 {
			t.Errorf("the GPU is gone: %v", all)
		}
		stop()

		n = newNode(t, "GPU-1")
		began := time.Now()
		s, err := proof.State{Boot: "b1", BootTime: began, Begun: 1, Records: []proof.Record{
			{GPU: "GPU-1", Since: began, Running: &proof.Running{Number: 1, Reason: proof.Boot, Began: began}},
		}}.Encode()
		check.NoError(t, err)
		check.NoError(t, os.WriteFile(n.file, s, 0o600))
		p, stop = n.start()
		defer stop()
		time.Sleep(time.Minute)
		if all := p.Problems(); len(all) != 1 || !strings.Contains(all[0].Text, "ended during the proof") {
			t.Errorf("killed: %v", all)
		}
		n.with(func() {
			if len(n.withheld) != 0 {
				t.Errorf("killed: %v", n.withheld)
			}
		})
	})
}

// A GPU that is free by all that is seen and can't be taken is offered, and its check is one that could not run: it would take no work for ever.
func TestCannotTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		n.takeErr = errors.New("it waits for the file of the node, which can't be written")
		p, stop := n.start()
		defer stop()
		time.Sleep(proof.SettleTime)
		n.with(func() {
			if len(n.withheld) != 1 {
				t.Errorf("before: %v", n.withheld)
			}
		})
		time.Sleep(ready + proof.TakeWithin)
		n.with(func() {
			if len(n.withheld) != 0 {
				t.Errorf("it takes no work: %v", n.withheld)
			}
		})
		if all := p.Problems(); len(all) != 1 || !strings.Contains(all[0].Text, "can't be written") {
			t.Errorf("%v", all)
		}
	})
}

// case 6: a GPU that work gets while the proof waits to take it is not one that can't be taken.
func TestWorkCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		n.takeErr = errors.New("it waits for the end of pod default/train")
		p, stop := n.start()
		defer stop()
		running := func() bool { r, _ := p.Decision().State.Of("GPU-1"); return r.Running != nil }
		for range int(ready.Seconds()) {
			if time.Sleep(time.Second); running() {
				break
			}
		}
		if !running() {
			t.Fatal("no proof begins")
		}
		n.change(func(s *proof.Node) { s.GPUs[0].Holders = []string{"pod default/train"} })
		time.Sleep(time.Hour)
		if r, _ := p.Decision().State.Of("GPU-1"); n.happened() != "" || r.Tries != nil || len(p.Problems()) != 0 {
			t.Errorf("%+v, %v", r, p.Problems())
		}
	})
}

// case 13: a proof ends when its GPU is wanted back, when maintenance begins, and when the agent ends; it has no verdict, and is made later.
func TestCancelled(t *testing.T) {
	for name, end := range map[string]func(n *node, stop func()){
		"wanted back": func(n *node, _ func()) { n.with(func() { close(n.taken["GPU-1"].back) }) },
		"maintenance": func(n *node, _ func()) {
			n.change(func(s *proof.Node) { s.Cancel = proof.Maintenance })
			n.change(func(s *proof.Node) { s.Cancel = "" })
		},
		"agent ends": func(_ *node, stop func()) { stop() },
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, "GPU-1")
			passes := n.command
			n.command = func(ctx context.Context, _ proofcommand.Proof) proofcommand.Result {
				<-ctx.Done()
				time.Sleep(time.Second) // it gets SIGTERM first
				return proofcommand.Result{Outcome: proofcommand.Cancelled, Text: "cancelled: " + context.Cause(ctx).Error()}
			}
			_, stop := n.start()
			time.Sleep(ready)
			n.happened()
			n.with(func() { n.command = passes })
			end(n, stop)
			time.Sleep(time.Second)
			if got := n.happened(); got != "released GPU-1" {
				t.Errorf("%s: %q", name, got)
			}
			if name == "agent ends" {
				_, stop = n.start()
			}
			time.Sleep(2 * time.Minute)
			if got := n.happened(); !strings.HasSuffix(got, "passed GPU-1, released GPU-1") {
				t.Errorf("%s: afterwards %q", name, got)
			}
			stop()
		})
	}
}

// What runs is on disk before: without that nothing begins. A verdict that can't be published is none.
func TestNotRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1")
		check.NoError(t, os.WriteFile(n.file, []byte("{"), 0o600))
		p, stop := n.start()
		time.Sleep(time.Hour)
		if got := n.happened(); got != "" || len(p.Problems()) != 1 || !strings.Contains(p.Problems()[0].Text, n.file) {
			t.Errorf("damaged: %s, %v", got, p.Problems())
		}
		n.with(func() {
			if n.decided != 1 || len(n.withheld) != 0 {
				t.Errorf("with a damaged file %d GPUs are decided about, and %v withheld: no GPU is missing because of a file", n.decided, n.withheld)
			}
		})
		stop()
		if text, err := os.ReadFile(n.file); err != nil || string(text) != "{" {
			t.Errorf("the damaged file is not as it was: %q, %v", text, err)
		}
		p, stop = n.start()
		check.NoError(t, os.Remove(n.file))
		check.NoError(t, os.Mkdir(n.file, 0o700))
		time.Sleep(time.Minute)
		if got := n.happened(); got != "" {
			t.Errorf("a folder: %s", got)
		}
		check.NoError(t, os.Remove(n.file))
		n.with(func() { n.failErr = errors.New("the monitor does not answer") })
		time.Sleep(time.Minute)
		if r, _ := p.Decision().State.Of("GPU-1"); !strings.Contains(n.happened(), "passed GPU-1, released GPU-1") || r.Last != nil || len(p.Problems()) != 0 {
			t.Errorf("%+v, %v", r, p.Problems())
		}
		stop()

		n.takeErr = errors.New("not free")
		_, stop = n.start()
		time.Sleep(time.Hour)
		if got := n.happened(); got != "" {
			t.Errorf("not free: %s", got)
		}
		stop()
	})
}

// With `unproved: withhold` GPUs take no work until they have passed, one after the other. (case 1)
func TestWithheld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "GPU-1", "GPU-2")
		n.command = func(context.Context, proofcommand.Proof) proofcommand.Result {
			time.Sleep(10 * time.Second)
			return proofcommand.Result{Outcome: proofcommand.Passed}
		}
		_, stop := n.start()
		defer stop()
		var all []int
		for range 120 {
			time.Sleep(time.Second)
			n.with(func() {
				if left := len(n.withheld); len(all) == 0 || all[len(all)-1] != left {
					all = append(all, left)
				}
			})
		}
		if !slices.Equal(all, []int{2, 1, 0}) {
			t.Errorf("withheld %v", all)
		}
	})
}
