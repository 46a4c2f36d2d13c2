package nomadadapter

import (
	"fmt"
	"slices"
	"testing"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// h100 is the model of coretest.GPUs.
const h100 = "NVIDIA H100 80GB HBM3"

func gpuID(n int) string { return string(coretest.GPU(n)) }

func shareID(device, n int) string { return fmt.Sprintf("%s::%d", gpuID(device), n) }

// withDevice returns s with its n-th device changed.
func withDevice(s gpu.Snapshot, n int, change func(*gpu.Device)) gpu.Snapshot {
	s.Devices = slices.Clone(s.Devices)
	change(&s.Devices[n])
	return s
}

func memory(mib uint64) func(*gpu.Device) { return func(d *gpu.Device) { d.Memory = mib << 20 } }

// onlyGPUs returns s with these GPUs only.
func onlyGPUs(s gpu.Snapshot, n ...int) gpu.Snapshot {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool {
		return !slices.ContainsFunc(n, func(i int) bool { return coretest.GPU(i) == d.At.GPU })
	})
	return s
}

// linked returns n GPUs with NVLinks between these pairs only.
func linked(n int, pairs ...[2]int) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Links = nil
	for _, p := range pairs {
		s.Links = append(s.Links, gpu.Link{A: coretest.GPU(p[0]), B: coretest.GPU(p[1]), NVLinks: 4})
	}
	return gpu.NewSnapshot(s)
}

// migSnapshot returns a GPU with two MIG instances of one profile and one of another, and a GPU without MIG.
func migSnapshot() gpu.Snapshot {
	s := coretest.GPUs(2)
	s.Devices[0].MIG = true
	for i, profile := range []string{"1g.10gb", "1g.10gb", "3g.40gb"} {
		d := migInstance(s.Devices[0], gpu.DeviceID(fmt.Sprintf("MIG-%d", i)), i, profile)
		if profile == "3g.40gb" {
			d.Memory = 40320 << 20
		}
		d.BAR1, d.PowerLimit, d.Instance = 0, 0, 0
		s.Devices = append(s.Devices, d)
	}
	return gpu.NewSnapshot(s)
}

// migInstance returns the n-th instance of a GPU.
func migInstance(of gpu.Device, id gpu.DeviceID, n int, profile string) gpu.Device {
	d := of
	d.ID, d.MIG, d.Profile, d.Instance = id, false, profile, n
	d.At = gpu.Placement{GPU: of.ID, GI: uint32(n + 1), CI: 0}
	d.Model, d.Memory = of.Model+" MIG "+profile, 9856<<20
	return d
}

// withDetails returns s with all properties that the driver can report.
func withDetails(s gpu.Snapshot) gpu.Snapshot {
	s.Devices = slices.Clone(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Architecture, d.Brand, d.ECC, d.Serial = "Hopper", "NVIDIA", gpu.Enabled, fmt.Sprintf("165292200%04d", d.Index)
		if d.NVLinks = 18; d.Profile != "" {
			d.NVLinks = 0
			d.Slices = gpu.Slices{GPU: 1, Compute: 1, Multiprocessors: 16, CopyEngines: 1, Decoders: 1, JPEGDecoders: 1}
			if d.Profile == "3g.40gb" {
				d.Slices = gpu.Slices{GPU: 3, Compute: 3, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGDecoders: 3}
			}
		}
	}
	return s
}

// inventoryUnder is nodeInventory with a policy, of which all MPS daemons answer.
func inventoryUnder(p inventory.Policy, s gpu.Snapshot, obs ...health.Observation) *inventory.Allocatable {
	cfg, pools := defaultCore(), []string{"gpu.mps", "gpu"}
	cfg.Policy = p
	for _, r := range p.Rules {
		pools = append(pools, r.Pool)
	}
	for _, n := range p.Names {
		pools = append(pools, n.Pool)
	}
	return inventoryWith(cfg, s, obs...).WithHost(inventory.Host{MPS: pools}, inventory.OverlapWarn)
}

// rules returns a policy without names.
func rules(all ...inventory.Rule) inventory.Policy { return inventory.Policy{Rules: all} }

