// Package placement shows which GPUs a request gets on the topologies that machines have, from the driver library to
// inventory.Prefer: by comparison with all possible sets, and as docs/placement.md.
package placement

import (
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Machine is a simulated machine as the agents read it.
type Machine struct {
	Driver      *simdriver.Machine
	GPUs        []gpu.Device // by index
	Links       []gpu.Link
	Allocatable *inventory.Allocatable
}

// Read starts a simulated machine, lets prepare change it, and reads it once through the driver's library. A process can
// have one machine at a time: read the next one in another subtest.
func Read(t testing.TB, name string, prepare ...func(*simdriver.Machine) error) Machine {
	t.Helper()
	m := simdriver.Start(t, name)
	for _, change := range prepare {
		if err := change(m); err != nil {
			t.Fatal(err)
		}
	}
	s, err := nvidia.Open(nvidia.Options{Roots: core.Roots{
		Driver: m.Root, Dev: m.Root, Sys: filepath.Join(m.Root, "sys"), Proc: filepath.Join(m.Root, "proc"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	snap, err := s.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return Machine{
		Driver: m, GPUs: snap.Devices, Links: snap.Links,
		Allocatable: core.Build(snap, health.Ledger{}, core.DefaultConfig()).WithoutHost(),
	}
}

// Prefer calls Allocatable.Prefer with GPUs by index and returns their indices. An index that no GPU has is an unknown ID.
func (m Machine) Prefer(available, required []int, n int) []int {
	preferred := m.Allocatable.Prefer(m.units(available), m.units(required), n)
	chosen := make([]int, len(preferred))
	for i, id := range preferred {
		u, _ := m.Allocatable.Unit(id)
		chosen[i] = u.Device.Index
	}
	return chosen
}

func (m Machine) units(indices []int) []inventory.UnitID {
	ids := make([]inventory.UnitID, len(indices))
	for i, index := range indices {
		ids[i] = "GPU-unknown"
		if index < len(m.GPUs) {
			ids[i] = inventory.UnitID(m.GPUs[index].ID)
		}
	}
	return ids
}
