package resetter_test

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

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// world is the agent and the nvidia-smi of a test: a node with GPUs.
type world struct {
	*testing.T
	file    string
	policy  reset.Policy
	changed chan struct{}

	mu       sync.Mutex
	seen     reset.Node
	events   []string          // in order
	disk     map[string]string // what was on disk at each event
	taken    map[gpu.DeviceID]*taken
	released bool // the driver
	heals    bool // a reset ends the fault

	hangs    chan struct{}                      // See waits for its end; nil = it does not
	on       func(event string)                 // called at each event, without a lock
	clients  map[gpu.DeviceID][]gpureset.Client // that have a GPU open
	persists map[gpu.DeviceID]bool              // persistence modes
	takeErr  error                              // of Take
	waitErr  error                              // of AwaitReleased
	readyErr error                              // of Ready
	resetErr error                              // of Reset
	pause    reset.Pause
	folder   string                                      // of the commands
	command  func(command []string) proofcommand.Outcome // nil = no command runs
	runs     bool                                        // the nvidia-smi of an earlier process
	leaves   bool                                        // Reset and Restore do not turn persistence mode on again
}

// agent is a client that is the agent itself.
var agent = gpureset.Client{PID: 1, Name: "agent"}

type taken struct {
	w    *world
	id   gpu.DeviceID
	back chan struct{}
}

func (t *taken) WantedBack() <-chan struct{} { return t.back }

func (t *taken) ReleaseDriver() {
	t.w.with(func() { t.w.released = true })
	t.w.event("driver released")
}

func (t *taken) OpenDriver() {
	t.w.with(func() { t.w.released = false })
	t.w.event("driver opened")
}

func (t *taken) Release() {
	t.w.with(func() { delete(t.w.taken, t.id) })
	t.w.event("given back " + string(t.id))
}

// newWorld returns one whose GPUs have a fault that a reset ends, and whose policy is act.
func newWorld(t *testing.T, gpus ...gpu.DeviceID) *world {
	w := &world{
		T: t, file: filepath.Join(t.TempDir(), "resets.json"), policy: reset.Policy{Mode: reset.Act, Attempts: 2}, changed: make(chan struct{}, 1),
		disk: map[string]string{}, taken: map[gpu.DeviceID]*taken{}, heals: true, clients: map[gpu.DeviceID][]gpureset.Client{}, persists: map[gpu.DeviceID]bool{},
	}
	w.seen = reset.Node{Boot: "b1"}
	for _, id := range gpus {
		w.seen.GPUs = append(w.seen.GPUs, reset.GPU{ID: id, Action: health.RecoveryReset, Cause: "XID_95", Repair: health.Reset})
	}
	return w
}

