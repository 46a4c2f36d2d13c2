package dra

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// time0 is when the faults of tests began.
var time0 = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

// An exclusive device excludes everything on its hardware, a share only what is not a share of the same device in the same way.
func TestConflict(t *testing.T) {
	whole := prepared.Result{Device: deviceName(coretest.GPU(0)), Unit: inventory.UnitID(coretest.GPU(0)), At: gpu.WholeGPU(coretest.GPU(0)), Exclusive: true}
	instance := func(i uint32) prepared.Result {
		id := coretest.Instance(0, int(i))
		return prepared.Result{Device: deviceName(id), Unit: inventory.UnitID(id), At: gpu.Placement{GPU: coretest.GPU(0), GI: i + 1}, Exclusive: true}
	}
	share := func(sharing string, n int) prepared.Result {
		r := whole
		r.Exclusive, r.Sharing, r.Shares, r.Unit = false, sharing, n, r.Unit+"::0"
		return r
	}
	named := func(n string) prepared.Result {
		r := share("mps", 1)
		r.Device, r.Unit = r.Device+"-s"+n, inventory.UnitID(string(coretest.GPU(0))+"::"+n)
		return r
	}
	admin := whole
	admin.Admin = true
	moved := instance(0)
	moved.At.GI = 7
	other := whole
	other.Device, other.Unit, other.At = deviceName(coretest.GPU(1)), inventory.UnitID(coretest.GPU(1)), gpu.WholeGPU(coretest.GPU(1))
	for name, c := range map[string]struct {
		want, held prepared.Result
		conflict   bool
	}{
		"the same GPU":                         {whole, whole, true},
		"another GPU":                          {whole, other, false},
		"GPU, of which an instance is held":    {whole, instance(0), true},
		"instance of a GPU that is held":       {instance(0), whole, true},
		"two instances":                        {instance(0), instance(1), false},
		"admin access beside a holder":         {admin, whole, false},
		"holder beside admin access":           {whole, admin, false},
		"share of a GPU that is held":          {share("mps", 1), whole, true},
		"GPU of which a share is held":         {whole, share("mps", 1), true},
		"two shares":                           {share("mps", 1), share("mps", 1), false},
		"shares of different kinds":            {share("mps", 1), share("time-slicing", 1), true},
		"the last share":                       {share("mps", 1), share("mps", 3), false},
		"more shares than there are":           {share("mps", 2), share("mps", 3), true},
		"two shares as devices":                {named("0"), named("1"), false},
		"one share as a device":                {named("0"), named("0"), true},
		"instance of the same ID":              {instance(0), moved, true},
		"share as a device, and one by number": {named("0"), share("mps", 1), false},
		"one share as a device too many":       {named("0"), share("mps", 4), true},
	} {
		w := want{Result: c.want}
		if !c.want.Exclusive {
			w.replicas = 4
		}
		held := prepared.Claim{UID: "b", BootID: boot, Namespace: "ns", Name: "b", Results: []prepared.Result{c.held}}
		err := conflict(w, holders.NewSet(heldBy(claimsBeside("a", boot, []prepared.Claim{held}))))
		if (err != nil) != c.conflict {
			t.Errorf("%s: %v", name, err)
		}
		held.BootID = "boot-0"
		if err := conflict(w, holders.NewSet(heldBy(claimsBeside("a", boot, []prepared.Claim{held})))); err != nil {
			t.Errorf("%s: a claim of another boot: %v", name, err)
		}
		held.BootID = boot
		if err := conflict(w, holders.NewSet(heldBy(claimsBeside("b", boot, []prepared.Claim{held})))); err != nil {
			t.Errorf("%s: the claim itself: %v", name, err)
		}
		if free := isFree(holders.NewSet(heldBy([]prepared.Claim{held})), c.held.At); free != c.held.Admin {
			t.Errorf("%s: free %t", name, free)
		}
	}
}
