package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// release has the driver released for the reset of GPU n; -1 ends it.
func (r *running) release(n int) {
	r.UpdateHost(func(h *inventory.Host) {
		if h.Ownership = (inventory.Ownership{}); n >= 0 {
			id := coretest.GPU(n)
			h.Ownership = inventory.Ownership{DriverReleased: id, GPUs: []inventory.GPUOwner{{GPU: id, Local: true, Taken: inventory.Reset}}}
		}
	})
	synctest.Wait()
}

func (r *running) await(wait func(context.Context) error, d time.Duration) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), d)
	defer cancel()
	return wait(ctx)
}

// expectReset checks that all n units are listed, and that the healthy ones are withheld for a reset.
func (r *running) expectReset(when string, n int) {
	r.t.Helper()
	if r.Current().Len() != n {
		r.t.Errorf("%s: %d units, want %d", when, r.Current().Len(), n)
	}
	for u := range r.Current().Units() {
		if u.Health.Schedulable() || u.Health.Reason != health.ReasonResetting && u.Health.State != health.Unhealthy {
			r.t.Errorf("%s: %s: %s", when, u.ID, u.Health)
		}
	}
}

// Case 22 of the contract of rescue: while a GPU is reset its neighbours stay listed, nothing that is known of them changes, and they take no new work;
// within a second after that they do.
func TestNeighboursDuringAReset(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		m.SendEvent(xid(3, 95))
		r.after(5*time.Second).expect("before", map[int]health.State{3: health.Unhealthy})
		before, calls := r.State().Ledger.Conditions(), m.Calls()
		r.release(3)
		must(t, r.await(r.AwaitReleased, 10*time.Second))
		if m.Sessions() != 0 {
			t.Fatalf("%d sessions", m.Sessions())
		}
		calls["Close"]++
		for _, pass := range []time.Duration{0, 10 * time.Second, 48 * time.Second} {
			r.after(pass).expectReset("released", 4)
			s := r.State()
			if s.Snapshot.Driver.State != gpu.DriverReady || !slices.EqualFunc(s.Ledger.Conditions(), before, sameVerdict) {
				t.Errorf("driver %v, conditions %v, before %v", s.Snapshot.Driver, s.Ledger.Conditions(), before)
			}
		}
		if now := m.Calls(); now["Open"] != calls["Open"] || now["Snapshot"] != calls["Snapshot"] || now["Close"] != calls["Close"] {
			t.Errorf("calls %v, before %v", now, calls)
		}
		if h := r.healthOf(0); h.Detail != string(coretest.GPU(3)) || h.State != health.Unknown || r.healthOf(3).Reason != health.ReasonXID {
			t.Errorf("neighbour %s, GPU %s", h, r.healthOf(3))
		}
		if _, err := r.Current().Reserve(inventory.UnitID(coretest.GPU(0))); err == nil {
			t.Error("a neighbour is given out")
		}
		tolerates := func(inventory.Unit, health.Health) bool { return true }
		if _, err := r.Current().ReserveTolerated(tolerates, inventory.UnitID(coretest.GPU(3))); err == nil {
			t.Error("the GPU is given out to work that tolerates its fault")
		}
		if _, err := r.Usage(t.Context()); !errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("usage: %v", err)
		}
		r.release(-1)
		must(t, r.await(r.AwaitReading, time.Second))
		r.after(0).expect("after", map[int]health.State{3: health.Unhealthy})
		if now := m.Calls(); now["Open"] != calls["Open"]+1 {
			t.Errorf("opened %d times", now["Open"]-calls["Open"])
		}
	})
}

// sameVerdict reports whether two conditions differ in nothing but the progress of a recovery.
func sameVerdict(a, b health.Condition) bool {
	a.CleanChecks, a.ClearingSince = b.CleanChecks, b.ClearingSince
	return a == b
}

// Verdicts count for a minute. Then the driver is not called, as in maintenance, until the end of the release.
func TestVerdictsOfALongReset(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, _ *coretest.Machine, r *running) {
		r.release(1)
		for range 3 { // of several GPUs, one right after another: the time goes on
			r.after(19*time.Second).expectReset("released", 2)
			r.release(0)
			r.release(1)
		}
		r.after(4 * time.Second)
		const why = "driver released for the reset of "
		if d := r.Current().Driver(); d.State != gpu.DriverReleased || d.Reason != why+string(coretest.GPU(1)) {
			t.Errorf("driver %+v", d)
		}
		r.after(2*time.Minute).expectReset("after a minute", 2)
		if all := r.Current().Conditions(firstUnit(r)); len(all) != 1 {
			t.Errorf("conditions %v", all)
		}
		r.release(-1)
		must(t, r.await(r.AwaitReading, time.Second))
		r.after(0).expect("after", nil)
		if n := len(r.State().Ledger.Conditions()); n != 0 {
			t.Errorf("%d conditions", n)
		}
	})
}

func firstUnit(r *running) inventory.Unit {
	u, _ := r.Current().Unit(inventory.UnitID(coretest.GPU(0)))
	return u
}

