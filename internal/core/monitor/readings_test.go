package monitor_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// caller calls Usage every second and waits for at most a second, as Nomad does.
type caller struct{ answers, failures int }

func (r *running) poll(ctx context.Context, c *caller) {
	for ctx.Err() == nil {
		bound, cancel := context.WithTimeout(ctx, time.Second)
		began := time.Now()
		if _, err := r.Usage(bound); err == nil {
			c.answers++
		} else {
			c.failures++
		}
		cancel()
		time.Sleep(time.Second - time.Since(began))
	}
}

// Usage that takes longer than the interval of its caller is returned, and no health check is skipped for it.
func TestSlowUsageIsReturnedAndDelaysNoCheck(t *testing.T) {
	for _, slow := range []time.Duration{1100 * time.Millisecond, 2500 * time.Millisecond, 3900 * time.Millisecond} {
		t.Run(slow.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(8))
				m.Delay("Usage", slow)
				r := run(t, m)
				ctx, cancel := context.WithCancel(t.Context())
				var c caller
				go r.poll(ctx, &c)
				before := m.Calls()
				r.after(10 * time.Minute)
				after := m.Calls()
				cancel()
				r.after(5 * time.Second)
				round := slow.Truncate(time.Second) + time.Second // the caller calls again at its next second
				if want := int(10 * time.Minute / round); c.answers < want*9/10 {
					t.Errorf("%d answers in ten minutes, want about %d; %d failures", c.answers, want, c.failures)
				}
				if n := after["Probe"] - before["Probe"]; n < 60 { // full readings include one, too
					t.Errorf("%d health checks in ten minutes", n)
				}
				if n := after["Usage"] - before["Usage"]; n > int(10*time.Minute/slow)+1 {
					t.Errorf("%d readings of usage in ten minutes", n)
				}
			})
		})
	}
}

// A check that is due precedes usage, also if callers for usage have waited for longer; usage is next.
func TestHealthCheckGoesBeforeUsage(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		r.after(3 * time.Second)
		m.Delay("Probe", 2*time.Second)
		event := xid(1, 95)
		before := m.Calls()
		m.SendEvent(event)
		r.after(time.Second) // a check is in progress
		go func() { _, _ = r.Usage(t.Context()) }()
		r.after(500 * time.Millisecond)
		m.SendEvent(event) // another is due
		for _, want := range []struct{ probes, usage int }{{2, 0}, {3, 1}} {
			r.after(time.Second)
			now := m.Calls()
			if n, u := now["Probe"]-before["Probe"], now["Usage"]-before["Usage"]; n > want.probes || u != want.usage {
				t.Errorf("%d checks and %d readings of usage, want %v", n, u, want)
			}
			r.after(time.Second)
		}
	})
}

// Events that make a check due all the time, of a driver whose checks are slow.
func TestStreamOfEventsDoesNotStarveUsage(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		m.Delay("Probe", 1500*time.Millisecond)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			for ctx.Err() == nil {
				m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(0))}) // requests a reading and a check
				time.Sleep(100 * time.Millisecond)
			}
		}()
		var answers int
		go func() {
			for ctx.Err() == nil {
				if _, err := r.Usage(ctx); err == nil {
					answers++
				}
				time.Sleep(time.Second)
			}
		}()
		before := m.Calls()
		r.after(10 * time.Minute)
		probes := m.Calls()["Probe"] - before["Probe"]
		cancel()
		r.after(5 * time.Second)
		if answers < 100 || probes < 300 {
			t.Errorf("%d answers and %d checks in ten minutes", answers, probes)
		}
	})
}

func TestCallersShareAReading(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		r.after(time.Second)
		m.Delay("Usage", time.Second)
		age := make(chan time.Duration, 52)
		ask := func() {
			usage, err := r.Usage(t.Context())
			if err != nil || len(usage) != 2 {
				t.Errorf("%v, %v", usage, err)
				return
			}
			age <- time.Since(usage[0].At)
		}
		for range 50 { // while the reading is in progress
			go ask()
			time.Sleep(10 * time.Millisecond)
		}
		r.after(time.Second)
		m.Delay("Usage", 0)
		ask()
		ask() // a finished reading
		for range cap(age) {
			if d := <-age; d > time.Second {
				t.Errorf("a number is %v old", d)
			}
		}
		if n := m.Calls()["Usage"]; n != 2 {
			t.Errorf("%d readings", n)
		}
		time.Sleep(time.Second)
		if _, err := r.Usage(t.Context()); err != nil || m.Calls()["Usage"] != 3 {
			t.Errorf("an old reading answers: %v, %v", err, m.Calls())
		}
	})
}

