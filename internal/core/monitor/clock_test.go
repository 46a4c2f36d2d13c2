package monitor_test

import (
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

// wall is a wall clock that can be set while the monotonic clock goes on.
type wall struct{ ahead atomic.Int64 }

func (w *wall) now() time.Time       { return time.Now().Add(time.Duration(w.ahead.Load())) }
func (w *wall) jump(d time.Duration) { w.ahead.Add(int64(d)) }

// runBy is run by a wall clock of its own.
func runBy(t *testing.T, m *coretest.Machine) (*running, *wall) {
	t.Helper()
	w := &wall{}
	r := start(t, m, setup{
		config: func(c *core.Config) { c.Health.RemoveLostAfter = 30 * time.Minute },
		before: func(m *monitor.Monitor) { m.SetWallClock(w.now) },
	})
	return r, w
}

// Waits last as long as without a jump of the wall clock in either direction.
func TestWaitsIgnoreJumpsOfTheWallClock(t *testing.T) {
	fault := func(r *running, m *coretest.Machine) {
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 119})
		r.after(time.Second)
	}
	reset := func(r *running, m *coretest.Machine) {
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.DriverRebound})
		r.after(time.Second)
	}
	is := func(state health.State) func(*running) bool {
		return func(r *running) bool {
			u, ok := r.Current().Unit(inventory.UnitID(coretest.GPU(1)))
			return ok && u.Health.State == state
		}
	}
	for name, tc := range map[string]struct {
		begin func(*running, *coretest.Machine)
		over  func(*running) bool
		most  time.Duration
		least time.Duration
	}{
		"recovery after a reset": {func(r *running, m *coretest.Machine) { fault(r, m); reset(r, m) }, is(health.Healthy), 2 * time.Minute, 50 * time.Second},
		"maintenance with an end": {func(r *running, _ *coretest.Machine) {
			must(r.t, r.quiesce(time.Now().Add(10*time.Minute)))
		}, is(health.Healthy), 11 * time.Minute, 9 * time.Minute},
		"a fault that is ignored for a time": {func(r *running, m *coretest.Machine) {
			fault(r, m)
			if _, err := r.Ignore(r.t.Context(), health.Command{GPU: coretest.GPU(1)}, time.Now().Add(20*time.Second)); err != nil {
				r.t.Error(err)
			}
		}, is(health.Unhealthy), 25 * time.Second, 15 * time.Second},
		"a unit that was withdrawn": {func(r *running, m *coretest.Machine) {
			m.Set(coretest.GPUs(1))
			must(r.t, r.ApplyPolicy(r.t.Context(), excluding(coretest.GPU(1))))
		}, func(r *running) bool { return r.Current().Len() == 1 }, 4 * time.Second, time.Second},
		"a GPU that stays lost": {func(r *running, m *coretest.Machine) { m.Set(coretest.GPUs(1)); r.after(2 * time.Minute) },
			func(r *running) bool { return r.Current().Len() == 1 }, 32 * time.Minute, 27 * time.Minute},
	} {
		for _, by := range []time.Duration{0, 6 * time.Hour, -6 * time.Hour, 400 * 24 * time.Hour, -400 * 24 * time.Hour} {
			t.Run(name+" "+by.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					m := coretest.NewMachine(coretest.GPUs(2))
					r, w := runBy(t, m)
					r.after(time.Minute)
					tc.begin(r, m)
					w.jump(by)
					began := time.Now()
					for !tc.over(r) && time.Since(began) < tc.most {
						r.after(max(tc.most/200, time.Second/4))
					}
					if took := time.Since(began); !tc.over(r) || took < tc.least {
						t.Errorf("over: %t, after %v, want %v to %v", tc.over(r), took, tc.least, tc.most)
					}
				})
			})
		}
	}
}

func excluding(ids ...gpu.DeviceID) core.Config {
	cfg := core.DefaultConfig()
	cfg.Exclude = ids
	return cfg
}

// Clear works for a fault whose time is after that of the command, because the wall clock was set back.
func TestClearAfterTheClockWasSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		r, w := runBy(t, m)
		r.after(time.Minute)
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 119})
		r.after(time.Second)
		w.jump(-2 * time.Hour)
		if _, err := r.Clear(t.Context(), health.Command{GPU: coretest.GPU(1), VerifiedAt: w.now()}); err != nil {
			t.Error(err)
		}
		r.expect("cleared", nil)
	})
}
