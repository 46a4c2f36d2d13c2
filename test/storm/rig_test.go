package storm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The agent's times are short, so that much happens in little time.
const (
	probe    = 200 * time.Millisecond
	rescan   = time.Second
	deadline = 1500 * time.Millisecond
	patience = 250 * time.Millisecond
	settle   = 300 * time.Millisecond
	dwell    = 400 * time.Millisecond
	pause    = time.Second // between two messages of a stream; the adapters' own
)

// storm is the machine with the agent in it and everybody who looks at it.
type storm struct {
	*simdriver.Machine
	t       testing.TB
	ctx     context.Context // ends with the first failure, or the test
	o       options
	terms   map[int]terms // by slot; the runner's
	random  *rand.Rand    // of the plan
	truth   *truth
	journal *journal
	monitor *monitor.Monitor
	kubelet *kubelet
	nomad   *nomad
	took    latencies
	eyes    eyes

	ahead atomic.Int64 // nanoseconds by which the agent's wall clock is ahead
	stood atomic.Int64 // nanoseconds for which the test's own machine stood still

	mu      sync.Mutex
	failure error
	fail    context.CancelFunc

	addresses map[int]gpu.PCIAddress // of slots

	// of the runner
	raised map[sighting]int // XIDs that only a reset mends, in the whole run
	fatals map[int]bool     // slots that may need a reset
	pulled map[int]pulled   // GPUs that are not in their slots
	done   map[string]int   // faults by kind
	moves  int              // how often indices moved since the last calm
	raced  int              // lookups that met a GPU which hangs
	later  sync.WaitGroup
}

// sighting is an XID of a GPU.
type sighting struct {
	slot int
	code uint64
}

// newStorm lays out a machine and starts the agent with both adapters on it.
func newStorm(t testing.TB, o options, machine string, terms map[int]terms, prepare func(*simdriver.Machine) error) *storm {
	ctx, cancel := context.WithCancel(t.Context())
	w := &storm{
		Machine: simdriver.Start(t, machine), t: t, ctx: ctx, fail: cancel, o: o, terms: terms,
		random: rand.New(rand.NewPCG(o.seed, 0)), journal: newJournal(),
		truth:  newTruth(o.patient(pause+probe+2300*time.Millisecond), o.patient(deadline)),
		raised: map[sighting]int{}, done: map[string]int{}, fatals: map[int]bool{}, pulled: map[int]pulled{}, addresses: map[int]gpu.PCIAddress{},
	}
	must(t, prepare(w.Machine))
	slots, err := w.Slots()
	must(t, err)
	for _, n := range slots {
		pci, err := w.Get(n, "pci")
		must(t, err, w.own(n))
		w.addresses[n], err = gpu.ParsePCIAddress(pci)
		must(t, err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		w.later.Wait()
		must(t, w.Heal()) // no call hangs into the next test
		running.Wait()
	})
	w.follow(ctx, &running)
	w.kubelet = newKubelet(t, w, &running)
	w.nomad = newNomad(ctx, t, w)
	for inv := range w.monitor.Watch(ctx) { // else "no devices" would be right before anybody has looked
		if inv.Driver().State == gpu.DriverReady {
			break
		}
	}
	running.Go(w.watch)
	w.work(&running)
	return w
}

// follow starts the monitor.
func (w *storm) follow(ctx context.Context, running *sync.WaitGroup) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes, cfg.Probe, cfg.Rescan = inventory.MIGMixed, true, probe, rescan
	cfg.Roots = core.Roots{Driver: w.Root, Dev: w.Root, Sys: w.Root + "/sys", Proc: w.Root + "/proc"}
	p := &cfg.Health
	p.CallDeadline, p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.QuietTime = deadline, settle, dwell, dwell, time.Second
	p.MaxRecoveries = 1 << 20
	cfg.Policy = w.policy()
	must(w.t, cfg.Validate())
	w.monitor = monitor.New(func() (monitor.Session, error) {
		return nvidia.Open(nvidia.Options{
			Roots: cfg.Roots, Deadline: patience, Slow: time.Second, Fabric: time.Second, Links: 2 * time.Second,
		})
	}, cfg, slog.New(slog.NewTextHandler(w.journal, nil)), nil)
	w.monitor.SetWallClock(w.wall)
	w.monitor.SetHost(w.daemons())
	running.Go(func() {
		for inv := range w.monitor.Watch(ctx) {
			if err := onePool(inv); err != nil {
				w.wrong("%w", err)
			}
		}
	})
	running.Go(func() {
		if err := w.monitor.Run(ctx); err != nil {
			w.wrong("the monitor ended: %w", err)
		}
	})
}

// onePool says which device an inventory offers in two pools.
func onePool(inv *inventory.Inventory) error {
	pools := map[gpu.DeviceID]string{}
	for u := range inv.Units() {
		if was, again := pools[u.Device.ID]; again && was != u.Pool && u.Health.Reason != health.ReasonWithdrawn {
			return fmt.Errorf("%s is offered in two pools: %s and %s", u.Device.ID, was, u.Pool)
		}
		if u.Health.Reason != health.ReasonWithdrawn {
			pools[u.Device.ID] = u.Pool
		}
	}
	return nil
}

// own tells the truth what is in a slot now.
func (w *storm) own(n int) error {
	uuid := w.UUID(n)
	devices, err := w.Instances(n)
	if err != nil {
		return err
	}
	if mig, err := w.Get(n, "mig"); err != nil {
		return err
	} else if mig != "yes" {
		devices = []string{uuid}
	}
	w.truth.own(n, uuid, devices, w.terms[n].units)
	return nil
}

// wrong ends the storm with its first failure.
func (w *storm) wrong(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure != nil || w.ctx.Err() != nil {
		return
	}
	w.failure = wrongAt(time.Now(), format, args...)
	w.fail()
}

// verdict fails the test if anything went wrong, with what led to it.
func (w *storm) verdict() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure == nil {
		return
	}
	w.t.Errorf("%v\nTANDEM_STORM_SEED=%d\n%s", w.failure, w.o.seed, w.journal)
}

// until waits for something, and says whether it came to be in time.
func (w *storm) until(limit time.Duration, ok func() bool) bool {
	late, tick := w.late(limit), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
			if late() {
				return ok()
			}
		case <-w.ctx.Done():
			return false
		}
	}
	return true
}

// late tells whether a limit that begins now has passed, not counting the time for which everything stood still.
func (w *storm) late(limit time.Duration) func() bool {
	began, stood := time.Now(), w.stood.Load()
	return func() bool {
		return time.Since(began)-time.Duration(w.stood.Load()-stood) > w.o.patient(limit)
	}
}

// rest waits for d or the end of the storm.
func (w *storm) rest(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-w.ctx.Done():
	}
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