// A neighbour that recovers does not do so while nothing is checked: the evidence begins anew with the first check.
func TestNoEvidenceDuringAReset(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		m.FailGPU(coretest.GPU(0), health.ProbeFailed)
		r.after(3*time.Minute).expect("failed", map[int]health.State{0: health.Unhealthy})
		m.RecoverGPU(coretest.GPU(0))
		r.after(time.Minute)
		dwell := time.Duration(0)
		for ; r.healthOf(0).State == health.Unhealthy && dwell < time.Hour; dwell += time.Second {
			r.after(time.Second)
		}
		m.FailGPU(coretest.GPU(0), health.ProbeFailed)
		r.after(3 * time.Minute)
		m.RecoverGPU(coretest.GPU(0))
		r.after(time.Minute + dwell - 10*time.Second)
		for range 4 {
			r.release(1)
			r.after(50*time.Second).expectReset("released", 2)
			r.release(-1)
			r.after(5*time.Second).expect("after", map[int]health.State{0: health.Unhealthy})
		}
	})
}

// Maintenance begins and ends while the driver is released, and the other way round. Maintenance wins.
func TestMaintenanceAndAReset(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		r.release(1)
		must(t, r.quiesce(time.Time{}))
		r.after(time.Second).expectMaintenance("both", 2)
		must(t, r.Resume(t.Context()))
		r.after(2*time.Second).expectReset("released", 2)
		must(t, r.quiesce(time.Time{}))
		r.release(-1)
		r.after(time.Minute).expectMaintenance("only maintenance", 2)
		r.release(0)
		r.after(time.Minute).expectMaintenance("both again", 2)
		r.release(-1)
		if m.Sessions() != 0 || m.Calls()["Open"] != 1 {
			t.Errorf("%d sessions, opened %d times", m.Sessions(), m.Calls()["Open"])
		}
		must(t, r.Resume(t.Context()))
		must(t, r.await(r.AwaitReading, time.Second))
		r.after(0).expect("resumed", nil)
	})
}

// A call hangs: the driver is still held, and the caller gets to know which call. It is opened again all the same.
func TestReleaseWhileACallHangs(t *testing.T) {
	for _, method := range []string{"Probe", "Snapshot", "Wait", "Close"} {
		t.Run(method, func(t *testing.T) {
			onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
				release := m.Hang(method, gpu.Node)
				r.after(2 * time.Minute)
				r.release(1)
				if _, held := errors.AsType[*monitor.HeldError](r.await(r.AwaitReleased, 10*time.Second)); !held {
					t.Error("no HeldError")
				}
				release()
				r.after(2 * time.Second)
				if err := r.await(r.AwaitReleased, time.Second); err != nil || m.Sessions() != 0 {
					t.Errorf("after it returned: %v, %d sessions", err, m.Sessions())
				}
				r.release(-1)
				must(t, r.await(r.AwaitReading, 2*time.Second))
			})
		})
	}
}

// Without a driver, and while it is opened, the release keeps it from being opened, and after that it is opened without a pause.
func TestReleaseWithoutASession(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprintf("opened too late %t", before), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				m.FailOpen(gpu.ErrNoDriver)
				r := run(t, m).after(5 * time.Minute)
				opens := func() {}
				if before {
					m.FailOpen(nil)
					opens = m.Hang("Open", gpu.Node)
					r.after(20 * time.Second)
				}
				r.release(1)
				r.after(3 * time.Second)
				m.FailOpen(nil)
				opens()
				r.after(20 * time.Second)
				opened := m.Calls()["Open"]
				must(t, r.await(r.AwaitReleased, time.Second))
				if r.after(20 * time.Second); m.Sessions() != 0 || m.Calls()["Open"] != opened {
					t.Errorf("%d sessions", m.Sessions())
				}
				if err := r.await(r.AwaitReading, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("read without a driver: %v", err)
				}
				r.release(-1)
				must(t, r.await(r.AwaitReading, 100*time.Millisecond))
				r.after(0).expect("after", nil)
			})
		})
	}
}

// A driver that is not usable after the reset: the verdicts of before do not count any more.
func TestDriverLostByAReset(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		if err := r.await(r.AwaitReleased, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without a release: %v", err)
		}
		r.release(1)
		m.FailOpen(errors.New("unknown error"))
		r.after(2 * time.Second)
		r.release(-1)
		for n := range 2 {
			if h := r.healthOf(n); h.Reason != health.ReasonDriver {
				t.Errorf("GPU %d: %s", n, h)
			}
		}
		m.FailOpen(nil)
		must(t, r.await(r.AwaitReading, time.Minute))
	})
}

// The first reading after the reset hangs: until then no GPU takes work, and after a minute no verdict counts.
func TestFirstReadingAfterAResetHangs(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		r.release(1)
		r.after(10 * time.Second)
		release := m.Hang("Snapshot", gpu.Node)
		r.release(-1)
		r.after(40*time.Second).expectReset("not read", 2)
		r.after(20 * time.Second)
		if d := r.Current().Driver(); d.State != gpu.DriverReleased {
			t.Errorf("driver %+v", d)
		}
		for u := range r.Current().Units() {
			if u.Health.Schedulable() {
				t.Errorf("%s: %s", u.ID, u.Health)
			}
		}
		release()
		must(t, r.await(r.AwaitReading, 10*time.Second))
		r.after(0).expect("read", nil)
	})
}

// The reset that this agent made is one for the evidence against faults.
func TestWasReset(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, _ *coretest.Machine, r *running) {
		r.after(time.Minute)
		before := r.State().Ledger.Conditions()
		now := time.Now().UTC()
		r.Report(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.WasReset})
		r.after(time.Second)
		was, _ := r.State().Ledger.History(coretest.GPU(1))
		other, _ := r.State().Ledger.History(coretest.GPU(0))
		if was.LastReset.Before(now) || !other.LastReset.IsZero() || !slices.Equal(r.State().Ledger.Conditions(), before) {
			t.Errorf("reset at %v, other %v", was.LastReset, other.LastReset)
		}
	})
}
