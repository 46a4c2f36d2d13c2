package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// generator makes random nodes, policies and requests.
type generator struct{ *rand.Rand }

func newGenerator(seed uint64) generator {
	return generator{rand.New(rand.NewPCG(seed, 5))} //nolint:gosec // repeatable
}

func pick[T any](d generator, of ...T) T { return of[d.IntN(len(of))] }

func (d generator) oneIn(n int) bool { return d.IntN(n) == 0 }

// fewOf returns none to three of the values, possibly with repetitions.
func fewOf[T any](d generator, of ...T) (few []T) {
	for range d.IntN(4) {
		few = append(few, pick(d, of...))
	}
	return few
}

func (d generator) snapshot() gpu.Snapshot {
	s := coretest.GPUs(1 + d.IntN(6))
	for n := range s.Devices {
		switch s.Devices[n].Model = pick(d, "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA A100-SXM4-40GB"); d.IntN(3) {
		case 0:
			s = coretest.WithMIG(s, n, fewOf(d, "1g.10gb", "1g.10gb+me", "3g.40gb")...)
		case 1:
			s = coretest.WithMIG(s, n, slices.Repeat([]string{"1g.10gb"}, 7)...)
		}
	}
	if d.oneIn(4) {
		s.Excluded = []gpu.Exclusion{{Index: 9, PCI: "0000:ff:00.0", Failure: gpu.FailureError, Reason: "Unknown Error"}}
	}
	return s
}

func (d generator) ids(s gpu.Snapshot) (few []gpu.DeviceID) {
	for range d.IntN(3) {
		few = append(few, pick(d, append(deviceIDs(s), "GPU-x")...))
	}
	return few
}

// selector sets few conditions, so that it selects some devices.
func (d generator) selector(s gpu.Snapshot) (sel inventory.Selector) {
	sel.At = fmt.Sprintf("p:%d", d.IntN(100))
	switch d.IntN(8) {
	case 0:
		sel.IDs = d.ids(s)
	case 1:
		sel.PCI = fewOf[gpu.PCIAddress](d, "0000:10:00.0", "0000:11:00.0")
	case 2:
		sel.Indices = fewOf(d, gpu.DeviceIndex{GPU: 0, Instance: -1}, gpu.DeviceIndex{GPU: 1, Instance: 2}, gpu.DeviceIndex{GPU: 3, Instance: -1})
	case 3:
		sel.Models = fewOf(d, "*H100*", "*L40S", "NVIDIA A*", "*MIG 1g*")
	case 4:
		sel.Profiles = fewOf(d, "1g.*", "*+me", "3g.40gb")
	case 5:
		sel.Full = true
	case 6:
		sel.Memory = inventory.Range{Min: uint64(d.IntN(80)) << 30}
	}
	return sel
}

func (d generator) sharing() inventory.Sharing {
	return inventory.Sharing{
		Mode: pick(d, inventory.TimeSlicing, inventory.MPS), Replicas: 2 + d.IntN(99), OnePerRequest: d.oneIn(2),
		Memory: pick[uint64](d, 0, 1<<30), Threads: pick(d, 0, 10),
	}
}

func (d generator) config(s gpu.Snapshot) core.Config {
	cfg := core.DefaultConfig()
	strategies := []inventory.MIGStrategy{inventory.MIGNone, inventory.MIGSingle, inventory.MIGMixed}
	cfg.MIG, cfg.Packed, cfg.Injection.Nodes = pick(d, strategies...), d.oneIn(2), d.oneIn(2)
	cfg.Overlap = pick(d, inventory.OverlapWarn, inventory.OverlapRefuse)
	if d.oneIn(3) {
		cfg.Exclude = d.ids(s)
	}
	p := &cfg.Policy
	for d.oneIn(3) {
		p.Include = append(p.Include, d.selector(s))
	}
	for d.oneIn(2) {
		r := inventory.Rule{Select: d.selector(s), Pool: pick(d, "", "mine"), MIG: pick(d, append(strategies, "")...)}
		if d.oneIn(2) {
			r.Sharing = new(d.sharing())
		} else if d.oneIn(4) {
			r.NotOffered = "kept"
		}
		p.Rules = append(p.Rules, r)
	}
	for d.oneIn(3) {
		p.Names = append(p.Names, inventory.Naming{Select: d.selector(s), Pool: pick(d, "big", "small")})
	}
	for d.oneIn(3) {
		p.Shares = append(p.Shares, inventory.Share{
			Pool: pick(d, "gpu", "big", "mig-1g.10gb"), Select: d.selector(s), First: d.IntN(3), Rename: pick(d, "", "x.shared"), Sharing: d.sharing(),
		})
	}
	return cfg
}

