package monitor_test

import (
	"testing"
	"testing/synctest"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A device is logged and counted once, whatever the number of its shares.
func TestSharesAreOneDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		share := func(n int) func(*core.Config) {
			return func(c *core.Config) {
				c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}}}
			}
		}
		transitions := func(r *running) {
			t.Helper()
			if n := r.Stats().Transitions; len(n) != 2 || n[coretest.GPU(0)] != 0 || n[coretest.GPU(1)] != 1 {
				t.Errorf("transitions: %v", n)
			}
		}
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, share(100))
		if n := r.Current().Len(); n != 200 {
			t.Errorf("%d units", n)
		}
		r.logged(`msg="device found"`, 2)
		r.logged(`pool=gpu.shared sharing="time-slicing by 100"`, 2)
		machine.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95})
		synctest.Wait()
		r.logged(`msg="device unhealthy" id=`+string(coretest.GPU(1))+" ", 1)
		transitions(r)
		next := core.DefaultConfig()
		share(50)(&next)
		must(t, r.ApplyPolicy(t.Context(), next))
		synctest.Wait()
		r.logged(`msg="device pool or sharing changed"`, 2)
		r.logged(`sharing="time-slicing by 50" was="gpu.shared time-slicing by 100"`, 2)
		r.logged(`msg="device gone"`, 0)
		r.logged("WITHDRAWN", 0)
		transitions(r)
	})
}
