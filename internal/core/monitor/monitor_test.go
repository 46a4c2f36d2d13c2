package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

func TestLostGPUTurnsUnhealthyAloneAndComesBack(t *testing.T) {
	onGPUs(t, 8, func(t *testing.T, m *coretest.Machine, r *running) {
		r.expect("start", nil)
		m.FailGPU(coretest.GPU(3), health.Lost)
		r.after(10*time.Second).expect("one probe later", map[int]health.State{3: health.GPULost})
		r.after(10*time.Minute).expect("later", map[int]health.State{3: health.GPULost})
		m.RecoverGPU(coretest.GPU(3))
		r.after(50*time.Second).expect("it answers, but not for long enough", map[int]health.State{3: health.Unhealthy})
		r.after(time.Minute).expect("restored", nil)
		if n := len(r.seen); n > 5 {
			t.Errorf("%d inventories published, want pending, ready, lost, unhealthy, back", n)
		}
	})
}

func TestNothingIsPublishedWhileNothingChanges(t *testing.T) {
	onGPUs(t, 8, func(t *testing.T, _ *coretest.Machine, r *running) {
		before := len(r.seen)
		r.after(time.Hour)
		if len(r.seen) != before {
			t.Errorf("%d needless publications", len(r.seen)-before)
		}
	})
}

func TestXIDCountsImmediately(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		m.SendEvent(xid(1, 48))
		m.SendEvent(xid(0, 31))
		synctest.Wait() // no time passes
		r.expect("XID 48 on 1, application XID 31 on 0", map[int]health.State{1: health.Unhealthy})
		if h := r.healthOf(1); h.Reason != health.ReasonXID || h.Code != 48 {
			t.Errorf("health: %v", h)
		}
	})
}

// A reservation wakes nothing; an XID after it counts for the new workload.
func TestReservationCountsWithTheNextUpdate(t *testing.T) {
	for _, reserve := range []bool{false, true} {
		onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
			for range 3 {
				before := r.State()
				if reserve {
					r.Reserved(coretest.GPUs(2).Devices)
					synctest.Wait()
				}
				if after := r.State(); after.Allocatable != before.Allocatable || !slices.Equal(after.Ledger.Conditions(), before.Ledger.Conditions()) {
					t.Error("a reservation changed the state")
				}
				m.SendEvent(xid(0, 31))
				synctest.Wait()
			}
			want := map[bool]health.State{false: health.Healthy, true: health.Degraded}[reserve]
			r.expect("three faults of the application", map[int]health.State{0: want})
		})
	}
}

// Replicas of a GPU are reserved one after the other, and one of the workloads fails each time: that is no sign of a faulty GPU.
func TestOneFailingWorkloadOfASharedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, m, func(c *core.Config) {
			c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
		})
		for range 4 {
			r.Reserved(coretest.GPUs(1).Devices)
			m.SendEvent(xid(0, 31))
			r.after(time.Second)
		}
		for u := range r.Current().Units() {
			if u.Health.State != health.Healthy {
				t.Errorf("%s: %s", u.ID, u.Health)
			}
		}
		if n := r.faults(0)[0].Count; n != 4 {
			t.Errorf("%d faults", n)
		}
	})
}

// The checkpoint lacks a reservation for at most a second.
func TestReservationIsRecordedWithoutAFault(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, _ *coretest.Machine, r *running) {
		r.after(time.Minute + 100*time.Millisecond) // no check is due
		before, _ := r.State().Ledger.History(coretest.GPU(1))
		r.Reserved(coretest.GPUs(2).Devices)
		r.after(time.Second)
		if after, _ := r.State().Ledger.History(coretest.GPU(1)); reflect.DeepEqual(before, after) {
			t.Errorf("a second later: %+v", after)
		}
	})
}

func TestDriverComesLateGoesAndReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(fmt.Errorf("libnvidia-ml.so.1 not found: %w", gpu.ErrNoDriver))
		r := run(t, m)
		if d := r.Current().Driver(); d.State != gpu.DriverAbsent || r.Current().Len() != 0 {
			t.Fatalf("without a library: %+v", d)
		}
		if _, err := r.Usage(t.Context()); !errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("Usage without a driver: %v", err)
		}
		r.after(time.Hour)
		if calls := m.Calls()["Open"]; calls > 3600/5 {
			t.Errorf("opened %d times in an hour", calls)
		}
		m.FailOpen(nil)
		r.after(20*time.Second).expect("late driver", nil)
		if r.Current().Len() != 2 {
			t.Fatalf("%d units", r.Current().Len())
		}

		m.FailOpen(gpu.ErrNoDriver)
		m.FailSession(gpu.ErrDriverLost)
		r.after(11*time.Second).expect("driver gone: units stay", map[int]health.State{0: health.Unknown, 1: health.Unknown})
		r.after(2 * time.Second)
		if r.Current().Len() != 2 || m.Sessions() != 0 {
			t.Errorf("%d units, %d sessions", r.Current().Len(), m.Sessions())
		}
		m.FailOpen(nil)
		m.FailSession(nil)
		r.after(20*time.Second).expect("driver back", nil)
	})
}

// A driver that appears is opened immediately, not with the next retry: pods of a node that boots fail meanwhile.
func TestDriverThatAppearsIsOpenedImmediately(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(gpu.ErrNoDriver)
		fingerprint := atomic.Pointer[string]{}
		fingerprint.Store(new("none"))
		r := start(t, m, setup{before: func(m *monitor.Monitor) {
			m.SetDriverProbe(func() string { return *fingerprint.Load() })
		}})
		r.after(time.Hour)
		fingerprint.Store(new("module")) // which is not usable yet
		r.after(time.Second)
		m.FailOpen(nil)
		if r.after(2 * time.Second); r.Current().Len() != 2 {
			t.Errorf("%d units", r.Current().Len())
		}
	})
}

