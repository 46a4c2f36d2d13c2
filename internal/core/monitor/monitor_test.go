package monitor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// running is a monitor inside a synctest bubble: time passes only when all goroutines wait.
type running struct {
	t *testing.T
	*monitor.Monitor
	stop func() error
	seen []*core.Inventory // every inventory that Watch yielded
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
	cfg := core.DefaultConfig()
	if s.config != nil {
		s.config(&cfg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{t: t}
	r.Monitor = monitor.New(m.Open, cfg, slog.New(slog.NewTextHandler(&r.log, nil)), s.store)
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

func (r *running) health(n int) core.Health {
	r.t.Helper()
	u, ok := r.Current().Unit(core.UnitID(coretest.GPU(n)))
	if !ok {
		r.t.Fatalf("GPU %d is not listed", n)
	}
	return u.Health
}

func (r *running) expect(what string, states map[int]core.HealthState) {
	r.t.Helper()
	for n := range r.Current().Len() {
		if got := r.health(n).State; got != states[n] {
			r.t.Errorf("%s: GPU %d is %v, want %v", what, n, got, states[n])
		}
	}
}

func TestLostGPUTurnsUnhealthyAloneAndComesBack(t *testing.T) {
	onGPUs(t, 8, func(t *testing.T, m *coretest.Machine, r *running) {
		r.expect("start", nil)
		m.FailGPU(coretest.GPU(3), core.Lost)
		r.after(10*time.Second).expect("one probe later", map[int]core.HealthState{3: core.GPULost})
		r.after(10*time.Minute).expect("later", map[int]core.HealthState{3: core.GPULost})
		m.RecoverGPU(coretest.GPU(3))
		r.after(50*time.Second).expect("it answers, but not for long enough", map[int]core.HealthState{3: core.Unhealthy})
		r.after(time.Minute).expect("restored", nil)
		if n := len(r.seen); n > 5 {
			t.Errorf("%d inventories published, want pending, ready, lost, unhealthy, back", n)
		}
	})
}

func TestNothingIsPublishedWhileNothingChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, coretest.NewMachine(coretest.GPUs(8)))
		before := len(r.seen)
		r.after(time.Hour)
		if len(r.seen) != before {
			t.Errorf("%d needless publications", len(r.seen)-before)
		}
	})
}

func TestXIDCountsImmediately(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		m.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 48})
		m.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(0)), Kind: core.XID, Code: 31})
		synctest.Wait() // no time passes
		r.expect("XID 48 on 1, application XID 31 on 0", map[int]core.HealthState{1: core.Unhealthy})
		if h := r.health(1); h.Reason != core.ReasonXID || h.Code != 48 {
			t.Errorf("health: %v", h)
		}
	})
}

func TestDriverComesLateGoesAndReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(fmt.Errorf("libnvidia-ml.so.1 not found: %w", core.ErrNoDriver))
		r := run(t, m)
		if d := r.Current().Driver(); d.State != core.DriverAbsent || r.Current().Len() != 0 {
			t.Fatalf("without a library: %+v", d)
		}
		if _, err := r.Usage(t.Context()); !errors.Is(err, core.ErrNoDriver) {
			t.Errorf("Usage without a driver: %v", err)
		}
		r.after(24 * time.Hour)
		if calls := m.Calls()["Open"]; calls > 24*3600/5 {
			t.Errorf("opened %d times in a day", calls)
		}
		m.FailOpen(nil)
		r.after(20*time.Second).expect("late driver", nil)
		if r.Current().Len() != 2 {
			t.Fatalf("%d units", r.Current().Len())
		}

		m.FailOpen(core.ErrNoDriver)
		m.FailSession(core.ErrDriverLost)
		r.after(11*time.Second).expect("driver gone: units stay", map[int]core.HealthState{0: core.Unknown, 1: core.Unknown})
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
		m.FailOpen(core.ErrNoDriver)
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
		m.FailSession(core.ErrDriverLost)
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
		m.FailSession(core.ErrDriverStale)
		if err := <-done; !errors.Is(err, core.ErrDriverStale) {
			t.Errorf("Run returned %v", err)
		}
		if u, _ := mon.Current().Unit(core.UnitID(coretest.GPU(0))); u.Health.Schedulable() {
			t.Errorf("offered with a stale driver: %v", u.Health)
		}
	})
}

