package monitor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
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

// store records what is saved, and loads the latest.
type store struct {
	saved []core.Checkpoint
	aside []error
	err   error // of Save
	load  func()
	save  func()

	missing atomic.Bool // the file was removed since Save
}

func (s *store) Missing() bool { return s.missing.Load() }

func (s *store) Load() (core.Checkpoint, string) {
	if s.load != nil {
		s.load()
	}
	if s.saved == nil {
		return core.Checkpoint{}, "boot"
	}
	return s.last(), "boot"
}

func (s *store) last() core.Checkpoint { return s.saved[len(s.saved)-1] }

func (s *store) SetAside(why error) { s.aside = append(s.aside, why) }

func (s *store) Save(r core.Checkpoint) error {
	if s.save != nil {
		s.save()
	}
	if s.err == nil {
		s.saved = append(s.saved, r)
		s.missing.Store(false)
	}
	return s.err
}

func TestNoDeviceIsOfferedBeforeTheHistoryIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		h := &store{saved: unhealthy(95), load: func() { <-answer }}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h).after(time.Minute)
		if d := r.Current().Driver(); r.Current().Len() != 0 || d.State != gpu.DriverPending || !strings.Contains(d.Reason, "disk") {
			t.Errorf("%d units are offered without the history, driver: %+v", r.Current().Len(), d)
		}
		late := r.Watchdog().Late(time.Now())
		if len(late) != 1 || late[0].Name != "history" {
			t.Errorf("late: %v", late)
		}
		close(answer)
		r.after(time.Second).expect("with its history", map[int]health.State{1: health.Unhealthy})
	})
}

func TestStopsWhileTheDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		h := &store{load: func() { <-answer }}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h)
		began := time.Now()
		if err := r.stop(); err != nil || time.Since(began) > time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		if len(h.saved) != 0 {
			t.Error("the history that was not read was overwritten")
		}
		close(answer)
	})
}

// unhealthy is a history of two GPUs of which the second reported an XID.
func unhealthy(code uint64) []core.Checkpoint {
	cfg := core.DefaultConfig()
	s := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(2)).
		Observe(cfg, time.Now(), xid(1, code))
	return []core.Checkpoint{s.Checkpoint("boot")}
}

// A fault right before the end is saved, however soon after another write.
func TestLastFaultIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := coretest.NewMachine(coretest.GPUs(2)), &store{}
		r := runWith(t, m, s).after(time.Minute)
		for _, code := range []uint64{95, 79} {
			m.SendEvent(xid(1, code))
			synctest.Wait()
		}
		must(t, r.stop())
		last := s.last()
		for _, cause := range []string{"XID_95", "XID_79"} {
			if !slices.ContainsFunc(last.Conditions, func(c health.Condition) bool { return c.Cause() == cause }) {
				t.Errorf("%s is not in the last record: %v", cause, last.Conditions)
			}
		}
		if last.BootID != "boot" {
			t.Errorf("boot id %q", last.BootID)
		}
	})
}

// The state is on disk when Save returns.
func TestSaveWritesBeforeItReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), s)
		must(t, r.quiesce(time.Time{}))
		must(t, r.Save(t.Context()))
		if s.last().Maintenance.Since.IsZero() {
			t.Error("maintenance is not on disk")
		}
		must(t, r.Resume(t.Context()))
		must(t, r.Save(t.Context()))
		if now := s.last().Maintenance; !now.Since.IsZero() {
			t.Errorf("on disk is %+v", now)
		}
	})
}

// Save returns nil if the state is on disk, and otherwise the reason why it is not.
func TestSaveReturnsWhyTheStateIsNotOnDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("no space left on device")
		s := &store{err: full}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), s)
		without := run(t, coretest.NewMachine(coretest.GPUs(1)))
		for want, err := range map[error]error{full: r.Save(t.Context()), monitor.ErrNoStore: without.Save(t.Context())} {
			if notSaved := (*monitor.NotSavedError)(nil); !errors.As(err, &notSaved) || !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
		}
		s.err = nil
		must(t, r.Save(t.Context()))
	})
}

func TestSaveDoesNotWaitForADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), &store{save: func() { time.Sleep(time.Minute) }})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		err := r.Save(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "disk") || time.Since(began) > time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		_ = r.stop()
		time.Sleep(5 * time.Minute) // for the writes under way
	})
}

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
		m.SendEvent(xid(1, 119))
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
		m.SendEvent(xid(1, 119))
		r.after(time.Second)
		w.jump(-2 * time.Hour)
		if _, err := r.Clear(t.Context(), health.Command{GPU: coretest.GPU(1), VerifiedAt: w.now()}); err != nil {
			t.Error(err)
		}
		r.expect("cleared", nil)
	})
}

// A driver that is slow to answer for the first time, in whichever call, has no device leave that the history has.
func TestDevicesOfTheHistoryAreListedWhileTheDriverStarts(t *testing.T) {
	for _, method := range []string{"Open", "Snapshot"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				release := m.Hang(method, gpu.Node)
				h := &store{saved: []core.Checkpoint{{BootID: "boot", Devices: coretest.GPUs(2).Devices}}}
				r := runWith(t, m, h)
				time.Sleep(4500 * time.Millisecond)
				r.expect("before the first fingerprint", map[int]health.State{0: health.Unknown, 1: health.Unknown})
				if d := r.Current().Driver(); d.State != gpu.DriverPending || !r.Current().Provisional() {
					t.Errorf("the driver has answered: %+v", d)
				}
				for u := range r.Current().Units() {
					if text := u.Health.String(); !strings.Contains(text, "it has not answered since the agent started") {
						t.Errorf("%s: %s", u.ID, text)
					}
				}
				time.Sleep(15 * time.Second)
				release()
				r.after(5*time.Second).expect("with the driver", nil)
			})
		})
	}
}

// A driver that answers in time is the only one that lists devices.
func TestDevicesOfTheHistoryAreNotListedWithAFastDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &store{saved: []core.Checkpoint{{BootID: "boot", Devices: coretest.GPUs(2).Devices}}}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h).after(time.Minute)
		for _, inv := range r.seen {
			if inv.Len() > 0 && inv.Driver().State == gpu.DriverPending {
				t.Error("the devices of the history were listed before the driver answered")
			}
		}
		r.expect("with the driver", nil)
	})
}

// A history that someone has removed while the agent runs is written again within half a minute, although nothing
// changes.
func TestRemovedHistoryIsWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &store{}
		runWith(t, coretest.NewMachine(coretest.GPUs(2)), h).after(10 * time.Second)
		h.missing.Store(true)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if h.missing.Load() {
			t.Error("the history is not written again")
		}
		n := len(h.saved)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if len(h.saved) != n {
			t.Errorf("a history that is there was written %d times", len(h.saved)-n)
		}
	})
}