func (d generator) host(s gpu.Snapshot) (h inventory.Host) {
	h.MPS = fewOf(d, "gpu.mps", "gpu", "mine", "x.shared")
	for d.oneIn(3) {
		h.Peers = append(h.Peers, inventory.PeerDevice{Agent: "nomad-gpu", At: pick(d, s.Devices...).At, Earlier: d.oneIn(2)})
	}
	return h
}

// Invariants of every policy, node and health state.
func TestAnyPolicy(t *testing.T) {
	const draws = 1000
	for seed := range uint64(draws) {
		d := newGenerator(seed)
		s := d.snapshot()
		cfg := d.config(s)
		var obs []health.Observation
		for d.oneIn(2) {
			obs = append(obs, xidEvent(pick(d, s.Devices...).At, pick[uint64](d, 95, 94, 79, 48)))
		}
		l, h := health.Ledger{}.Apply(cfg.Health, testStart, obs...), d.host(s)
		inv := core.Build(s, l, cfg).WithHost(h, cfg.Overlap)
		verifyDevicesOnce(t, s, inv)
		verifyUnits(t, l, inv)
		verifyReserveAndPrefer(t, d, inv)
		d.Shuffle(len(s.Devices), func(i, j int) { s.Devices[i], s.Devices[j] = s.Devices[j], s.Devices[i] })
		if again := core.Build(gpu.NewSnapshot(s), l, cfg).WithHost(h, cfg.Overlap); !again.Equal(inv) {
			t.Error("equal arguments, differing inventories")
		}
		verifyIsolation(t, d, s, func(l health.Ledger) *inventory.Allocatable {
			return core.Build(gpu.NewSnapshot(s), l, cfg).WithHost(h, cfg.Overlap)
		}, cfg, l)
		if t.Failed() {
			t.Fatalf("seed %d: %d devices, policy %+v", seed, len(s.Devices), cfg.Policy)
		}
	}
}

// verifyDevicesOnce: each device is either offered, excluded with a reason, or hidden because its GPU or its
// instances are offered.
func verifyDevicesOnce(t *testing.T, s gpu.Snapshot, inv *inventory.Allocatable) {
	t.Helper()
	ways, offered := map[gpu.Placement]int{}, map[gpu.Placement]bool{}
	var last gpu.DeviceID
	for u := range inv.Units() {
		if u.Device.ID != last {
			ways[u.Device.At]++
			offered[u.Device.At] = true
		}
		last = u.Device.ID
	}
	for _, e := range s.Excluded { // devices that can't be read
		if !slices.Contains(inv.Excluded(), e) {
			t.Errorf("%v is not listed", e)
		}
	}
	for _, e := range inv.Excluded() {
		if ways[e.At]++; e.Reason == "" || e.Reason == "hidden" {
			t.Errorf("%s is not offered because %q", e.At, e.Reason)
		}
	}
	for _, d := range s.Devices {
		behind := slices.ContainsFunc(s.Devices, func(o gpu.Device) bool {
			return o.At != d.At && o.At.GPU == d.At.GPU && (o.At.GI == gpu.Whole) != (d.At.GI == gpu.Whole) && ways[o.At] > 0
		})
		if n := ways[d.At]; n > 1 || n == 0 && !behind {
			t.Errorf("%s is offered or refused %d times, behind another view %t", d.ID, n, behind)
		}
		if whole := gpu.WholeGPU(d.At.GPU); d.At != whole && offered[whole] && offered[d.At] {
			t.Errorf("%s and its GPU are both offered", d.ID)
		}
	}
}

