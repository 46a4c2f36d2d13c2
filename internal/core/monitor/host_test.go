package monitor_test

import (
	"fmt"
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

// sharedByMPS offers every GPU twice by MPS, as pool "gpu.mps".
func sharedByMPS(c *core.Config) {
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}}}
}

// schedulable counts the units of an inventory that take work.
func schedulable(inv *inventory.Inventory) (n int) {
	for u := range inv.Units() {
		if u.Health.Schedulable() {
			n++
		}
	}
	return n
}

// A host that is set before Run counts from the first reading on: no unit is published as unhealthy because its MPS daemon has
// not been checked yet.
func TestHostSetBeforeRunCountsFromTheFirstReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, coretest.NewMachine(coretest.GPUs(2)), setup{config: sharedByMPS, before: func(m *monitor.Monitor) {
			m.SetHost(inventory.Host{})
			m.SetHost(inventory.Host{MPS: []string{"gpu.mps"}})
		}})
		for _, inv := range r.seen {
			if n := schedulable(inv); inv.Len() > 0 && (inv.Len() != 4 || n != 4) {
				t.Errorf("%d of %d units take work", n, inv.Len())
			}
		}
		if r.Current().Len() != 4 {
			t.Errorf("%d units", r.Current().Len())
		}
	})
}

func TestHostIsPublishedOnlyIfUnitsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, sharedByMPS)
		if n := schedulable(r.Current()); n != 0 {
			t.Errorf("%d units take work without an MPS daemon", n)
		}
		r.SetHost(inventory.Host{MPS: []string{"gpu.mps"}})
		synctest.Wait()
		if n := schedulable(r.Current()); n != 4 {
			t.Errorf("%d units take work", n)
		}
		published := len(r.seen)
		r.SetHost(inventory.Host{MPS: []string{"gpu.mps", "other.mps"}})
		r.after(time.Minute)
		if len(r.seen) != published || len(r.State().Host.MPS) != 2 {
			t.Errorf("%d needless publications; host %v", len(r.seen)-published, r.State().Host)
		}

		machine.FailOpen(gpu.ErrNoDriver) // it is applied without a session, too
		machine.FailSession(gpu.ErrDriverLost)
		r.after(time.Minute)
		r.SetHost(inventory.Host{})
		synctest.Wait()
		if len(r.State().Host.MPS) != 0 {
			t.Errorf("host %v", r.State().Host)
		}
	})
}

// Of many calls of SetHost the last one counts, and none blocks, during and after Run.
func TestSetHostNeverBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, coretest.NewMachine(coretest.GPUs(1)))
		for n := range 10_000 {
			r.SetHost(inventory.Host{MPS: []string{fmt.Sprint(n)}})
		}
		synctest.Wait()
		if got := r.State().Host.MPS; len(got) != 1 || got[0] != "9999" {
			t.Errorf("host: %v", got)
		}
		must(t, r.stop())
		r.SetHost(inventory.Host{})
		r.SetHost(inventory.Host{})
	})
}

// Policy warnings and overlaps are logged when they begin and when they end, whatever the driver does in between.
func TestWarningsAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, func(c *core.Config) {
			c.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{At: "policy.yaml:7: rules[0].select", Models: []string{"NVIDIA B200"}}}}
		})
		overlap := inventory.Host{Claims: []inventory.Claim{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(1))}}}
		for range 3 {
			r.SetHost(overlap)
			r.after(5 * time.Minute) // rescans
			machine.FailGPU(coretest.GPU(0), health.ProbeFailed)
			r.after(5 * time.Minute)
			machine.RecoverGPU(coretest.GPU(0))
			machine.FailSession(gpu.ErrDriverLost)
			r.after(5 * time.Minute)
			machine.FailSession(nil)
			r.after(5 * time.Minute)
		}
		other := coretest.GPUs(2)
		other.Devices[0].Model = "NVIDIA B200"
		machine.Set(other)
		r.SetHost(inventory.Host{})
		r.after(5 * time.Minute)
		for _, line := range []string{
			`level=ERROR msg="the policy does not match this node"`, `level=INFO msg="the policy matches this node again"`,
			`level=WARN msg="device is also offered by another agent"`, `level=INFO msg="device is no longer offered by another agent"`,
		} {
			r.logged(line, 1)
		}
	})
}
