package core_test

import (
	"math/rand/v2"
	"slices"
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
	inv := core.Build(coretest.GPUs(3), health.Ledger{}.Apply(health.DefaultPolicy(), testStart, lost), core.DefaultConfig())
	id := func(n int) inventory.UnitID { return inventory.UnitID(coretest.GPU(n)) }
	got := inv.Withhold(map[inventory.UnitID]string{id(0): "by pod a/b under nvidia.com/gpu", id(1): "by pod a/c under nvidia.com/gpu"})
	for n, want := range []health.Reason{health.ReasonHeld, health.ReasonLost, health.ReasonNone} {
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
	for id, want := range map[inventory.UnitID]struct {
		device gpu.DeviceID
		shared bool
	}{"GPU-1": {"GPU-1", false}, "GPU-1::12": {"GPU-1", true}, "MIG-2::0": {"MIG-2", true}, "": {"", false}} {
		if device, shared := id.Split(); device != want.device || shared != want.shared {
			t.Errorf("%q: %q %t", id, device, shared)
		}
	}
}

func devices(inv *inventory.Inventory) string {
	var ids []inventory.UnitID
	for u := range inv.Devices() {
		ids = append(ids, u.ID)
	}
	return unitNames(ids)
}

// Devices yields each device once: as it is offered now, not as it was.
func TestDevices(t *testing.T) {
	alone, two := core.Build(coretest.GPUs(3), health.Ledger{}, core.DefaultConfig()), sharedGPUs(sliced(2), false)
	less := core.Build(without(coretest.GPUs(3), coretest.GPU(1)), health.Ledger{}, core.DefaultConfig())
	for name, tc := range map[string]struct {
		inv  *inventory.Inventory
		want string
	}{
		"nothing":         {nil, ""},
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

// nvlinkHost returns a host with NVLinks between the given pairs of GPUs.
func nvlinkHost(pairs ...string) *inventory.Inventory {
	var links []gpu.Link
	for _, p := range pairs {
		links = append(links, gpu.Link{A: gpu.DeviceID(p[:1]), B: gpu.DeviceID(p[1:]), NVLinks: 4})
	}
	links = append(links, gpu.Link{A: "a", B: "z", Path: gpu.PathSingleSwitch}) // close over PCIe, but without NVLink
	return core.Build(gpu.NewSnapshot(gpu.Snapshot{Links: links}), health.Ledger{}, core.DefaultConfig())
}

func TestIslands(t *testing.T) {
	for name, tc := range map[string]struct {
		pairs []string
		want  [][]gpu.DeviceID
	}{
		"none":                 {nil, nil},
		"bridges":              {[]string{"ab", "cd"}, [][]gpu.DeviceID{{"a", "b"}, {"c", "d"}}},
		"a switch":             {[]string{"ab", "ac", "bc"}, [][]gpu.DeviceID{{"a", "b", "c"}}},
		"over others":          {[]string{"ab", "bc", "cd", "xy"}, [][]gpu.DeviceID{{"a", "b", "c", "d"}, {"x", "y"}}},
		"joined by the last":   {[]string{"ab", "cd", "bd"}, [][]gpu.DeviceID{{"a", "b", "c", "d"}}},
		"the least comes last": {[]string{"bc", "de", "ce", "ad"}, [][]gpu.DeviceID{{"a", "b", "c", "d", "e"}}},
	} {
		for range 10 {
			rand.Shuffle(len(tc.pairs), func(i, j int) { tc.pairs[i], tc.pairs[j] = tc.pairs[j], tc.pairs[i] })
			if diff := cmp.Diff(tc.want, nvlinkHost(tc.pairs...).Islands()); diff != "" {
				t.Errorf("%s, %v (-want +got):\n%s", name, tc.pairs, diff)
			}
		}
	}
	if (*inventory.Inventory)(nil).Islands() != nil {
		t.Error("nothing has islands")
	}
}

// On random hosts: two GPUs are in one island if and only if there is a path of links between them.
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
		islands := nvlinkHost(pairs...).Islands()
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
}

// A GPU that stops responding stays in its island, also after a restart of the agent. One that was removed does
// not.
func TestIslandsKeepUnresponsiveGPUs(t *testing.T) {
	cfg := core.DefaultConfig()
	whole := coretest.GPUs(4)
	of := func(s core.State) [][]gpu.DeviceID { return s.Inventory.Islands() }
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
