package inventory_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A GPU is offered with all its instances through the API that has it; one that another agent has is left out, and no longer
// recorded; one that moves stays listed and takes no work.
func TestOwnership(t *testing.T) {
	c := core.DefaultConfig()
	c.MIG, c.API = inventory.MIGMixed, inventory.DRA
	inv := core.Build(coretest.WithMIG(coretest.GPUs(4), 3, "1g.10gb", "1g.10gb"), health.Ledger{}, c).WithoutHost()
	got := inv.WithHost(inventory.Host{Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{
		{GPU: coretest.GPU(0), API: inventory.DevicePlugin, Local: true, Pending: "to dra"},
		{GPU: coretest.GPU(1), API: inventory.DevicePlugin, Local: true},
		{GPU: coretest.GPU(2), API: inventory.DRA, Local: true, Taken: inventory.Proof},
		{GPU: coretest.GPU(3), API: inventory.Nomad},
	}}}, inventory.OverlapWarn)
	seen := map[gpu.DeviceID]string{}
	for u := range got.Units() {
		seen[u.Device.ID] = string(u.API) + " " + u.Health.String()
	}
	want := map[gpu.DeviceID]string{
		coretest.GPU(0): "device-plugin unhealthy: moves (to dra); cleared by: the end of the move",
		coretest.GPU(1): "device-plugin healthy",
		coretest.GPU(2): "dra unknown: withheld for a proof for a short time; cleared by: the end of the proof",
	}
	for id, text := range want {
		if !strings.HasPrefix(seen[id], text) {
			t.Errorf("%s: %s, want %s", id, seen[id], text)
		}
	}
	if len(seen) != len(want) {
		t.Errorf("units of %v", seen)
	}
	var excluded []string
	for _, e := range got.Excluded() {
		if e.Failure != gpu.NotFailed {
			t.Errorf("%+v counts as unreadable, so it stays recorded", e)
		}
		excluded = append(excluded, e.At.String()+": "+e.Reason)
	}
	if text := strings.Join(excluded, "\n"); len(excluded) != 2 || strings.Count(text, ": offered through nomad") != 2 {
		t.Errorf("excluded: %q", text)
	}
	if all := got.GPUs(); !slices.Equal(all, inv.GPUs()) || len(all) != 4 {
		t.Errorf("GPUs: %v, without owners %v", all, inv.GPUs())
	}
	if at, ok := got.Placements()[coretest.Instance(3, 1)]; !ok || at.GPU != coretest.GPU(3) {
		t.Errorf("the instance is at %v, %v", at, ok)
	}
	if got.Equal(inv) || got.Equal(inv.WithHost(inventory.Host{}, inventory.OverlapWarn)) {
		t.Error("equality does not follow the owners")
	}
	required := inv.WithHost(inventory.Host{Ownership: inventory.Ownership{Required: true}}, inventory.OverlapWarn)
	for u := range required.Units() {
		if u.Health.Reason != health.ReasonMoving {
			t.Errorf("%s is %s although it is not known which API has it", u.ID, u.Health)
		}
	}
}

// Work that was placed on a GPU before it began to leave gets it, whatever the work tolerates. On a GPU that has not arrived it does not:
// another agent's work may have it.
func TestReserveOfAGPUThatLeaves(t *testing.T) {
	c := core.DefaultConfig()
	c.API, c.Injection = inventory.DRA, inventory.Injection{CDI: inventory.CDIRequired}
	defined := &inventory.CDI{Kind: "k/gpu", Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}}
	inv := core.Build(coretest.GPUs(2), health.Ledger{}, c).WithHost(inventory.Host{CDI: defined, Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{
		{GPU: coretest.GPU(0), API: inventory.DRA, Local: true, Pending: "to nomad", Draining: true},
		{GPU: coretest.GPU(1), API: inventory.DRA, Local: true, Pending: "to dra: waits for nomad-gpu, which offers it, to give it up"},
	}}}, inventory.OverlapWarn)
	for _, tolerates := range []bool{false, true} {
		may := func(inventory.Unit, health.Health) bool { return tolerates }
		if _, err := inv.ReserveTolerated(may, inventory.UnitID(coretest.GPU(0))); err != nil {
			t.Errorf("a GPU that leaves, tolerated: %v: %v", tolerates, err)
		}
		if _, err := inv.ReserveTolerated(may, inventory.UnitID(coretest.GPU(1))); err == nil {
			t.Errorf("a GPU that has not arrived is given out, tolerated: %v", tolerates)
		}
	}
	if _, err := inv.Reserve(inventory.UnitID(coretest.GPU(0))); err == nil {
		t.Error("Reserve gives out a GPU that leaves")
	}
}

