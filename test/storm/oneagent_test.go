package storm

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The intervals of an agent are short, so that a test needs little time.
const (
	probe      = 200 * time.Millisecond
	rescan     = time.Second
	deadline   = 1500 * time.Millisecond
	callLimit  = 250 * time.Millisecond // for which a round of calls waits for a GPU
	settleTime = 300 * time.Millisecond
	dwell      = 400 * time.Millisecond
	pause      = time.Second // between two messages of a stream, which is the adapters' own
)

// agentConfig is the configuration of an agent on a simulated machine.
func agentConfig(root string) core.Config {
	cfg := core.DefaultConfig()
	cfg.Probe, cfg.Rescan = probe, rescan
	cfg.Roots = core.Roots{Driver: root, Dev: root, Sys: root + "/sys", Proc: root + "/proc"}
	p := &cfg.Health
	p.CallDeadline, p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.QuietTime = deadline, settleTime, dwell, dwell, time.Second
	p.MaxRecoveries = 1 << 20
	return cfg
}

// openDriver opens a session for a monitor.
func openDriver(roots core.Roots) (monitor.Session, error) {
	s, err := nvidia.Open(nvidia.Options{Roots: roots, Deadline: callLimit, Slow: time.Second, Fabric: time.Second, Links: 2 * time.Second})
	if err != nil {
		return nil, err // not s: a nil *Session would be a Session
	}
	return s, nil
}

// oneAgent is a machine with an agent in this process, and both orchestrators.
type oneAgent struct {
	*storm
	policies  map[int]slotPolicy // by slot
	addresses map[int]gpu.PCIAddress
	expected  *expectedState
	monitor   *monitor.Monitor
	kubelet   *kubelet
	nomad     *nomad
	views     views
	ahead     atomic.Int64 // nanoseconds by which the agent's wall clock is ahead

	// of the goroutine that makes faults
	xids       map[gpuXID]int // severe ones of the whole run
	sent       map[sentXID]uint64
	needsReset map[int]bool // slots whose GPU may need a reset
	pending    sync.WaitGroup
}

type gpuXID struct{ slot, code int }

// sentXID is an XID of a GPU, whichever slot that is in.
type sentXID struct {
	gpu  gpu.DeviceID
	code uint64
}

// newOneAgent starts an agent with both adapters on a machine whose slots have policies.
func newOneAgent(t testing.TB, o options, policies map[int]slotPolicy, prepare func(*simdriver.Machine) error) *oneAgent {
	w := &oneAgent{
		storm: newStorm(t, o), policies: policies, addresses: map[int]gpu.PCIAddress{},
		expected: newExpectedState(o.limit(pause+probe+2300*time.Millisecond), o.limit(deadline)),
		xids:     map[gpuXID]int{}, sent: map[sentXID]uint64{}, needsReset: map[int]bool{},
	}
	w.kinds = w.faultKinds()
	w.onSlow = func(f *fault, took time.Duration) {
		if took > stopGap && f.slot >= 0 {
			w.expected.stopped(took)
		}
	}
	must(t, prepare(w.Machine))
	for n := range gpus {
		pci, err := w.Get(n, "pci")
		must(t, err, w.readDevices(n))
		w.addresses[n], err = gpu.ParsePCIAddress(pci)
		must(t, err)
	}
	var running sync.WaitGroup
	t.Cleanup(func() {
		w.cancel()
		w.pending.Wait()
		must(t, w.Heal()) // no call hangs during the next test
		running.Wait()
	})
	w.startMonitor(&running)
	w.kubelet = newKubelet(t, w, &running)
	w.nomad = newNomad(t, w)
	for inv := range w.monitor.Watch(w.ctx) { // without a driver an inventory without devices is correct
		if inv.Driver().State == gpu.DriverReady {
			break
		}
	}
	running.Go(w.checkViews)
	w.startRequests(&running)
	return w
}

func (w *oneAgent) startMonitor(running *sync.WaitGroup) {
	cfg := agentConfig(w.Root)
	cfg.MIG, cfg.Injection.Nodes, cfg.Policy = inventory.MIGMixed, true, w.policy()
	must(w.t, cfg.Validate())
	open := func() (monitor.Session, error) { return openDriver(cfg.Roots) }
	w.monitor = monitor.New(open, cfg, slog.New(slog.NewTextHandler(w.journal, nil)), nil)
	w.monitor.SetWallClock(func() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) })
	w.monitor.UpdateHost(w.daemons)
	running.Go(func() {
		for inv := range w.monitor.Watch(w.ctx) {
			if err := errors.Join(onePool(inv), hardestFirst(inv)); err != nil {
				w.fail("%w", err)
			}
		}
	})
	running.Go(func() {
		if err := w.monitor.Run(w.ctx); err != nil {
			w.fail("the monitor ended: %w", err)
		}
	})
}