// verifyUnits: the units of a device differ only in ID, replica and health.
func verifyUnits(t *testing.T, l health.Ledger, inv *inventory.Allocatable) {
	t.Helper()
	var prev inventory.Unit
	seen := map[inventory.UnitID]bool{}
	for u := range inv.Units() {
		id := inventory.UnitID(u.Device.ID)
		if u.Sharing.Mode != inventory.Exclusive {
			id += inventory.UnitID(fmt.Sprintf("::%d", u.Replica))
		}
		if u.ID != id || len(id) > 63 || seen[id] || u.Pool == "" {
			t.Errorf("unit %q of pool %q, want %q, once", u.ID, u.Pool, id)
		}
		seen[id] = true
		if found, ok := inv.Unit(u.ID); !ok || found != u {
			t.Errorf("%s is not found by its ID", u.ID)
		}
		if device, shared := u.ID.Split(); device != u.Device.ID || shared != (u.Sharing.Mode != inventory.Exclusive) {
			t.Errorf("%s is split into %s, %t", u.ID, device, shared)
		}
		if u.Replica > 0 { // the units of a device are equal
			same := prev
			if same.ID, same.Replica = u.ID, prev.Replica+1; same != u {
				t.Errorf("units of a device differ: %+v, %+v", prev, u)
			}
		} else if prev.Sharing.Mode != inventory.Exclusive && prev.Replica != prev.Sharing.Replicas-1 {
			t.Errorf("%s is the last of %d", prev.ID, prev.Sharing.Replicas)
		}
		if was := l.Health(u.Device.At); u.Health != was && !was.Schedulable() {
			t.Errorf("%s is %s, its device %s", u.ID, u.Health, was)
		}
		prev = u
	}
}

// verifyReserveAndPrefer checks the contracts of Reserve and Prefer.
func verifyReserveAndPrefer(t *testing.T, d generator, inv *inventory.Allocatable) {
	t.Helper()
	all := unitIDs(inv)
	if len(all) == 0 {
		return
	}
	n := 1 + d.IntN(8)
	d.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	preferred := inv.Prefer(all[:min(len(all), 40)], nil, n)
	if want := min(n, len(all), 40); len(preferred) != want || len(slices.Compact(slices.Clone(preferred))) != want {
		t.Errorf("%d are preferred, want %d: %v", len(preferred), want, preferred)
	}
	p, err := inv.Reserve(preferred...)
	if err != nil {
		if len(p.Devices)+len(p.Env)+len(p.Nodes) > 0 {
			t.Errorf("refused, and planned: %+v", p)
		}
		return
	}
	var once []string
	for u := range inv.Units() {
		if slices.Contains(preferred, u.ID) && !slices.Contains(once, string(u.Device.ID)) {
			once = append(once, string(u.Device.ID))
		}
	}
	if diff := cmp.Diff(once, p.IDs); diff != "" {
		t.Errorf("%v: %s", preferred, diff)
	}
}

// verifyIsolation: a fault of a GPU affects only its own units, and a fault of an instance no other instance.
func verifyIsolation(t *testing.T, d generator, s gpu.Snapshot, build func(health.Ledger) *inventory.Allocatable, cfg core.Config, l health.Ledger) {
	t.Helper()
	at, code := pick(d, s.Devices...).At, pick[uint64](d, 94, 95)
	scope := at
	if code == 95 { // counts for the whole GPU, whatever its placement
		scope = gpu.WholeGPU(at.GPU)
	}
	before, after := build(l), build(l.Apply(cfg.Health, testStart, xidEvent(at, code)))
	if before.Len() != after.Len() {
		t.Errorf("%d units, %d after an XID", before.Len(), after.Len())
	}
	for u := range after.Units() {
		switch was, _ := before.Unit(u.ID); {
		case !scope.Covers(u.Device.At) && u != was:
			t.Errorf("%s is touched by XID %d on %s: %s, was %s", u.ID, code, scope, u.Health, was.Health)
		case scope.Covers(u.Device.At) && (u.Health.State < health.Degraded || u.Health.State < was.Health.State):
			t.Errorf("%s is %s after XID %d on %s, was %s", u.ID, u.Health, code, scope, was.Health)
		}
	}
}
