package dra

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// A GPU that another agent of the node offered first gets no claim, whatever that tolerates, and has a taint, as the device plugin lists it as
// unhealthy. A claim that has one is not affected. A GPU that this agent offered first, and with overlap = warn any, is given out.
func TestGPUThatAnotherAgentOffers(t *testing.T) {
	ready := build(coretest.GPUs(3), health.Ledger{}, config())
	claimedBy := func(older bool, mode inventory.OverlapMode) *inventory.Allocatable {
		var claims []inventory.PeerDevice
		for i := range 2 {
			claims = append(claims, inventory.PeerDevice{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(i)), Earlier: older})
		}
		return ready.WithHost(inventory.Host{CDI: ready.CDI(), Peers: claims}, mode)
	}
	everything := func(r *kubeapi.DeviceRequestAllocationResult) {
		r.Tolerations = []kubeapi.DeviceToleration{{Operator: "Exists"}}
	}
	r := newRig(t, ready)
	for i, name := range []string{"running", "next", "free"} {
		r.api.put(newClaim(name, result(coretest.GPU(i), everything)))
	}
	before := r.mustPrepare("running")

	r.src.Set(claimedBy(true, inventory.OverlapRefuse))
	r.await("taints", func() bool { return r.taintsOf(deviceName(coretest.GPU(1))) == "contested" })
	r.mustRefuse("next", "offered by another agent (nomad-gpu)")
	if again := r.mustPrepare("running"); again[0].String() != before[0].String() {
		t.Errorf("a running claim: %v", again)
	}
	for _, h := range r.adapter.Health().Load() {
		if h.Status != resourceslice.StatusHealthy {
			t.Errorf("%+v: what runs is not concerned", h)
		}
	}
	r.mustPrepare("free")
	r.must(r.unprepare("running"))

	for _, inv := range []*inventory.Allocatable{claimedBy(false, inventory.OverlapRefuse), claimedBy(true, inventory.OverlapWarn)} { // here first; warn
		r.src.Set(inv)
		r.await("no taints", func() bool { return r.taintsOf(deviceName(coretest.GPU(1))) == "" })
		r.mustPrepare("next")
		r.must(r.unprepare("next"))
		r.src.Set(claimedBy(true, inventory.OverlapRefuse))
		r.await("taints", func() bool { return r.taintsOf(deviceName(coretest.GPU(1))) == "contested" })
	}
}
