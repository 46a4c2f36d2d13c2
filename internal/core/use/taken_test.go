package use_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// What runs on a GPU that the agent has taken for a proof is no process without a reservation, and the agent's own pod no holder. What it
// leaves behind is, when the GPU is given back. (Case 24.)
func TestProcessesOfAProof(t *testing.T) {
	free := gpus(t, coretest.GPUs(2))
	taken := free.WithHost(inventory.Host{Ownership: inventory.Ownership{
		GPUs: []inventory.GPUOwner{{GPU: coretest.GPU(0), API: inventory.DevicePlugin, Local: true, Taken: inventory.Proof}},
	}}, inventory.OverlapWarn)
	agent := pod("kube-system", "k8s-gpu", "uid-9")
	r := reading{inv: taken, percent: map[int]uint64{0: 100, 1: 0}, procs: map[int]int{7: 0, 8: 0}, owners: map[int]holders.Work{8: group(agent)}}
	var table use.Table
	for range 20 {
		table, r.at = table.Next(r.input()), r.at+3*time.Second
		d, _ := table.Device(coretest.GPU(0))
		if len(d.Processes) != 2 || len(d.Unreserved()) > 0 || len(d.Holders) > 0 || !d.IdleSince.IsZero() || table.Occupied(taken) != nil {
			t.Fatalf("at %v: %+v", r.at, d)
		}
	}
	r.inv, r.record, r.procs = free, record(), map[int]int{7: 0}
	for _, want := range []int{0, 0, 1} { // a reading or two after the end may have what has just ended
		table, r.at = table.Next(r.input()), r.at+3*time.Second
		if got := table.Occupied(free); len(got) != want {
			t.Errorf("given back, at %v: %v, want %d", r.at, got, want)
		}
	}
}
