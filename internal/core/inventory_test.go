package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A withheld unit is unhealthy with the reason, and can't be reserved. A unit with another reason keeps it. Other
// units and the original inventory are unchanged.
func TestWithhold(t *testing.T) {
	lost := health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.Lost}
	inv := core.Build(coretest.GPUs(3), health.Ledger{}.Apply(health.DefaultPolicy(), testStart, lost), core.DefaultConfig()).WithoutHost()
	id := func(n int) inventory.UnitID { return inventory.UnitID(coretest.GPU(n)) }
	got := inv.Withhold(map[inventory.UnitID]string{id(0): "by pod a/b under nvidia.com/gpu", id(1): "by pod a/c under nvidia.com/gpu"})
	for n, want := range []health.Reason{health.ReasonHeld, health.ReasonLost, health.ReasonNone} {
		if u, _ := got.Unit(id(n)); u.Health.Reason != want {
			t.Errorf("GPU %d: %s, want %s", n, u.Health, want)
		}
	}
	u, _ := got.Unit(id(0))
	if text, want := u.Health.String(), "unhealthy: held (by pod a/b under nvidia.com/gpu); action: end the workload, or wait for its end; cleared by: the end of the workload"; text != want {
		t.Errorf("%q, want %q", text, want)
	}
	if _, err := got.Reserve(id(0)); err == nil {
		t.Error("a device that is held is reserved")
	}
	if _, err := inv.Reserve(id(0)); err != nil {
		t.Errorf("the original has changed: %v", err)
	}
	if got := inv.Withhold(nil); got != inv {
		t.Error("an empty Withhold returns another inventory")
	}
}

func devices(inv *inventory.Allocatable) string {
	var ids []inventory.UnitID
	for u := range inv.Devices() {
		ids = append(ids, u.ID)
	}
	return unitNames(ids)
}

