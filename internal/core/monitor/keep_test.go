package monitor_test

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// store notes what it is given, and gives the latest.
type store struct{ saved []core.Record }

func (s *store) Load() (core.Record, string) {
	if s.saved == nil {
		return core.Record{}, "boot"
	}
	return s.saved[len(s.saved)-1], "boot"
}

func (s *store) Save(r core.Record) { s.saved = append(s.saved, r) }

// hung is a history on a disk that does not answer.
type hung struct {
	store
	answer chan struct{}
}

func (h *hung) Load() (core.Record, string) {
	<-h.answer
	return h.store.Load()
}

func TestDiskThatHangsKeepsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hung{answer: make(chan struct{})}
		r := runWith(t, coretest.NewMachine(coretest.GPUs(2)), h)
		r.after(4*time.Second).expect("without its history", nil)
		if r.Current().Len() != 2 {
			t.Errorf("%d units", r.Current().Len())
		}
		r.after(time.Minute)
		late := r.Pulse().Late(time.Now())
		if len(late) != 1 || late[0].Name != "history" {
			t.Errorf("late: %v", late)
		}
		close(h.answer)
		r.after(time.Hour)
		if len(h.saved) != 0 {
			t.Error("the history that was not read was overwritten")
		}
	})
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
		if last.Boot != "boot" {
			t.Errorf("boot id %q", last.Boot)
		}
	})
}