func TestDriverThatFailsAfterItOpenedIsRetriedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(1))
		m.FailSession(gpu.ErrDriverLost)
		r := run(t, m)
		r.after(time.Hour)
		if calls := m.Calls()["Open"]; calls > 3600/5 {
			t.Errorf("opened %d times in an hour", calls)
		}
		m.FailSession(nil)
		r.after(20*time.Second).expect("recovered", nil)
	})
}

func TestStaleDriverEndsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(1))
		mon := monitor.New(m.Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), nil)
		done := make(chan error, 1)
		go func() { done <- mon.Run(t.Context()) }()
		synctest.Wait()
		m.FailSession(gpu.ErrDriverStale)
		if err := <-done; !errors.Is(err, gpu.ErrDriverStale) {
			t.Errorf("Run returned %v", err)
		}
		if u, _ := mon.Current().Unit(inventory.UnitID(coretest.GPU(0))); u.Health.Schedulable() {
			t.Errorf("offered with a stale driver: %v", u.Health)
		}
	})
}

// Callers of Usage that wait when the session ends get an error, with or without a deadline of their own.
func TestUsageIsAnsweredWhenTheSessionEnds(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Usage", gpu.Node)
		answered := make(chan error, 2)
		for range 2 { // one reading is in progress, one waits
			go func() { _, err := r.Usage(context.Background()); answered <- err }()
			synctest.Wait()
		}
		m.FailOpen(gpu.ErrNoDriver)
		go func() { _ = r.stop() }()
		for range 2 {
			if err := <-answered; !errors.Is(err, gpu.ErrNoDriver) {
				t.Error(err)
			}
		}
		release()
		r.after(2 * time.Second)
	})
}

// Retired units are removed after their grace period, without another event.
func TestRetiredUnitIsRemovedAfterItsGrace(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		replaced := coretest.GPUs(2)
		replaced.Devices[1].ID, replaced.Devices[1].At = "GPU-new", gpu.WholeGPU("GPU-new")
		m.Set(replaced)
		r.after(time.Minute)
		if h := r.healthOf(1); r.Current().Len() != 3 || h.Reason != health.ReasonWithdrawn {
			t.Fatalf("%d units, old one %v", r.Current().Len(), h)
		}
		r.after(3 * time.Second)
		if _, ok := r.Current().Unit(inventory.UnitID(coretest.GPU(1))); ok {
			t.Error("still listed")
		}
	})
}

// A GPU that is lost and returns a hundred times a minute causes few updates of an orchestrator, and takes no work.
func TestFlapsAreDamped(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		flap := gpu.WholeGPU(coretest.GPU(1))
		for minute := range 10 {
			before := len(r.seen)
			for range 100 {
				m.FailGPU(flap.GPU, health.Lost)
				m.SendEvent(health.Observation{At: flap}) // an event, so that the GPU is checked
				r.after(300 * time.Millisecond)
				m.RecoverGPU(flap.GPU)
				m.SendEvent(health.Observation{At: flap})
				r.after(300 * time.Millisecond)
				if r.healthOf(1).Schedulable() {
					t.Fatal("a GPU that flaps takes work")
				}
			}
			if n := updates(r.seen[before:]); n > 4 {
				t.Errorf("minute %d: %d updates", minute, n)
			}
		}
	})
}

// Frequent calls of Usage do not delay the check after an event.
func TestUsageIsNoHealthCheck(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for ctx.Err() == nil {
				_, _ = r.Usage(ctx)
				time.Sleep(400 * time.Millisecond)
			}
		}()
		r.after(5500 * time.Millisecond) // between two checks
		before := m.Calls()["Probe"]
		m.SendEvent(xid(1, 95))
		synctest.Wait()
		if n := m.Calls()["Probe"] - before; n != 1 {
			t.Errorf("%d checks immediately after an XID, want 1", n)
		}
	})
}

// XIDs from before the start count before any device is offered. A log that is not read in time delays nothing.
func TestKernelLogIsReadBeforeTheFirstReading(t *testing.T) {
	for took, before := range map[time.Duration]bool{time.Second / 2: true, time.Minute: false} {
		synctest.Test(t, func(t *testing.T) {
			s := &store{saved: unhealthy(95)}
			r := start(t, coretest.NewMachine(coretest.GPUs(2)), setup{store: s, before: func(m *monitor.Monitor) {
				m.AwaitLog()
				go func() {
					if !m.Restored(t.Context()) {
						t.Error("the history was not restored")
					}
					time.Sleep(took)
					m.Report(health.Observation{PCI: "0000:10:00.0", Kind: health.XID, Code: 119, FromKernelLog: true, Backlog: true, NextSequence: 7},
						health.Observation{Kind: health.KernelLogRead, NextSequence: 9})
				}()
			}})
			r.after(2 * time.Second)
			offeredHealthy := false
			for _, inv := range r.seen {
				u, ok := inv.Unit(inventory.UnitID(coretest.GPU(0)))
				offeredHealthy = offeredHealthy || ok && u.Health.State == health.Healthy
			}
			if offeredHealthy == before || r.Current().Len() != 2 {
				t.Errorf("read in %v: GPU 0 was offered as healthy: %t, %d units", took, offeredHealthy, r.Current().Len())
			}
			r.after(time.Hour).expect("in the end", map[int]health.State{0: health.Unhealthy, 1: health.Unhealthy})
			must(t, r.stop())
			if last := s.last(); last.KernelLog != 9 {
				t.Errorf("the saved position in the log is %d", last.KernelLog)
			}
		})
	}
}
