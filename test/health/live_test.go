package health

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// live is a machine followed by the monitor, in real time.
type live struct {
	*simdriver.Machine
	*monitor.Monitor
	t       testing.TB
	session atomic.Pointer[nvidia.Session] // the latest
	stop    func() error                   // ends Run and says how it ended

	mu   sync.Mutex
	told []publication
}

// hasty is a policy whose every wait is short.
func hasty(c *core.Config) {
	c.Probe, c.Rescan = 50*time.Millisecond, 500*time.Millisecond
	p := &c.Health
	p.CallDeadline, p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell = 500*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond
	p.MaxRecoveries = 100
}

// follow runs a monitor until the test ends.
func follow(t testing.TB, m *simdriver.Machine, tune ...func(*core.Config)) *live {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Roots = inventory.MIGMixed, rootsOf(m)
	for _, f := range tune {
		f(&cfg)
	}
	f := &live{Machine: m, t: t}
	f.Monitor = monitor.New(func() (monitor.Session, error) {
		s, err := nvidia.Open(nvidia.Options{Roots: cfg.Roots, Deadline: 50 * time.Millisecond})
		if err != nil {
			return nil, err // not a nil *Session in an interface
		}
		f.session.Store(s)
		return s, nil
	}, cfg, slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var watching sync.WaitGroup
	go func() { ended <- f.Run(ctx) }()
	watching.Go(func() {
		for inv := range f.Watch(ctx) {
			f.mu.Lock()
			f.told = append(f.told, publication{time.Now(), inv})
			f.mu.Unlock()
		}
	})
	f.stop = sync.OnceValue(func() error { cancel(); watching.Wait(); return <-ended })
	t.Cleanup(func() {
		must(t, m.Heal())
		if s := f.session.Load(); s != nil {
			until(t, "no call is in the driver", func() bool { return len(s.Busy()) == 0 })
		}
		if err := f.stop(); err != nil {
			t.Error("monitor:", err)
		}
	})
	return f
}

// until waits for an inventory.
func (f *live) until(what string, ok func(*inventory.Inventory) bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	for inv := range f.Watch(ctx) {
		if ok(inv) {
			return
		}
	}
	f.t.Errorf("never %s; last: driver %+v", what, f.Current().Driver())
	for u := range f.Current().Units() {
		f.t.Logf("%s: %s", u.ID, u.Health)
	}
	f.t.FailNow()
}

// all says whether there are n units, all in a state.
func (f *live) all(state health.State, n int) func(*inventory.Inventory) bool {
	return func(inv *inventory.Inventory) bool {
		for u := range inv.Units() {
			if u.Health.State != state {
				return false
			}
		}
		return inv.Len() == n
	}
}

// only says whether the GPU in a slot has a state and a cause, and all others are well.
func (f *live) only(slot int, state health.State, cause string) func(*inventory.Inventory) bool {
	id := inventory.UnitID(f.UUID(slot))
	return func(inv *inventory.Inventory) bool {
		found := false
		for u := range inv.Units() {
			switch {
			case u.ID == id:
				found = u.Health.State == state && u.Health.Cause() == cause
			case u.Health.State != health.Healthy:
				return false
			}
		}
		return found
	}
}

// since are the publications from a time on.
func (f *live) since(t time.Time) (p []publication) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, told := range f.told {
		if told.at.After(t) {
			p = append(p, told)
		}
	}
	return p
}
