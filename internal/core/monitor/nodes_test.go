package monitor_test

import (
	"bytes"
	"context"
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

const uvm = "/dev/nvidia-uvm"

func passNodes(c *core.Config) { c.DeviceNodes = true }

// withoutUVM is a reading of GPUs on a host where no CUDA program has run yet.
func withoutUVM(n int) core.Snapshot {
	s := coretest.GPUs(n)
	s.Nodes = slices.DeleteFunc(s.Nodes, func(path string) bool { return path == uvm })
	return s
}

// inContainer reports whether a container of GPU 0 gets a node.
func (r *running) inContainer(path string) bool {
	r.t.Helper()
	plan, err := r.Current().Reserve(core.UnitID(coretest.GPU(0)))
	if err != nil {
		r.t.Fatal(err)
	}
	return slices.ContainsFunc(plan.Nodes, func(n core.DeviceNode) bool { return n.Path == path })
}

func TestNodeThatIsCreatedOrRemovedCountsWithinASecondWithoutADriverCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(withoutUVM(2))
		r := run(t, m, passNodes)
		r.after(11 * time.Second) // between readings and checks
		if r.inContainer(uvm) || !strings.Contains(r.health(0).String(), "missing "+uvm) {
			t.Errorf("without the node: %s", r.health(0))
		}
		release := m.Hang("Snapshot", core.Node) // and it does not depend on the driver
		defer release()
		before := m.Calls()
		m.Set(coretest.GPUs(2))
		r.after(time.Second)
		if !r.inContainer(uvm) || r.health(0).String() != "healthy" {
			t.Errorf("a second after the node was created: %s", r.health(0))
		}
		m.Set(withoutUVM(2))
		r.after(time.Second)
		if r.inContainer(uvm) {
			t.Error("a second after the node was removed a container gets it")
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

// A reading that began before a node was created does not take it back.
func TestSlowReadingDoesNotTakeANodeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(withoutUVM(1))
		r := run(t, m, passNodes)
		release := m.HangAfter("Snapshot", core.Node)
		r.after(61 * time.Second)
		m.Set(coretest.GPUs(1))
		r.after(time.Second)
		release()
		synctest.Wait()
		if !r.inContainer(uvm) {
			t.Error("the node is gone")
		}
	})
}

// A node that comes and goes twice a second: the orchestrators hear of it as often as the machine is read.
func TestNodeThatComesAndGoesMakesFewUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		m := coretest.NewMachine(coretest.GPUs(2))
		cfg := core.DefaultConfig()
		passNodes(&cfg)
		mon := monitor.New(m.Open, cfg, slog.New(slog.NewTextHandler(&log, nil)), nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- mon.Run(ctx) }()
		var seen []*core.Inventory
		go func() {
			for inv := range mon.Watch(ctx) {
				seen = append(seen, inv)
			}
		}()
		synctest.Wait()
		for range 10 {
			before := len(seen)
			for range 60 {
				m.Set(withoutUVM(2))
				time.Sleep(500 * time.Millisecond)
				m.Set(coretest.GPUs(2))
				time.Sleep(500 * time.Millisecond)
			}
			synctest.Wait()
			if n := updates(seen[before:]); n > 4 {
				t.Errorf("%d updates in a minute", n)
			}
		}
		for _, inv := range seen[2:] {
			for u := range inv.Units() {
				if !u.Health.Schedulable() {
					t.Fatalf("a unit takes no work: %s", u.Health)
				}
			}
		}
		if n := strings.Count(log.String(), "device nodes are missing"); n > 10 || strings.Contains(log.String(), "device healthy") {
			t.Errorf("%d warnings in ten minutes:\n%s", n, log.String())
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
