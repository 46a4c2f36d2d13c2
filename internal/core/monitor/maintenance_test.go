package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

func (r *running) quiesce(until time.Time) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	return r.Quiesce(ctx, until)
}

// expectMaintenance checks that all n units are listed in maintenance.
func (r *running) expectMaintenance(when string, n int) {
	r.t.Helper()
	if r.Current().Len() != n {
		r.t.Errorf("%s: %d units, want %d", when, r.Current().Len(), n)
	}
	for u := range r.Current().Units() {
		if u.Health.Reason != health.ReasonMaintenance || u.Health.Schedulable() {
			r.t.Errorf("%s: %s: %s", when, u.ID, u.Health)
		}
	}
}

func TestQuiesceReleasesTheDriver(t *testing.T) {
	onGPUs(t, 8, func(t *testing.T, m *coretest.Machine, r *running) {
		began := time.Now()
		if err := r.quiesce(time.Time{}); err != nil || m.Sessions() != 0 {
			t.Fatalf("%v, %d sessions", err, m.Sessions())
		}
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("took %v", d)
		}
		r.expectMaintenance("quiesced", 8)
		before := m.Calls()
		r.after(time.Hour).expectMaintenance("an hour later", 8)
		if after := m.Calls(); fmt.Sprint(before) != fmt.Sprint(after) {
			t.Errorf("the driver was called: %v, then %v", before, after)
		}
		if err := r.quiesce(time.Time{}); err != nil {
			t.Errorf("quiesce twice: %v", err)
		}
		must(t, r.Resume(t.Context()))
		r.after(time.Second).expect("resumed", nil)
		if err := r.Resume(t.Context()); !errors.Is(err, monitor.ErrNotQuiesced) {
			t.Errorf("resume twice: %v", err)
		}
	})
}

func TestMaintenanceEndsAtItsTime(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, _ *coretest.Machine, r *running) {
		if _, ok := errors.AsType[*setting.Error](r.quiesce(time.Now().Add(-time.Second))); !ok {
			t.Error("a time in the past was accepted")
		}
		must(t, r.quiesce(time.Now().Add(time.Hour)))
		r.after(59*time.Minute).expectMaintenance("for an hour", 1)
		r.after(2*time.Minute).expect("after the hour", nil)
		if now := r.State().Maintenance; now != (health.Maintenance{}) {
			t.Errorf("still recorded: %+v", now)
		}
	})
}

// With a call that hangs the driver is not released, which is an error until the call returns.
func TestQuiesceWhileACallHangs(t *testing.T) {
	for _, method := range []string{"Probe", "Snapshot", "Wait", "Close"} {
		t.Run(method, func(t *testing.T) {
			onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
				release := m.Hang(method, gpu.WholeGPU(coretest.GPU(1)))
				r.after(2 * time.Minute)
				if _, ok := errors.AsType[*monitor.HeldError](r.quiesce(time.Time{})); !ok {
					t.Error("no HeldError")
				}
				r.after(time.Second)
				for u := range r.Current().Units() {
					if u.Health.Schedulable() {
						t.Errorf("%s: %s", u.ID, u.Health)
					}
				}
				release()
				r.after(2 * time.Second)
				if err := r.quiesce(time.Time{}); err != nil || m.Sessions() != 0 {
					t.Errorf("after it returned: %v, %d sessions", err, m.Sessions())
				}
				must(t, r.Resume(t.Context()))
				r.after(5*time.Minute).expect("resumed", nil)
			})
		})
	}
}

func TestQuiesceWithoutADriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(gpu.ErrNoDriver)
		r := run(t, m).after(time.Minute)
		must(t, r.quiesce(time.Time{}))
		opened := m.Calls()["Open"]
		m.FailOpen(nil)
		r.after(time.Hour).expectMaintenance("a driver appeared meanwhile", 0)
		if n := m.Calls()["Open"]; n != opened {
			t.Errorf("opened %d times", n-opened)
		}
		must(t, r.Resume(t.Context()))
		if r.after(time.Second); r.Current().Len() != 2 {
			t.Errorf("%d units", r.Current().Len())
		}
	})
}

func TestQuiesceWhileTheDriverIsOpened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		release := m.Hang("Open", gpu.Node)
		r := run(t, m)
		if _, ok := errors.AsType[*monitor.HeldError](r.quiesce(time.Time{})); !ok {
			t.Error("no HeldError")
		}
		release()
		r.after(time.Second).expectMaintenance("opened too late", 0)
		if m.Sessions() != 0 {
			t.Errorf("%d sessions", m.Sessions())
		}
		must(t, r.quiesce(time.Time{}))
	})
}

