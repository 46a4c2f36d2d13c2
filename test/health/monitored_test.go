package health

import (
	"context"
	"runtime"
	"slices"
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
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// monitored is a machine that a monitor reads in real time.
type monitored struct {
	*simdriver.Machine
	*monitor.Monitor
	t       testing.TB
	session atomic.Pointer[nvidia.Session] // the latest

	mu        sync.Mutex
	published []publication
}

// short is a configuration with short durations.
func short(c *core.Config) {
	c.Probe, c.Rescan = 50*time.Millisecond, 500*time.Millisecond
	p := &c.Health
	p.CallDeadline, p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell = 500*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond
	p.MaxRecoveries = 100
}

// monitorOf runs a monitor until the test ends.
func monitorOf(t testing.TB, m *simdriver.Machine, tune ...func(*core.Config)) *monitored {
	t.Helper()
	f := &monitored{Machine: m, t: t}
	cfg := configOf(m, tune...)
	f.Monitor = inprocess.Monitor(cfg, nvidia.Options{Deadline: cfg.Probe}, func(s *nvidia.Session) monitor.Session { f.session.Store(s); return s })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	inprocess.Run(ctx, t, f.Monitor, &running)
	running.Go(func() {
		for inv := range f.Watch(ctx) {
			f.mu.Lock()
			f.published = append(f.published, publication{time.Now(), inv})
			f.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		must(t, m.Heal())
		if s := f.session.Load(); s != nil {
			await(t, "no call in progress", func() bool { return len(s.Busy()) == 0 })
		}
		cancel()
		running.Wait()
	})
	return f
}

// await waits for an inventory.
func (f *monitored) await(what string, is func(*inventory.Allocatable) bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	for inv := range f.Watch(ctx) {
		if is(inv) {
			return
		}
	}
	for u := range f.Current().Units() {
		f.t.Logf("%s: %s", u.ID, u.Health)
	}
	f.t.Fatalf("never %s; last: driver %+v", what, f.Current().Driver())
}

// awaitAll waits until all eight GPUs are in a state.
func (f *monitored) awaitAll(state health.State) {
	f.t.Helper()
	f.await("eight GPUs "+state.String(), func(inv *inventory.Allocatable) bool {
		for u := range inv.Units() {
			if u.Health.State != state {
				return false
			}
		}
		return inv.Len() == 8
	})
}

// awaitOnly waits until the GPU in a slot has a state and a cause, and all others are healthy.
func (f *monitored) awaitOnly(slot int, state health.State, cause string) {
	f.t.Helper()
	f.await(cause, func(inv *inventory.Allocatable) bool {
		u, found := inv.Unit(inventory.UnitID(f.UUID(slot)))
		for other := range inv.Units() {
			if other.ID != u.ID && other.Health.State != health.Healthy {
				return false
			}
		}
		return found && u.Health.State == state && u.Health.Cause() == cause
	})
}

// changesOf counts the publications after t that have another health of the GPU in a slot than the one before.
func (f *monitored) changesOf(slot int, t time.Time) (publications, changes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	published := since(f.published, t)
	var last health.Health
	for _, p := range published {
		if u, ok := p.allocatable.Unit(inventory.UnitID(f.UUID(slot))); ok && u.Health != last {
			changes, last = changes+1, u.Health
		}
	}
	return len(published), changes
}

// A call that does not return makes its GPU unhealthy after the deadline and occupies one thread. The other GPUs, readings of usage
// and reservations do not wait for it.
func TestHang(t *testing.T) {
	t.Run("one GPU", func(t *testing.T) {
		f := monitorOf(t, simdriver.Start(t, "h100x8"), short, func(c *core.Config) { c.Health.CallDeadline = time.Second })
		f.awaitAll(health.Healthy)
		start := time.Now()
		must(t, f.Hang(simdriver.GPU(0), "*"))
		f.awaitOnly(0, health.Unhealthy, "NOT_ANSWERING")
		if took := time.Since(start); took < time.Second || took > 5*time.Second {
			t.Errorf("unhealthy after %v", took)
		}
		busy := slices.DeleteFunc(f.session.Load().Busy(), func(c gpu.Call) bool { return c.Index != 0 })
		if len(busy) != 1 {
			t.Errorf("calls in progress: %+v", busy)
		}
		must(t, f.XID(0, 119), f.XID(3, 13), f.Set(4, "recovery_action", "1"))
		f.await("GPU 4 unhealthy", func(inv *inventory.Allocatable) bool {
			u, _ := inv.Unit(inventory.UnitID(f.UUID(4)))
			return u.Health.Cause() == "RECOVERY_ACTION_GPU_RESET"
		})
		fastest := time.Minute // one that waited for the call would take at least its deadline each time
		for range 5 {
			before := time.Now()
			if usage, err := f.Usage(t.Context()); err != nil || len(usage) != 8 {
				t.Errorf("usage of %d devices, %v", len(usage), err)
			}
			fastest = min(fastest, time.Since(before))
		}
		if fastest > time.Second {
			t.Errorf("the fastest of 5 readings of usage took %v", fastest)
		}
		for slot, want := range map[int]bool{0: false, 1: true} {
			if _, err := f.Current().Reserve(inventory.UnitID(f.UUID(slot))); (err == nil) != want {
				t.Errorf("GPU %d is reserved: %v", slot, err)
			}
		}
		if _, n := f.changesOf(0, start); n != 1 {
			t.Errorf("%d changes of GPU 0", n)
		}
	})
	t.Run("the driver", func(t *testing.T) {
		f := monitorOf(t, simdriver.Start(t, "h100x8"), short)
		f.awaitAll(health.Healthy)
		must(t, f.Hang(simdriver.All, "nvmlDeviceGetCount"))
		f.awaitAll(health.Unknown)
		must(t, f.Heal())
		f.awaitAll(health.Healthy)
	})
	t.Run("the driver from the start", func(t *testing.T) {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Hang(simdriver.All, "nvmlInit"))
		f := monitorOf(t, m, short)
		f.await("the driver failed", func(inv *inventory.Allocatable) bool {
			return inv.Driver().State == gpu.DriverFailed && inv.Len() == 0
		})
		must(t, m.Heal())
		f.awaitAll(health.Healthy)
	})
}

// An event that may change the recovery action causes a check of the GPU before the next regular one.
func TestRecoveryActionIsReadAfterEvents(t *testing.T) {
	set := func(f *monitored) error { return f.Set(5, "recovery_action", "4") }
	for name, happen := range map[string]func(*monitored){
		"XID": func(f *monitored) {
			must(t, f.XID(5, 94))
			f.awaitOnly(5, health.Degraded, "XID_94")
			must(t, set(f))
		},
		"recovery action changed": func(f *monitored) { must(t, set(f), f.Event(5, simdriver.EventRecoveryAction, 0)) },
		"double-bit error":        func(f *monitored) { must(t, set(f), f.Event(5, simdriver.EventDoubleBitECC, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := monitorOf(t, simdriver.Start(t, "h100x8"), func(c *core.Config) { c.Probe, c.Rescan = time.Hour, time.Hour })
			f.awaitAll(health.Healthy)
			happen(f)
			f.awaitOnly(5, health.Unhealthy, "RECOVERY_ACTION_DRAIN_AND_RESET")
		})
	}
}

// Ten thousand events of one fault in a second are one condition, and no other event is lost.
func TestManyEvents(t *testing.T) {
	const perSecond, seconds = 10_000, 3
	f := monitorOf(t, simdriver.Start(t, "h100x8"), short, func(c *core.Config) { c.Health.SettleTime = 2 * time.Second }) // XID 95 lasts
	f.awaitAll(health.Healthy)
	heap := heapInUse()
	start := time.Now()
	for batch := range seconds * 10 {
		must(t, f.Storm(3, 95, perSecond/10))
		if batch == seconds*5 {
			must(t, f.XID(5, 48))
		}
		<-time.After(time.Until(start.Add(time.Duration(batch+1) * time.Second / 10)))
	}
	f.await("GPU 3 unhealthy", func(inv *inventory.Allocatable) bool {
		u, _ := inv.Unit(inventory.UnitID(f.UUID(3)))
		return u.Health.Cause() == "XID_95"
	})
	await(t, "XID 48 is counted", func() bool {
		history, _ := f.State().Ledger.History(gpu.DeviceID(f.UUID(5)))
		return len(history.FaultCounts) == 1
	})
	publications, changes := f.changesOf(3, start)
	if most := int(time.Since(start).Seconds()) + 1; changes != 1 || publications > most {
		t.Errorf("%d publications in %v, %d with a change of GPU 3", publications, time.Since(start), changes)
	}
	if n := len(f.State().Ledger.Conditions()); n > 2 {
		t.Errorf("%d conditions", n)
	}
	if grown := int64(heapInUse()) - int64(heap); grown > 16<<20 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
	f.awaitAll(health.Healthy)
}

func heapInUse() uint64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// A driver that returns GPU_IS_LOST for every event wait is not called in a loop.
func TestLostGPUCausesFewCalls(t *testing.T) {
	f := monitorOf(t, simdriver.Start(t, waitsFail(t)))
	calls := func() (n uint64) {
		counts, err := f.Calls()
		must(t, err)
		for _, times := range counts {
			n += times
		}
		return n
	}
	f.awaitAll(health.Healthy)
	must(t, f.XID(2, 79), f.Lose(2))
	f.awaitOnly(2, health.GPULost, "XID_79")
	before, start := calls(), time.Now()
	<-time.After(2 * time.Second)
	if n, limit := calls()-before, 500*time.Since(start).Seconds(); float64(n) > limit {
		t.Errorf("%d driver calls in %v", n, time.Since(start))
	}
}
