package coretest

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Host is a node of the benchmarks.
type Host struct {
	Units    int // number of units
	Snapshot gpu.Snapshot
	Config   core.Config
}

// Hosts returns the nodes of the benchmarks in the order of their units: 8 GPUs; 64 GPUs, more than any node has, for what grows
// with GPUs; 16 GPUs by 16 shares; 16 GPUs of seven MIG instances by 10 shares; 16 GPUs by 100 shares. The last two are the
// largest that are supported.
func Hosts() []Host {
	cut := GPUs(16)
	for n := range 16 {
		cut = WithMIG(cut, n, slices.Repeat([]string{"1g.10gb"}, 7)...)
	}
	return []Host{
		{8, GPUs(8), sharedBy(1)}, {64, GPUs(64), sharedBy(1)}, {256, GPUs(16), sharedBy(16)},
		{1120, cut, sharedBy(10)}, {1600, GPUs(16), sharedBy(100)},
	}
}

// Allocatable returns what takes work on the node, whose GPUs are healthy.
func (h Host) Allocatable() *inventory.Allocatable {
	return core.Build(h.Snapshot, health.Ledger{}, h.Config).WithoutHost()
}

// sharedBy is a configuration that offers MIG instances, and shares each device among replicas units; 1 = not shared.
func sharedBy(replicas int) core.Config {
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	if replicas > 1 {
		c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas}}}
	}
	return c
}