// A hung call: that GPU is unhealthy, the others are not, reservations and shutdown go on.
func TestHungCall(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Probe", core.WholeGPU(coretest.GPU(2)))
		r.after(71*time.Second).expect("hung", map[int]core.HealthState{2: core.Unhealthy})
		if h := r.health(2); h.Reason != core.ReasonUnresponsive || h.Detail != "nvmlProbe" {
			t.Errorf("health: %v", h)
		}
		if _, err := r.Current().Reserve(core.UnitID(coretest.GPU(0))); err != nil {
			t.Errorf("neighbour: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Usage(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Usage: %v", err)
		}
		m.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(0)), Kind: core.XID, Code: 79})
		synctest.Wait()
		r.expect("events arrive all the same", map[int]core.HealthState{0: core.GPULost, 2: core.Unhealthy})
		release()
		r.after(2*time.Minute).expect("released", map[int]core.HealthState{0: core.Unhealthy})
	})
}

func TestStopsInTimeWhateverHangs(t *testing.T) {
	for _, method := range []string{"Open", "Snapshot", "Probe", "Wait", "Close"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				release := m.Hang(method, core.Node)
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
		release := m.Hang("Open", core.Node)
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
		m.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 48})
		r.after(time.Second).expect("events again", map[int]core.HealthState{1: core.Unhealthy})
	})
}

// Callers of Usage that wait when the session ends get an error, with or without a deadline of their own.
func TestUsageIsAnsweredWhenTheSessionEnds(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Usage", core.Node)
		answered := make(chan error, 2)
		for range 2 { // one reading is in progress, one waits
			go func() { _, err := r.Usage(context.Background()); answered <- err }()
			synctest.Wait()
		}
		m.FailOpen(core.ErrNoDriver)
		go func() { _ = r.stop() }()
		for range 2 {
			if err := <-answered; !errors.Is(err, core.ErrNoDriver) {
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
		replaced.Devices[1].ID, replaced.Devices[1].At = "GPU-new", core.WholeGPU("GPU-new")
		m.Set(replaced)
		r.after(time.Minute)
		if h := r.health(1); r.Current().Len() != 3 || h.Reason != core.ReasonWithdrawn {
			t.Fatalf("%d units, old one %v", r.Current().Len(), h)
		}
		r.after(3 * time.Second)
		if _, ok := r.Current().Unit(core.UnitID(coretest.GPU(1))); ok {
			t.Error("still listed")
		}
	})
}

// A GPU that is lost and returns a hundred times a minute causes few updates of an orchestrator, and takes no work.
func TestFlapsAreDamped(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		flap := core.WholeGPU(coretest.GPU(1))
		for minute := range 10 {
			before := len(r.seen)
			for range 100 {
				m.FailGPU(flap.GPU, core.Lost)
				m.SendEvent(core.Observation{At: flap}) // an event, so that the GPU is checked
				r.after(300 * time.Millisecond)
				m.RecoverGPU(flap.GPU)
				m.SendEvent(core.Observation{At: flap})
				r.after(300 * time.Millisecond)
				if r.health(1).Schedulable() {
					t.Fatal("a GPU that flaps takes work")
				}
			}
			if n := updates(r.seen[before:]); n > 4 {
				t.Errorf("minute %d: %d updates", minute, n)
			}
		}
	})
}

// updates counts the changes that an orchestrator gets: whether a unit takes work, and its health.
func updates(seen []*core.Inventory) (n int) {
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
		m.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 95})
		synctest.Wait()
		if n := m.Calls()["Probe"] - before; n != 1 {
			t.Errorf("%d checks immediately after an XID, want 1", n)
		}
	})
}

// must fails the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