// While a call hangs, a caller calls each second for hours and gives up each time: that needs no memory, and when the call returns
// nothing is read for former callers.
func TestFormerCallersNeedNoMemory(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, m *coretest.Machine, r *running) {
		release := m.Hang("Probe", gpu.Node)
		r.after(time.Minute)
		heap := func() uint64 {
			runtime.GC()
			var s runtime.MemStats
			runtime.ReadMemStats(&s)
			return s.HeapAlloc
		}
		before, readings := heap(), m.Calls()["Usage"]
		const callers = 20_000
		for range callers {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := r.Usage(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			cancel()
		}
		if grown := int64(heap()) - int64(before); grown > 1<<20 {
			t.Errorf("%d bytes in use for %d callers", grown, callers)
		}
		release()
		r.after(time.Second)
		if n := m.Calls()["Usage"] - readings; n != 0 {
			t.Errorf("%d readings without a caller", n)
		}
	})
}

const uvm = "/dev/nvidia-uvm"

func passNodes(c *core.Config) { c.Injection.Nodes = true }

// withoutUVM is a snapshot of GPUs on a node where no CUDA program has run yet.
func withoutUVM(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Nodes = slices.DeleteFunc(s.Nodes, func(path string) bool { return path == uvm })
	return s
}

// inContainer reports whether a container of GPU 0 gets a node.
func (r *running) inContainer(path string) bool {
	r.t.Helper()
	plan, err := r.Current().Reserve(inventory.UnitID(coretest.GPU(0)))
	if err != nil {
		r.t.Fatal(err)
	}
	return slices.ContainsFunc(plan.Nodes, func(n inventory.DeviceNode) bool { return n.Path == path })
}

func TestNodeChangeCountsAtOnceWithoutADriverCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(withoutUVM(2))
		r := run(t, m, passNodes)
		r.after(11 * time.Second) // between readings and checks
		if r.inContainer(uvm) || !strings.Contains(r.healthOf(0).String(), "missing "+uvm) {
			t.Errorf("without the node: %s", r.healthOf(0))
		}
		release := m.Hang("Snapshot", gpu.Node) // without the driver
		defer release()
		before := m.Calls()
		m.Set(coretest.GPUs(2))
		synctest.Wait()
		if !r.inContainer(uvm) || r.healthOf(0).String() != "healthy" {
			t.Errorf("the node was created: %s", r.healthOf(0))
		}
		m.Set(withoutUVM(2))
		synctest.Wait()
		if r.inContainer(uvm) {
			t.Error("the node was removed and a container gets it")
		}
		m.LoseNodeEvents()
		m.Set(coretest.GPUs(2))
		r.after(5 * time.Second)
		if !r.inContainer(uvm) {
			t.Error("five seconds after the node was created, without an event of that, it is missing")
		}
		calls := m.Calls()
		delete(before, "Wait")
		for name, n := range before {
			if calls[name] != n {
				t.Errorf("%d calls of %s", calls[name]-n, name)
			}
		}
	})
}

// A reading that began before a node was created does not remove it.
func TestSlowReadingDoesNotRemoveANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(withoutUVM(1))
		r := run(t, m, passNodes)
		release := m.HangAfter("Snapshot", gpu.Node)
		r.after(61 * time.Second)
		m.Set(coretest.GPUs(1))
		r.after(time.Second)
		release()
		synctest.Wait()
		if !r.inContainer(uvm) {
			t.Error("the node is missing")
		}
	})
}

// A node that is created and removed every second changes inventories only as often as the GPUs are read.
func TestNodeThatFlapsMakesFewUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, m, passNodes)
		first := len(r.seen)
		for range 10 {
			before := len(r.seen)
			for range 60 {
				m.Set(withoutUVM(2))
				r.after(500 * time.Millisecond)
				m.Set(coretest.GPUs(2))
				r.after(500 * time.Millisecond)
			}
			if n := updates(r.seen[before:]); n > 4 {
				t.Errorf("%d updates in a minute", n)
			}
		}
		for _, inv := range r.seen[first:] {
			for u := range inv.Units() {
				if !u.Health.Schedulable() {
					t.Fatalf("a unit takes no work: %s", u.Health)
				}
			}
		}
		if n := strings.Count(r.log.String(), "device nodes missing"); n > 10 {
			t.Errorf("%d warnings in ten minutes", n)
		}
		r.logged("device healthy", 0)
	})
}

// An XID that the event wait returns after another call has ended the session counts, once:
//
//	reader  Probe .............. driver lost
//	waiter  Wait ........................ XID 48
func TestEventAtTheEndOfASession(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		r.after(time.Minute)
		m.Delay("Probe", 500*time.Millisecond)
		m.FailSession(gpu.ErrDriverLost)
		r.after(10*time.Second + 700*time.Millisecond)
		if r.Current().Driver().State == gpu.DriverReady {
			t.Fatal("the session has not ended")
		}
		m.SendEvent(xid(1, 48))
		m.FailSession(nil)
		r.after(time.Minute)
		r.expect("the next session", map[int]health.State{1: health.Unhealthy})
		if counts := r.faults(1); len(counts) != 1 || counts[0].Count != 1 {
			t.Errorf("%+v", counts)
		}
	})
}

// faults are the counts of the faults of GPU n.
func (r *running) faults(n int) []health.FaultCount {
	history, _ := r.State().Ledger.History(coretest.GPU(n))
	return history.FaultCounts
}