// Devices yields each device once: as it is offered now, not as it was.
func TestDevices(t *testing.T) {
	alone, two := core.Build(coretest.GPUs(3), health.Ledger{}, core.DefaultConfig()).WithoutHost(), sharedGPUs(sliced(2), false)
	less := core.Build(without(coretest.GPUs(3), coretest.GPU(1)), health.Ledger{}, core.DefaultConfig()).WithoutHost()
	for name, tc := range map[string]struct {
		inv  *inventory.Allocatable
		want string
	}{
		"nothing":         {&inventory.Allocatable{}, ""},
		"not shared":      {alone, "0 1 2"},
		"shared":          {two, "0::0 1::0 2::0"},
		"shared by fewer": {two.WithRetiring(sharedGPUs(sliced(3), false), testStart, time.Minute), "0::0 1::0 2::0"},
		"shared now":      {two.WithRetiring(alone, testStart, time.Minute), "0::0 1::0 2::0"},
		"shared no more":  {alone.WithRetiring(two, testStart, time.Minute), "0 1 2"},
		"withdrawn":       {less.WithRetiring(alone, testStart, time.Minute), "0 1 2"},
	} {
		if got := devices(tc.inv); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	for u := range two.Devices() {
		if u.Replica != 0 {
			t.Error(u.ID)
		}
		break // stop after the first
	}
}

// Fewer replicas than before: the remaining ones continue, the others take no work and are removed after the
// grace.
func TestWithRetiring(t *testing.T) {
	four, two, none := sharedGPUs(sliced(4), false), sharedGPUs(sliced(2), false), core.Build(coretest.GPUs(3), health.Ledger{}, core.DefaultConfig()).WithoutHost()
	t0, grace := time.Unix(1000, 0), 2*time.Second
	expect := func(when string, inv *inventory.Allocatable, want string) {
		t.Helper()
		if got := unitNames(unitIDs(inv)); got != want || !inv.Retiring() {
			t.Errorf("%s: %s, retiring: %t", when, got, inv.Retiring())
		}
	}
	next := two.WithRetiring(four, t0, grace)
	expect("right after", next, "0::0 0::1 0::2 0::3 1::0 1::1 1::2 1::3 2::0 2::1 2::2 2::3")
	for u := range next.Units() {
		if stays := u.Replica < 2; u.Health.Schedulable() != stays || !stays && u.Health.Reason != health.ReasonWithdrawn {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
	if p, err := next.Reserve(parseUnits("1::0 1::1")...); err != nil || len(p.Devices) != 1 {
		t.Errorf("what is left: %v, %v", p.Devices, err)
	}
	if _, err := next.Reserve(parseUnits("1::0 1::2")...); !strings.Contains(fmt.Sprint(err), "no longer offered") {
		t.Errorf("what is not: %v", err)
	}
	still := two.WithRetiring(next, t0.Add(grace-time.Millisecond), grace)
	if !still.Retiring() || !still.Equal(next) {
		t.Errorf("before the grace passed: %s", unitNames(unitIDs(still)))
	}
	if gone := two.WithRetiring(still, t0.Add(grace), grace); gone.Retiring() || !gone.Equal(two) {
		t.Errorf("after the grace: %s", unitNames(unitIDs(gone)))
	}
	if back := four.WithRetiring(next, t0.Add(time.Second), grace); back.Retiring() || !back.Equal(four) {
		t.Errorf("and back: %s", unitNames(unitIDs(back)))
	}
	alone := none.WithRetiring(two, t0, grace)
	expect("no longer shared", alone, "0 0::0 0::1 1 1::0 1::1 2 2::0 2::1")
	again := two.WithRetiring(alone, t0.Add(time.Second), grace)
	expect("shared again", again, "0 0::0 0::1 1 1::0 1::1 2 2::0 2::1")
	if u, _ := again.Unit(parseUnits("0")[0]); u.Health.Schedulable() {
		t.Error("a GPU takes work, and its shares do")
	}
}

// Every change of the offer makes the inventory unequal.
func TestEqual(t *testing.T) {
	machine := coretest.GPUs(2)
	build := func(change func(*core.Config)) *inventory.Allocatable {
		cfg := core.DefaultConfig()
		one := served(2)
		cfg.Policy.Rules = []inventory.Rule{{Select: gpuIndices(0), Pool: "p", Sharing: &one}}
		change(&cfg)
		return core.Build(machine, health.Ledger{}, cfg).WithHost(inventory.Host{MPS: []string{"p", "q"}}, cfg.Overlap)
	}
	same := func(*core.Config) {}
	if !build(same).Equal(build(same)) || !build(same).WithRetiring(&inventory.Allocatable{}, testStart, time.Second).Equal(build(same)) {
		t.Error("equal arguments, differing inventories")
	}
	rule := func(c *core.Config) *inventory.Rule { return &c.Policy.Rules[0] }
	for name, change := range map[string]func(*core.Config){
		"pool":            func(c *core.Config) { rule(c).Pool = "q" },
		"mode":            func(c *core.Config) { rule(c).Sharing.Mode = inventory.TimeSlicing },
		"replicas":        func(c *core.Config) { rule(c).Sharing.Replicas = 3 },
		"one per request": func(c *core.Config) { rule(c).Sharing.OnePerRequest = false },
		"memory":          func(c *core.Config) { rule(c).Sharing.Memory = 1 << 30 },
		"threads":         func(c *core.Config) { rule(c).Sharing.Threads = 50 },
		"reserved":        func(c *core.Config) { rule(c).NotOffered = "kept" },
		"warning":         func(c *core.Config) { c.Policy.Rules = append(c.Policy.Rules, inventory.Rule{Select: gpuIndices(7)}) },
		"packed":          func(c *core.Config) { c.Packed = true },
		"device nodes":    func(c *core.Config) { c.Injection.Nodes = true },
	} {
		if build(change).Equal(build(same)) {
			t.Errorf("%s: no difference", name)
		}
	}
	overlapping := build(same).WithHost(inventory.Host{MPS: []string{"p"}, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpuAt(1)}}}, inventory.OverlapWarn)
	if overlapping.Equal(build(same)) {
		t.Error("an overlap: no difference")
	}
}

// nvlinkHost returns a node with NVLinks between the given pairs of GPUs.
func nvlinkHost(pairs ...string) *inventory.Allocatable {
	var links []gpu.Link
	for _, p := range pairs {
		links = append(links, gpu.Link{A: gpu.DeviceID(p[:1]), B: gpu.DeviceID(p[1:]), NVLinks: 4})
	}
	links = append(links, gpu.Link{A: "a", B: "z", Path: gpu.PathSingleSwitch}) // close over PCIe, but without NVLink
	return core.Build(gpu.NewSnapshot(gpu.Snapshot{Links: links}), health.Ledger{}, core.DefaultConfig()).WithoutHost()
}

// On random hosts: two GPUs are in one island if and only if there is a path of links between them. Islands and their
// members are sorted.
func TestIslandsOnRandomHosts(t *testing.T) {
	for range 500 {
		var pairs []string
		reach := [8][8]bool{}
		for i := range 8 {
			for j := i + 1; j < 8; j++ {
				if rand.IntN(8) == 0 {
					pairs = append(pairs, string([]byte{byte('a' + i), byte('a' + j)}))
					reach[i][j], reach[j][i] = true, true
				}
			}
		}
		for k := range 8 {
			for i := range 8 {
				for j := range 8 {
					reach[i][j] = reach[i][j] || reach[i][k] && reach[k][j]
				}
			}
		}
		rand.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		islands := nvlinkHost(pairs...).Islands()
		unsorted := slices.ContainsFunc(islands, func(s []gpu.DeviceID) bool { return !slices.IsSorted(s) || len(s) < 2 })
		if unsorted || !slices.IsSortedFunc(islands, slices.Compare) {
			t.Fatalf("%v: not sorted: %v", pairs, islands)
		}
		of := func(i int) int {
			return slices.IndexFunc(islands, func(s []gpu.DeviceID) bool { return slices.Contains(s, gpu.DeviceID(rune('a'+i))) })
		}
		for i := range 8 {
			for j := range 8 {
				if i != j && reach[i][j] != (of(i) >= 0 && of(i) == of(j)) {
					t.Fatalf("%v: %v", pairs, islands)
				}
			}
		}
	}
	if (&inventory.Allocatable{}).Islands() != nil {
		t.Error("nothing has islands")
	}
}

// A GPU that stops responding stays in its island, also after a restart of the agent. One that was removed does
// not.
func TestIslandsKeepUnresponsiveGPUs(t *testing.T) {
	cfg := core.DefaultConfig()
	whole := coretest.GPUs(4)
	of := func(s core.State) [][]gpu.DeviceID { return s.Allocatable.Islands() }
	all := [][]gpu.DeviceID{{coretest.GPU(0), coretest.GPU(1), coretest.GPU(2), coretest.GPU(3)}}

	without0 := whole
	without0.Devices = whole.Devices[1:]
	without0.Links = slices.DeleteFunc(slices.Clone(whole.Links), func(l gpu.Link) bool { return l.A == coretest.GPU(0) })
	at := time.Unix(0, 0)
	s := core.NewState(cfg).Read(cfg, at, whole)
	for range 3 {
		s = s.Read(cfg, at, without0)
		if diff := cmp.Diff(all, of(s)); diff != "" || len(s.Snapshot.Links) != 6 {
			t.Errorf("%d links, islands (-want +got):\n%s", len(s.Snapshot.Links), diff)
		}
	}
	later := core.Restore(cfg, s.Checkpoint("boot"), "boot")
	failed := later.Read(cfg, at, gpu.NoDriver(gpu.DriverFailed, "not yet"))
	for name, next := range map[string]core.State{
		"restarted": later.Read(cfg, at, without0), "restarted without a driver": failed, "and then with it": failed.Read(cfg, at, without0),
		"restarted twice": core.Restore(cfg, later.Checkpoint("boot"), "boot").Read(cfg, at, without0),
	} {
		if diff := cmp.Diff(all, of(next)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	swapped := without0
	swapped.Devices = append(slices.Clone(without0.Devices), gpu.Device{ID: "GPU-new", At: gpu.WholeGPU("GPU-new"), PCI: whole.Devices[0].PCI})
	if diff := cmp.Diff([][]gpu.DeviceID{all[0][1:]}, of(s.Read(cfg, at, gpu.NewSnapshot(swapped)))); diff != "" {
		t.Errorf("another GPU in its slot (-want +got):\n%s", diff)
	}
}