// The agent may be restarted during maintenance.
func TestMaintenanceOutlivesTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, history := coretest.NewMachine(coretest.GPUs(2)), &store{}
		r := runWith(t, m, history)
		must(t, r.quiesce(time.Time{}))
		must(t, r.stop())
		calls := m.Calls()["Open"]
		r = runWith(t, m, history).after(time.Hour)
		r.expectMaintenance("restarted", 2)
		if m.Calls()["Open"] != calls {
			t.Error("the driver was opened")
		}
		must(t, r.Resume(t.Context()))
		r.after(time.Second).expect("resumed", nil)
		must(t, r.stop())
		runWith(t, m, history).after(time.Second).expect("and restarted", nil)
	})
}

// An event wait that hangs blocks no other goroutine: the watchdog detects it.
func TestEventWaitThatHangsIsDetected(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, m *coretest.Machine, r *running) {
		r.after(time.Minute)
		release := m.Hang("Wait", gpu.Node)
		r.after(20*time.Second).expect("checks go on", nil)
		late := r.Watchdog().Late(time.Now())
		if !r.Stats().EventsFail || len(late) != 1 || late[0].Name != "event wait" {
			t.Errorf("events fail: %v, late: %v", r.Stats().EventsFail, late)
		}
		release()
		if r.after(2 * time.Second); r.Stats().EventsFail || len(r.Watchdog().Late(time.Now())) != 0 {
			t.Error("it returned, and is still overdue")
		}
	})
}

// A hung call: that GPU is unhealthy, the others are not, reservations and shutdown go on.
func TestHungCall(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Probe", gpu.WholeGPU(coretest.GPU(2)))
		r.after(71*time.Second).expect("hung", map[int]health.State{2: health.Unhealthy})
		if h := r.healthOf(2); h.Reason != health.ReasonUnresponsive || h.Detail != "nvmlProbe" {
			t.Errorf("health: %v", h)
		}
		if _, err := r.Current().Reserve(inventory.UnitID(coretest.GPU(0))); err != nil {
			t.Errorf("neighbour: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Usage(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Usage: %v", err)
		}
		m.SendEvent(xid(0, 79))
		synctest.Wait()
		r.expect("events arrive all the same", map[int]health.State{0: health.GPULost, 2: health.Unhealthy})
		release()
		r.after(2*time.Minute).expect("released", map[int]health.State{0: health.Unhealthy})
	})
}

func TestStopsInTimeWhateverHangs(t *testing.T) {
	for _, method := range []string{"Open", "Snapshot", "Probe", "Wait", "Close"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				release := m.Hang(method, gpu.Node)
				r := run(t, m)
				r.after(time.Minute)
				start := time.Now()
				if err := r.stop(); err != nil {
					t.Errorf("Run returned %v", err)
				}
				if d := time.Since(start); d >= 2*time.Second {
					t.Errorf("stopped after %v", d)
				}
				release()
				r.after(2 * time.Second) // the abandoned goroutines end
			})
		})
	}
}

// A session that opens after the monitor was stopped is closed: NVML counts its users.
func TestLateSessionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		release := m.Hang("Open", gpu.Node)
		r := run(t, m)
		go func() {
			time.Sleep(time.Second)
			release()
		}()
		start := time.Now()
		must(t, r.stop())
		if d := time.Since(start); d != time.Second || m.Sessions() != 0 || m.Calls()["Close"] != 1 {
			t.Errorf("%d sessions open after %v, calls %v", m.Sessions(), d, m.Calls())
		}
	})
}

// hashicorp/nomad-device-nvidia and NVIDIA's plugin spin when the event wait fails.
func TestFailingEventWaitDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(8))
		m.FailWait(errors.New("GPU is lost"))
		r := run(t, m)
		r.after(time.Minute).expect("no GPU is unhealthy", nil)
		calls := m.Calls()
		if calls["Wait"] > 61 || calls["Probe"] > 90 {
			t.Errorf("calls in a minute: %v", calls)
		}
		m.FailWait(nil)
		m.SendEvent(xid(1, 48))
		r.after(time.Second).expect("events again", map[int]health.State{1: health.Unhealthy})
	})
}
