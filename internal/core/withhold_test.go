package core_test

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// A withheld unit is unhealthy with the reason, and can't be reserved. A unit with another reason keeps it. Other
// units and the original inventory are unchanged.
func TestWithhold(t *testing.T) {
	lost := core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.Lost}
	inv := core.Build(coretest.GPUs(3), core.Ledger{}.Apply(core.DefaultHealthPolicy(), testStart, lost), core.DefaultConfig())
	id := func(n int) core.UnitID { return core.UnitID(coretest.GPU(n)) }
	got := inv.Withhold(map[core.UnitID]string{id(0): "by pod a/b under nvidia.com/gpu", id(1): "by pod a/c under nvidia.com/gpu"})
	for n, want := range []core.Reason{core.ReasonHeld, core.ReasonLost, core.ReasonNone} {
		if u, _ := got.Unit(id(n)); u.Health.Reason != want {
			t.Errorf("GPU %d: %s, want %s", n, u.Health, want)
		}
	}
	u, _ := got.Unit(id(0))
	if text, want := u.Health.String(), "unhealthy: held (by pod a/b under nvidia.com/gpu); clears: the workload ends"; text != want {
		t.Errorf("%q, want %q", text, want)
	}
	if _, err := got.Reserve(id(0)); err == nil {
		t.Error("a device that is held is reserved")
	}
	if _, err := inv.Reserve(id(0)); err != nil {
		t.Errorf("the original has changed: %v", err)
	}
	if got := inv.Withhold(nil); got != inv {
		t.Error("withholding nothing makes another inventory")
	}
}

func TestUnitIDSplit(t *testing.T) {
	for id, want := range map[core.UnitID]struct {
		device core.DeviceID
		shared bool
	}{"GPU-1": {"GPU-1", false}, "GPU-1::12": {"GPU-1", true}, "MIG-2::0": {"MIG-2", true}, "": {"", false}} {
		if device, shared := id.Split(); device != want.device || shared != want.shared {
			t.Errorf("%q: %q %t", id, device, shared)
		}
	}
}