// with calls a function while nothing else reads or changes the world.
func (w *world) with(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

func (w *world) event(text string) {
	onDisk, _ := os.ReadFile(w.file)
	var on func(string)
	w.with(func() {
		w.events, w.disk[text], on = append(w.events, text), string(onDisk), w.on
	})
	if on != nil {
		on(text)
	}
}

// happened returns what happened since the last call.
func (w *world) happened() (all string) {
	synctest.Wait()
	w.with(func() { all, w.events = strings.Join(w.events, ", "), nil })
	return all
}

// of returns a GPU of what is seen; mu is locked.
func (w *world) of(id gpu.DeviceID) *reset.GPU {
	return &w.seen.GPUs[slices.IndexFunc(w.seen.GPUs, func(g reset.GPU) bool { return g.ID == id })]
}

func (w *world) See() (n reset.Node) {
	var hangs chan struct{}
	if w.with(func() { hangs = w.hangs }); hangs != nil {
		<-hangs
	}
	w.with(func() {
		n = w.seen
		n.GPUs = slices.Clone(n.GPUs)
	})
	return n
}

func (w *world) Take(ctx context.Context, id gpu.DeviceID) (resetter.Taken, error) {
	w.event("take " + string(id))
	var err error
	w.with(func() { err = w.takeErr })
	if err != nil {
		<-ctx.Done()
		return nil, err
	}
	t := &taken{w, id, make(chan struct{})}
	w.with(func() { w.taken[id] = t })
	return t, nil
}

func (w *world) Target(id gpu.DeviceID) (gpureset.Target, bool) {
	return gpureset.Target{GPU: id}, slices.ContainsFunc(w.See().GPUs, func(g reset.GPU) bool { return g.ID == id })
}

func (w *world) EndsWhenTaken(_ gpu.DeviceID, c gpureset.Client) bool {
	return c.Name == "nvidia-cuda-mps"
}

func (w *world) IsAgent(c gpureset.Client) bool { return c == agent }

func (w *world) AwaitReleased(ctx context.Context) (err error) {
	w.with(func() { err = w.waitErr })
	if err != nil {
		<-ctx.Done()
	}
	return err
}

func (w *world) AwaitReading(context.Context) error {
	w.event("read")
	return nil
}

func (w *world) WasReset(id gpu.DeviceID) { w.event("recorded " + string(id)) }

func (w *world) Ready(context.Context) (err error) {
	w.with(func() { err = w.readyErr })
	return err
}

// Look shows the agent, too, until it has closed the driver.
func (w *world) Look(_ context.Context, t gpureset.Target) (look gpureset.Look, _ error) {
	w.with(func() {
		look.Clients = slices.Clone(w.clients[t.GPU])
		if !w.released {
			look.Clients = append(look.Clients, agent)
		}
		look.Persistence = w.persists[t.GPU]
	})
	return look, nil
}

func (w *world) Reset(ctx context.Context, t gpureset.Target) (err error) {
	w.event("nvidia-smi " + string(t.GPU))
	w.with(func() {
		if err = errors.Join(w.resetErr, ctx.Err()); w.leaves && w.persists[t.GPU] {
			w.persists[t.GPU] = false
			err = errors.Join(err, &gpureset.PersistenceError{GPU: t.GPU, Err: errors.New("unknown error")})
		}
		if g := w.of(t.GPU); w.resetErr == nil && w.heals {
			g.Action, g.Cause, g.Repair, g.TakesWork = health.RecoveryNone, "", health.NoRepair, true
		}
	})
	return err
}

func (w *world) Restore(_ context.Context, id gpu.DeviceID) (err error) {
	w.with(func() {
		if w.runs {
			err = &gpureset.BusyError{}
		}
	})
	if err != nil {
		return err
	}
	w.event("restore " + string(id))
	w.with(func() {
		if w.leaves {
			err = errors.New("unknown error")
		} else {
			w.persists[id] = true
		}
	})
	return err
}

// run is a command of the operator.
func (w *world) run(_ context.Context, p proofcommand.Proof) proofcommand.Result {
	w.event(strings.Join(p.Command, " "))
	return proofcommand.Result{Outcome: w.command(p.Command), Text: "its text"}
}

// start runs a Resetter until stop is called.
func (w *world) start() (r *resetter.Resetter, stop func()) {
	ctx, cancel := context.WithCancel(w.Context())
	r = resetter.New(resetter.Options{
		Node: w, Policy: w.policy, Resetter: w, File: w.file, On: []reconcile.Source{reconcile.Signal(w.changed)}, Log: slog.New(slog.DiscardHandler),
		Pause: w.pause, Folder: w.folder, Command: w.run, Runs: func() (runs bool, err error) {
			w.with(func() { runs = w.runs })
			return runs, nil
		},
	})
	done := make(chan struct{})
	go func() { r.Run(ctx, watchdog.NewRegistry()); close(done) }()
	synctest.Wait()
	return r, func() { cancel(); <-r.End(); <-done }
}

// record returns what is remembered of a GPU.
func record(r *resetter.Resetter, id gpu.DeviceID) reset.Record {
	one, _ := r.Decision().State.Of(id)
	return one
}
