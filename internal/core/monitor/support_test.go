package monitor_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
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

// running is a monitor inside a synctest bubble: time passes only when all goroutines wait.
type running struct {
	t *testing.T
	*monitor.Monitor
	stop func() error
	seen []*inventory.Allocatable // every inventory that Watch yielded
	log  bytes.Buffer
}

// setup is what differs from a monitor with the default configuration.
type setup struct {
	store  monitor.Store
	config func(*core.Config)
	before func(*monitor.Monitor) // called before Run
}

// onGPUs runs test in a synctest bubble with a monitor on a machine with n GPUs.
func onGPUs(t *testing.T, n int, test func(*testing.T, *coretest.Machine, *running)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(n))
		test(t, m, run(t, m))
	})
}

func run(t *testing.T, m *coretest.Machine, change ...func(*core.Config)) *running {
	t.Helper()
	return start(t, m, setup{config: func(cfg *core.Config) {
		for _, c := range change {
			c(cfg)
		}
	}})
}

// runWith is run with a history.
func runWith(t *testing.T, m *coretest.Machine, history monitor.Store) *running {
	t.Helper()
	return start(t, m, setup{store: history})
}

func start(t *testing.T, m *coretest.Machine, s setup) *running {
	t.Helper()
	return startOn(t, m.Open, s)
}

func startOn(t *testing.T, open func() (monitor.Session, error), s setup) *running {
	t.Helper()
	cfg := core.DefaultConfig()
	if s.config != nil {
		s.config(&cfg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{t: t}
	r.Monitor = monitor.New(open, cfg, slog.New(slog.NewTextHandler(&r.log, nil)), s.store)
	if s.before != nil {
		s.before(r.Monitor)
	}
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	go func() {
		for inv := range r.Watch(ctx) {
			r.seen = append(r.seen, inv)
		}
	}()
	r.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
	return r
}

// logged checks how many times the log has a text.
func (r *running) logged(text string, want int) {
	r.t.Helper()
	if n := strings.Count(r.log.String(), text); n != want {
		r.t.Errorf("%q is in the log %d times, want %d:\n%s", text, n, want, r.log.String())
	}
}

// after lets time pass.
func (r *running) after(d time.Duration) *running {
	time.Sleep(d) // inside the bubble: fake time
	synctest.Wait()
	return r
}

func (r *running) healthOf(n int) health.Health {
	r.t.Helper()
	u, ok := r.Current().Unit(inventory.UnitID(coretest.GPU(n)))
	if !ok {
		r.t.Fatalf("GPU %d is not listed", n)
	}
	return u.Health
}

func (r *running) expect(what string, states map[int]health.State) {
	r.t.Helper()
	for n := range r.Current().Len() {
		if got := r.healthOf(n).State; got != states[n] {
			r.t.Errorf("%s: GPU %d is %v, want %v", what, n, got, states[n])
		}
	}
}

// xid is an XID of GPU n.
func xid(n int, code uint64) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.XID, Code: code}
}

// must fails the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// updates counts the changes that an orchestrator gets: whether a unit takes work, and its health.
func updates(seen []*inventory.Allocatable) (n int) {
	var last string
	for _, inv := range seen {
		var now string
		for u := range inv.Units() {
			now += fmt.Sprint(u.ID, u.Health.Schedulable(), u.Health.String())
		}
		if now != last {
			n++
		}
		last = now
	}
	return n
}

// setHost replaces what is known of the node, without what the CDI writer and the table of use set.
func setHost(m interface{ UpdateHost(func(*inventory.Host)) }, h inventory.Host) {
	m.UpdateHost(func(is *inventory.Host) {
		h.CDI, h.Occupied = is.CDI, is.Occupied
		*is = h
	})
}
