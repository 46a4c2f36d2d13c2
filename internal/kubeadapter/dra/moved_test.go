package dra

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// moved returns the inventory of a node with device plugins whose GPUs have moved to DRA.
func moved(s gpu.Snapshot, change ...func(*core.Config)) *inventory.Allocatable {
	c := core.DefaultConfig()
	for _, f := range change {
		f(&c)
	}
	inv, owners := core.Build(s, health.Ledger{}, c).WithoutHost(), inventory.Ownership{}
	for _, d := range s.Devices {
		owners.GPUs = append(owners.GPUs, inventory.GPUOwner{GPU: d.ID, API: inventory.DRA, Local: true})
	}
	return inv.WithHost(inventory.Host{CDI: specOf(inv, s), Ownership: owners}, inventory.OverlapRefuse)
}

// Device plugins may name devices by index. A claim never has such a name, because its containers get it until the claim ends: with a GPU
// less the same index would be another GPU, which another claim has.
func TestClaimOfAMovedGPUIsNamedByUUID(t *testing.T) {
	byIndex := func(c *core.Config) { c.IndexIDs = true }
	r := newRig(t, moved(coretest.GPUs(3), byIndex))
	names := map[string]string{}
	prepare := func(claim string, id gpu.DeviceID) {
		r.api.put(newClaim(claim, result(id)))
		for _, name := range r.mustPrepare(claim)[0].GetCdiDeviceIds() {
			if other := names[name]; other != "" {
				t.Errorf("claims %s and %s have the CDI name %s", other, claim, name)
			}
			names[name] = claim
		}
	}
	prepare("a", coretest.GPU(1))
	left := coretest.GPUs(3)
	left.Devices = append(left.Devices[:0:0], left.Devices[1:]...)
	for i := range left.Devices {
		left.Devices[i].Index = i
	}
	r.src.Set(moved(left, byIndex))
	prepare("b", coretest.GPU(2))
	for _, id := range []gpu.DeviceID{coretest.GPU(1), coretest.GPU(2)} {
		if names["k8s.device-plugin.nvidia.com/gpu="+string(id)] == "" {
			t.Errorf("%v lacks %s", names, id)
		}
	}
}