// onePool returns an error if an inventory offers a device in two pools.
func onePool(inv *inventory.Allocatable) error {
	pools := map[gpu.DeviceID]string{}
	for u := range inv.Units() {
		if u.Health.Reason == health.ReasonWithdrawn {
			continue
		}
		if other, ok := pools[u.Device.ID]; ok && other != u.Pool {
			return fmt.Errorf("%s is offered in two pools: %s and %s", u.Device.ID, other, u.Pool)
		}
		pools[u.Device.ID] = u.Pool
	}
	return nil
}

// hardestFirst returns an error if the health of a unit is a condition that ends by itself or by a reset, while an equally bad one of its
// GPU has to be cleared by an operator.
func hardestFirst(inv *inventory.Allocatable) error {
	operatorOnly := func(h health.Health) bool { return h.Clears == xid.Evidence(0).String() }
	for u := range inv.Units() {
		all := inv.Conditions(u)
		for _, h := range all {
			if h.State == u.Health.State && operatorOnly(h) && !operatorOnly(u.Health) && u.Health.Reason < health.ReasonWithdrawn {
				return fmt.Errorf("%s is %s, and hides %s", u.ID, u.Health, h)
			}
		}
	}
	return nil
}

// readDevices records which devices are in a slot now.
func (w *oneAgent) readDevices(n int) error {
	devices, err := w.Instances(n)
	if err != nil {
		return err
	}
	if mig, err := w.Get(n, "mig"); err != nil {
		return err
	} else if mig != "yes" {
		devices = []string{w.UUID(n)}
	}
	w.expected.setDevices(n, w.UUID(n), devices, w.policies[n].units)
	return nil
}

const (
	faultsPerRound = 100
	minRound       = 4500 * time.Millisecond
	quietTime      = 8 * time.Second // roughly, of a quiet period
)

// Eight whole GPUs.
func TestStorm(t *testing.T) { testOneAgent(t, nil, nil) }

// Eight GPUs, three of them in MIG mode, with a policy.
func TestStormOnMIG(t *testing.T) { testOneAgent(t, []int{2, 4, 6}, slotPolicies) }

// testOneAgent runs rounds, and compares what the process needs early with what it needs in the end.
func testOneAgent(t *testing.T, mig []int, policies map[int]slotPolicy) {
	o := optionsFromEnvironment(t)
	w := newOneAgent(t, o, policies, func(m *simdriver.Machine) error {
		for i, n := range mig { // every profile exists from the start, as the kubelet keeps a resource
			if err := m.SetMIG(n, layouts[i]...); err != nil {
				return err
			}
		}
		return nil
	})
	defer w.report()
	w.quietPeriod(false)
	began, rounds := time.Now(), max(1, (o.faults+faultsPerRound-1)/faultsPerRound)
	length := max(minRound, o.lasts/time.Duration(rounds)-quietTime)
	needs := []footprint{w.measure()}
	for round := 0; w.ctx.Err() == nil && (round < rounds || time.Since(began) < o.lasts); round++ {
		in := w.planned(mig, round)
		in.faults, in.length = min(faultsPerRound, o.faults), length
		w.play(w.plan(in), round*faultsPerRound, func() {})
		w.quietPeriod(in.driver)
		needs = append(needs, w.measure())
		if testing.Verbose() {
			t.Logf("%v: round %d of %d, %s", time.Since(began).Round(time.Second), round+1, rounds, needs[round+1])
		}
	}
	if w.ctx.Err() == nil {
		early := needs[(len(needs)-1)/4]
		end := w.compare(early)
		t.Logf("seed %d, %v, %s\nfaults that had to be noticed: %v; the process stopped %d times, %d lookups of GPUs that hang",
			o.seed, time.Since(began).Round(time.Second), w.tally(), w.expected.noticed, w.expected.stops, w.lookups)
		t.Logf("at a quarter: %s\nin the end:   %s", early, end)
	}
}

// planned are the conditions of a round: two GPUs have no faults, and in one of three rounds the driver as a whole may fail.
func (w *oneAgent) planned(mig []int, round int) planned {
	slots := w.random.Perm(gpus)[2:]
	return planned{
		slots: slots, policy: w.policies != nil,
		mig:    slices.DeleteFunc(slices.Clone(mig), func(n int) bool { return !slices.Contains(slots, n) }),
		notice: w.expected.bound, hangs: w.expected.hangs,
		driver: round%3 == 2 || w.o.faults <= faultsPerRound && w.random.IntN(2) == 0,
	}
}

// A GPU that hangs before its UUID was read, so that only its index is known, keeps no other from being offered.
func TestGPUThatHangsFromTheStart(t *testing.T) {
	w := newOneAgent(t, options{seed: 1, slack: 1}, nil, func(m *simdriver.Machine) error {
		return m.Hang(simdriver.GPU(7), "nvmlDeviceGetUUID")
	})
	defer w.report()
	w.until(20*time.Second, func() bool { return w.monitor.Stats().Calls != nil })
	began := time.Now()
	w.until(20*time.Second, func() bool { return time.Since(began) > 2*deadline }) // the invariants are checked meanwhile
	if n := len(w.nomad.view()); n != 7 {
		t.Errorf("%d GPUs are offered, want the seven that answer", n)
	}
	must(t, w.Heal())
	w.await("GPU 7", recovery, func(string, int) bool { return false })
}
