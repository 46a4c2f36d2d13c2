package monitor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// store records what is saved, and loads the latest.
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

// hung is a store on a disk that does not answer.
type hung struct {
	store
	answer chan struct{}
}

func (h *hung) Load() (core.Checkpoint, string) {
	<-h.answer
	return h.store.Load()
}

func TestNoDeviceIsOfferedBeforeTheHistoryIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hung{answer: make(chan struct{})}
		h.saved = unhealthy(95)
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h).after(time.Minute)
		if d := r.Current().Driver(); r.Current().Len() != 0 || d.State != gpu.DriverPending || !strings.Contains(d.Reason, "disk") {
			t.Errorf("%d units are offered without the history, driver: %+v", r.Current().Len(), d)
		}
		late := r.Watchdog().Late(time.Now())
		if len(late) != 1 || late[0].Name != "history" {
			t.Errorf("late: %v", late)
		}
		close(h.answer)
		r.after(time.Second).expect("with its history", map[int]health.State{1: health.Unhealthy})
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

// unhealthy is a history of two GPUs of which the second reported an XID.
func unhealthy(xid uint64) []core.Checkpoint {
	cfg := core.DefaultConfig()
	s := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(2)).
		Observe(cfg, time.Now(), health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: xid})
	return []core.Checkpoint{s.Checkpoint("boot")}
}

// A fault right before the end is saved, however soon after another write.
func TestLastFaultIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := coretest.NewMachine(coretest.GPUs(2)), &store{}
		r := runWith(t, m, s).after(time.Minute)
		for _, xid := range []uint64{95, 79} {
			m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: xid})
			synctest.Wait()
		}
		must(t, r.stop())
		last := s.saved[len(s.saved)-1]
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
		for _, maintenance := range []bool{true, false} {
			if maintenance {
				must(t, r.quiesce(time.Time{}))
			} else if err := r.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			must(t, r.Save(t.Context()))
			if last := s.saved[len(s.saved)-1]; last.Maintenance.Since.IsZero() == maintenance {
				t.Errorf("maintenance %v: on disk is %+v", maintenance, last.Maintenance)
			}
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

// slow is a store on a disk whose writes take some time.
type slow struct {
	store
	takes time.Duration
}

func (s *slow) Save(r core.Checkpoint) error {
	time.Sleep(s.takes)
	return s.store.Save(r)
}

func TestSaveDoesNotWaitForADiskThatHangs(t *testing.T) {
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