func selectGPUs(n ...int) (s inventory.Selector) {
	for _, i := range n {
		s.IDs = append(s.IDs, coretest.GPU(i))
	}
	return s
}

func timeSlicing(replicas int) *inventory.Sharing {
	return &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas}
}

func byMPS(replicas int) *inventory.Sharing {
	return &inventory.Sharing{Mode: inventory.MPS, Replicas: replicas, OnePerRequest: true}
}

// limited is a policy of GPUs that are time-sliced by three, with a limit of memory: the first with 20 GiB for each share, others, in a pool, with an equal part.
func limited(pool string) inventory.Policy {
	p := rules(
		inventory.Rule{Select: selectGPUs(0), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, Limit: inventory.LimitRequired, Memory: 20 << 30}},
		inventory.Rule{Pool: pool, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, Limit: inventory.LimitRequired}},
	)
	p.Limits = inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve}
	return p
}

// mixedPolicy is a policy of eight GPUs: two exclusive, three time-sliced by four, two with MPS, one reserved.
var mixedPolicy = rules(
	inventory.Rule{Select: selectGPUs(0, 1)},
	inventory.Rule{Select: selectGPUs(2, 3, 4), Sharing: timeSlicing(4)},
	inventory.Rule{Select: selectGPUs(5, 6), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 4 << 30, Threads: 25}},
	inventory.Rule{Select: selectGPUs(7), NotOffered: "reserved by policy.yaml:12"},
)

// sharedGPUs returns n GPUs with this number of replicas each.
func sharedGPUs(n, replicas int, obs ...health.Observation) *inventory.Allocatable {
	return inventoryUnder(rules(inventory.Rule{Sharing: timeSlicing(replicas)}), withDetails(coretest.GPUs(n)), obs...)
}

// sharedInstances returns 16 GPUs with seven MIG instances each, all with this number of replicas.
func sharedInstances(replicas int, obs ...health.Observation) *inventory.Allocatable {
	s := coretest.GPUs(16)
	for n := range 16 {
		s.Devices[n].MIG = true
		for gi := range 7 {
			id := gpu.DeviceID(fmt.Sprintf("MIG-%08d-0000-4000-8000-%012d", n, gi))
			s.Devices = append(s.Devices, migInstance(s.Devices[n], id, gi, "1g.10gb"))
		}
	}
	return inventoryUnder(rules(inventory.Rule{Sharing: timeSlicing(replicas)}), withDetails(gpu.NewSnapshot(s)), obs...)
}

// with returns the assignment after inv.
func (a assignment) with(inv *inventory.Allocatable) assignment {
	next, _ := a.groups(inv)
	return next
}

// deviceGroups returns groups as Nomad's type.
func deviceGroups(inv *inventory.Allocatable, groups []group) (all []*device.DeviceGroup) {
	for _, l := range newListings(inv, groups) {
		all = append(all, l.wire())
	}
	return all
}

// groups returns the groups of inv under an assignment, as Nomad's type.
func groups(inv *inventory.Allocatable, a assignment) []*device.DeviceGroup {
	_, all := a.groups(inv)
	return deviceGroups(inv, all)
}

// firstGroups returns the groups of inv in a new plugin.
func firstGroups(inv *inventory.Allocatable) []*device.DeviceGroup { return groups(inv, assignment{}) }

// groupByDevice returns the group of each device. A device must not be in two groups: it could be allocated twice.
func groupByDevice(t *testing.T, gs []*device.DeviceGroup) map[string]string {
	t.Helper()
	of := map[string]string{}
	seen := map[string]bool{}
	for _, g := range gs {
		if seen[g.Name] {
			t.Errorf("two groups are named %q", g.Name)
		}
		seen[g.Name] = true
		for _, d := range g.Devices {
			if of[d.ID] != "" {
				t.Errorf("%s is in %q and in %q", d.ID, of[d.ID], g.Name)
			}
			of[d.ID] = g.Name
		}
	}
	return of
}

// groupSizes returns the number of devices of each group, by type/name.
func groupSizes(gs []*device.DeviceGroup) map[string]int {
	n := map[string]int{}
	for _, g := range gs {
		n[g.Type+"/"+g.Name] += len(g.Devices)
	}
	return n
}
