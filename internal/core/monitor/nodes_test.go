package monitor_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const uvm = "/dev/nvidia-uvm"

func passNodes(c *core.Config) { c.DeviceNodes = true }

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

func TestNodeChangeCountsWithinASecondWithoutADriverCall(t *testing.T) {
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
		r.after(time.Second)
		if !r.inContainer(uvm) || r.healthOf(0).String() != "healthy" {
			t.Errorf("a second after the node was created: %s", r.healthOf(0))
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