// What work has is known by its device also where the policy does not offer it, or offers another device of the same hardware.
func TestHardwareIsWhatTheDriverLists(t *testing.T) {
	inv := inventory.Build(inventory.Input{
		Snapshot: coretest.WithMIG(coretest.GPUs(3), 2, "3g.40gb"),
		Config:   inventory.Config{MIG: inventory.MIGNone, Exclude: []gpu.DeviceID{coretest.GPU(1)}},
	}).WithoutHost()
	for device, want := range map[gpu.DeviceID]gpu.DeviceID{
		coretest.GPU(0): coretest.GPU(0), coretest.GPU(1): coretest.GPU(1), coretest.Instance(2, 0): coretest.GPU(2), coretest.Instance(2, 1): "", "GPU-x": "",
	} {
		if at, ok := inv.Placements()[device]; at.GPU != want || ok != (want != "") {
			t.Errorf("%s is at %v, %v", device, at, ok)
		}
	}
	for at, want := range map[gpu.Placement]bool{
		gpu.WholeGPU(coretest.GPU(1)): true, gpu.WholeGPU(coretest.GPU(2)): false, gpu.WholeGPU("GPU-x"): false,
		{GPU: coretest.GPU(2), GI: 1}: true, {GPU: coretest.GPU(2), GI: 2}: false, {GPU: coretest.GPU(1), GI: 1}: false,
	} {
		if got := inv.Exists(at); got != want {
			t.Errorf("%s exists: %v", at, got)
		}
	}
}

// While the driver is released for a reset every unit that would take work is withheld. One that takes none for another reason keeps that, and none is given
// out to work that tolerates the reason, or that was placed on a GPU before it began to leave.
func TestUnitsWhileTheDriverIsReleased(t *testing.T) {
	c := core.DefaultConfig()
	c.API = inventory.DRA
	failed := health.Ledger{}.ProofFailed(health.DefaultPolicy(), time.Now(), coretest.GPU(4), health.ProofFailure{State: health.Unhealthy})
	defined := &inventory.CDI{Kind: "k/gpu"}
	proofs := &inventory.Proofs{Withheld: map[gpu.DeviceID]string{}}
	for n := range 6 {
		defined.Defined = append(defined.Defined, coretest.GPU(n))
		proofs.Withheld[coretest.GPU(n)] = ""
	}
	proofs.Withheld[coretest.GPU(1)] = "new"
	host := inventory.Host{
		CDI: defined, Proofs: proofs, Occupied: []inventory.Occupied{{Device: coretest.GPU(2), Detail: "PID 1"}},
		Ownership: inventory.Ownership{DriverReleased: coretest.GPU(5), GPUs: []inventory.GPUOwner{
			{GPU: coretest.GPU(3), API: inventory.DRA, Local: true, Pending: "to nomad", Draining: true},
			{GPU: coretest.GPU(5), API: inventory.DRA, Local: true, Taken: inventory.Reset},
		}},
	}
	base := core.Build(coretest.GPUs(6), failed, c)
	got := base.WithHost(host, inventory.OverlapWarn)
	if got.ResetOf() != coretest.GPU(5) {
		t.Errorf("for the reset of %q", got.ResetOf())
	}
	for n, want := range []health.Reason{
		health.ReasonResetting, health.ReasonProving, health.ReasonOccupied, health.ReasonMoving, health.ReasonProofFailed, health.ReasonResetting,
	} {
		id := inventory.UnitID(coretest.GPU(n))
		if u, _ := got.Unit(id); u.Health.Reason != want || u.Health.Schedulable() {
			t.Errorf("GPU %d: %s, want %s", n, u.Health, want)
		}
		tolerates := func(inventory.Unit, health.Health) bool { return true }
		if _, err := got.ReserveTolerated(tolerates, id); err == nil || !strings.Contains(err.Error(), "the reset of a GPU") {
			t.Errorf("GPU %d: reserved: %v", n, err)
		}
	}
	host.Ownership.DriverReleased = ""
	after := base.WithHost(host, inventory.OverlapWarn)
	if u, _ := after.Unit(inventory.UnitID(coretest.GPU(0))); !u.Health.Schedulable() || after.Equal(got) {
		t.Errorf("after it: %s", u.Health)
	}
	h := health.New(health.ReasonResetting, "")
	if health.RepairOf("RESETTING") != health.NoRepair || h.Tolerable() || h.State >= health.Unhealthy || !h.Reason.OfUnit() {
		t.Errorf("RESETTING is a fault: %+v", h)
	}
}
