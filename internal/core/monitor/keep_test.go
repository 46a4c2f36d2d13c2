package monitor_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// store notes what it is given, and gives the latest.
type store struct {
	saved []core.Checkpoint
	aside []error
	err   error // of Save
}

func (s *store) Load() (core.Checkpoint, string) {
	if s.saved == nil {
		return core.Checkpoint{}, "boot"
	}
	return s.saved[len(s.saved)-1], "boot"
}

func (s *store) SetAside(why error) { s.aside = append(s.aside, why) }

func (s *store) Save(r core.Checkpoint) error {
	if s.err == nil {
		s.saved = append(s.saved, r)
	}
	return s.err
}

// hung is a history on a disk that does not answer.
type hung struct {
	store
	answer chan struct{}
}

func (h *hung) Load() (core.Checkpoint, string) {
	<-h.answer
	return h.store.Load()
}

func TestNothingIsOfferedBeforeItsHistoryIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hung{answer: make(chan struct{})}
		h.saved = sick(95)
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h).after(time.Minute)
		if d := r.Current().Driver(); r.Current().Len() != 0 || d.State != core.DriverPending || !strings.Contains(d.Reason, "disk") {
			t.Errorf("%d units are offered without their history, driver: %+v", r.Current().Len(), d)
		}
		late := r.Watchdog().Late(time.Now())
		if len(late) != 1 || late[0].Name != "history" {
			t.Errorf("late: %v", late)
		}
		close(h.answer)
		r.after(time.Second).expect("with its history", map[int]core.HealthState{1: core.Unhealthy})
	})
}

func TestStopsWhileTheDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hung{answer: make(chan struct{})}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h)
		began := time.Now()
		if err := r.stop(); err != nil || time.Since(began) > time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		if len(h.saved) != 0 {
			t.Error("the history that was not read was overwritten")
		}
		close(h.answer)
	})
}

// sick is a history of two GPUs of which the second reported an XID.
func sick(xid uint64) []core.Checkpoint {
	cfg := core.DefaultConfig()
	s := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(2)).
		Observe(cfg, time.Now(), core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: xid})
	return []core.Checkpoint{s.Checkpoint("boot")}
}

// A fault that came right before the end is kept, however soon after another write.
func TestTheLastFaultIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := coretest.NewMachine(coretest.GPUs(2)), &store{}
		ctx, cancel := context.WithCancel(t.Context())
		mon := monitor.New(m.Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), s)
		done := make(chan error, 1)
		go func() { done <- mon.Run(ctx) }()
		time.Sleep(time.Minute)
		for _, xid := range []uint64{95, 79} {
			m.Raise(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: xid})
			synctest.Wait()
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		last := s.saved[len(s.saved)-1]
		for _, cause := range []string{"XID_95", "XID_79"} {
			if !slices.ContainsFunc(last.Conditions, func(c core.Condition) bool { return c.Cause() == cause }) {
				t.Errorf("%s is not in the last record: %v", cause, last.Conditions)
			}
		}
		if last.BootID != "boot" {
			t.Errorf("boot id %q", last.BootID)
		}
	})
}

// Who was answered can rely on it, however soon the process is killed.
func TestKeepWritesBeforeItReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), s)
		for _, away := range []bool{true, false} {
			if away {
				if err := r.quiesce(time.Time{}); err != nil {
					t.Fatal(err)
				}
			} else if err := r.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := r.Save(t.Context()); err != nil {
				t.Fatal(err)
			}
			if last := s.saved[len(s.saved)-1]; last.Maintenance.Since.IsZero() == away {
				t.Errorf("away %v: on disk is %+v", away, last.Maintenance)
			}
		}
	})
}

func TestKeepWithoutAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := run(t, coretest.NewMachine(coretest.GPUs(1))).Save(t.Context())
		if notKept := (*monitor.NotSavedError)(nil); !errors.As(err, &notKept) || !errors.Is(err, monitor.ErrNoStore) {
			t.Errorf("it is said to be kept: %v", err)
		}
	})
}

// What an operator was answered is on disk, or the answer says why it is not.
func TestKeepReturnsWhyItIsNotOnDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("no space left on device")
		s := &store{err: full}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), s)
		err := r.Save(t.Context())
		if notKept := (*monitor.NotSavedError)(nil); !errors.As(err, &notKept) || !errors.Is(err, full) {
			t.Errorf("kept: %v", err)
		}
		s.err = nil
		if err := r.Save(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// slow is a history on a disk that takes its time to write.
type slow struct {
	store
	takes time.Duration
}

func (s *slow) Save(r core.Checkpoint) error {
	time.Sleep(s.takes)
	return s.store.Save(r)
}

func TestKeepDoesNotWaitForADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := runWith(t, coretest.NewMachine(coretest.GPUs(1)), &slow{takes: time.Minute})
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

// The history of another machine is set aside before anything is saved, and once.
func TestHistoryOfAnotherMachineIsSetAsideOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.GPUs(4)
		machine.Devices, machine.Links = machine.Devices[2:], nil
		s := &store{saved: sick(79)} // of the GPUs 0 and 1
		r := runWith(t, coretest.NewMachine(machine), s).after(10 * time.Minute)
		for u := range r.Current().Units() {
			if u.Health.State != core.Healthy {
				t.Errorf("%s: %s", u.ID, u.Health)
			}
		}
		if r.Current().Len() != 2 || len(s.aside) != 1 {
			t.Fatalf("%d units, set aside: %v", r.Current().Len(), s.aside)
		}
		f := (*core.ForeignHistory)(nil)
		if !errors.As(s.aside[0], &f) || !slices.Equal(f.DriverGPUs, []core.DeviceID{coretest.GPU(2), coretest.GPU(3)}) {
			t.Errorf("set aside: %v", s.aside[0])
		}
		if last := s.saved[len(s.saved)-1]; len(last.Devices) != 2 || len(last.Conditions) != 0 {
			t.Errorf("saved: %+v", last)
		}
	})
}
