package core_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
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

// sharedGPUs returns three GPUs, all shared as in s.
func sharedGPUs(s inventory.Sharing, packed bool) *inventory.Inventory {
	cfg := core.DefaultConfig()
	cfg.Packed = packed
	cfg.Policy.Rules = []inventory.Rule{{Sharing: &s}}
	return core.Build(coretest.GPUs(3), health.Ledger{}, cfg)
}

// parseUnits parses "0::1 2::0" as unit IDs; "2" is a GPU that is not shared.
func parseUnits(text string) (ids []inventory.UnitID) {
	for _, word := range strings.Fields(text) {
		device, replica, isShared := strings.Cut(word, "::")
		id := string(coretest.GPU(int(device[0] - '0')))
		if isShared {
			id += "::" + replica
		}
		ids = append(ids, inventory.UnitID(id))
	}
	return ids
}

// unitNames is the inverse of parseUnits.
func unitNames(ids []inventory.UnitID) string {
	var names []string
	for _, id := range ids {
		device, replica, isShared := strings.Cut(string(id), "::")
		name := deviceName(gpu.DeviceID(device))
		if isShared {
			name += "::" + replica
		}
		names = append(names, name)
	}
	return strings.Join(names, " ")
}

func TestReserveShares(t *testing.T) {
	limited := served(10)
	limited.Memory, limited.Threads = 4<<30+1<<20, 25
	strict := sliced(4)
	strict.OnePerRequest = true
	visible := func(gpus string) inventory.EnvVar {
		var ids []string
		for _, id := range parseUnits(gpus) {
			ids = append(ids, string(id))
		}
		return inventory.EnvVar{Name: inventory.VisibleDevices, Value: strings.Join(ids, ",")}
	}
	for name, tc := range map[string]struct {
		sharing inventory.Sharing
		ids     string
		env     []inventory.EnvVar
		mps     string
		err     string
	}{
		"one":                              {sliced(4), "1::2", []inventory.EnvVar{visible("1")}, "", ""},
		"two of one GPU are the GPU once":  {sliced(4), "1::2 1::0", []inventory.EnvVar{visible("1")}, "", ""},
		"all of all":                       {sliced(2), "2::1 0::1 1::0 0::0 2::0 1::1", []inventory.EnvVar{visible("0 1 2")}, "", ""},
		"10 is after 9 and before nothing": {sliced(11), "2::10 0::9 0::10", []inventory.EnvVar{visible("0 2")}, "", ""},
		"one, twice":                       {strict, "0::1 0::1", []inventory.EnvVar{visible("0")}, "", ""},
		"one per request, two asked for": {
			strict, "0::1 0::2", nil, "", "2 units of gpu.shared, whose devices are shared: maximum request size for shared resources is 1",
		},
		"one per request, of two GPUs": {
			strict, "0::1 1::1 2::1", nil, "", "3 units of gpu.shared, whose devices are shared: maximum request size for shared resources is 1",
		},
		"MPS": {served(10), "0::9", []inventory.EnvVar{visible("0")}, "gpu.mps", ""},
		"MPS, limited": {limited, "2::3", []inventory.EnvVar{
			{Name: "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", Value: "25"}, {Name: "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", Value: "0=4097M"}, visible("2"),
		}, "gpu.mps", ""},
		"MPS, two asked for": {served(10), "0::9 0::8", nil, "", "2 units of gpu.mps, whose devices are shared: maximum request size for shared resources is 1"},
		"the GPU itself":     {sliced(4), "0", nil, "", "unknown device IDs: " + string(coretest.GPU(0))},
		"beyond the last":    {sliced(4), "0::3 0::4", nil, "", "unknown device IDs: " + string(coretest.GPU(0)) + "::4"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := inventory.Host{MPS: []string{"gpu.mps"}}
			inv := sharedGPUs(tc.sharing, false).WithHost(cfg, inventory.OverlapWarn)
			asked := parseUnits(tc.ids)
			p, err := inv.Reserve(asked...)
			if text := fmt.Sprint(err); err != nil && text != tc.err || err == nil && tc.err != "" {
				t.Fatalf("error %q, want %q", text, tc.err)
			}
			if diff := cmp.Diff(tc.env, p.Env); diff != "" || p.MPS != tc.mps {
				t.Errorf("MPS %q, environment: %s", p.MPS, diff)
			}
			var one *inventory.SharedUnitsError
			if errors.As(err, &one) && (one.N != len(asked) || !strings.HasPrefix(one.Pool, "gpu.")) {
				t.Errorf("%+v", one)
			}
			for range 5 {
				rand.Shuffle(len(asked), func(i, j int) { asked[i], asked[j] = asked[j], asked[i] })
				again, _ := inv.Reserve(append(asked, asked...)...)
				if diff := cmp.Diff(p, again); diff != "" {
					t.Fatalf("another order: %s", diff)
				}
			}
		})
	}
}

// Errors of single units come before the error that there are too many.
func TestReserveUnhealthyShares(t *testing.T) {
	down := sharedGPUs(served(2), false).WithHost(inventory.Host{}, inventory.OverlapWarn)
	_, err := down.Reserve(parseUnits("0::0 0::1 1::7")...)
	var unhealthy *inventory.UnhealthyUnitsError
	var unknown *inventory.UnknownUnitsError
	if !errors.As(err, &unhealthy) || len(unhealthy.Units) != 2 || !errors.As(err, &unknown) || len(unknown.IDs) != 1 {
		t.Errorf("%v", err)
	}
}

func TestPreferShares(t *testing.T) {
	all := "0::0 0::1 0::2 0::3 1::0 1::1 1::2 1::3 2::0 2::1 2::2 2::3"
	for name, tc := range map[string]struct {
		available, required string
		n                   int
		distributed, packed string
	}{
		"nothing is taken":        {all, "", 1, "0::0", "0::0"},
		"a few of nothing taken":  {all, "", 4, "0::0 0::1 1::0 2::0", "0::0 0::1 0::2 0::3"},
		"one has two taken":       {"0::1 0::3 1::0 1::1 1::2 1::3", "", 2, "1::0 1::1", "0::1 0::3"},
		"each has some taken":     {"0::1 0::3 1::1 1::2 1::3 2::3", "", 1, "1::1", "2::3"},
		"and what comes after":    {"0::1 0::3 1::1 1::2 1::3 2::3", "", 3, "0::1 1::1 1::2", "0::1 0::3 2::3"},
		"one that is required":    {all, "1::2", 2, "0::0 1::2", "1::0 1::2"},
		"two that are required":   {all, "2::3 2::2", 3, "0::0 2::2 2::3", "2::0 2::2 2::3"},
		"required and not free":   {"0::0 1::0", "2::2", 2, "0::0 2::2", "0::0 2::2"},
		"required beyond n":       {all, "1::2 0::1", 1, "0::1", "0::1"},
		"more than there are":     {"2::2 0::1", "", 3, "0::1 2::2", "0::1 2::2"},
		"none":                    {all, "", 0, "", ""},
		"unknown ones":            {"0 0::9 1 1::0 1::0", "", 2, "1::0", "1::0"},
		"unknown and required":    {"1::0 1::1", "0::9", 2, "1::0 1::1", "1::0 1::1"},
		"nothing there":           {"", "", 2, "", ""},
		"only unknown units":      {"0 1", "2", 2, "", ""},
		"as much taken of each":   {"0::1 0::2 0::3 1::0 1::1 1::2", "0::0", 2, "0::0 1::0", "0::0 1::0"},
		"three, and one is spent": {"0::0 0::1 1::3", "", 3, "0::0 0::1 1::3", "0::0 0::1 1::3"},
	} {
		t.Run(name, func(t *testing.T) {
			for packed, want := range map[bool]string{false: tc.distributed, true: tc.packed} {
				inv, available := sharedGPUs(sliced(4), packed), parseUnits(tc.available)
				for range 5 {
					rand.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
					if got := unitNames(inv.Prefer(available, parseUnits(tc.required), tc.n)); got != want {
						t.Fatalf("packed %t: %q, want %q", packed, got, want)
					}
				}
			}
		})
	}
}

// Fewer replicas than before: the remaining ones continue, the others take no work and are removed after the
// grace.
func TestFewerReplicas(t *testing.T) {
	four, two, none := sharedGPUs(sliced(4), false), sharedGPUs(sliced(2), false), core.Build(coretest.GPUs(3), health.Ledger{}, core.DefaultConfig())
	t0 := time.Unix(1000, 0)
	grace := 2 * time.Second
	next := two.WithRetiring(four, t0, grace)
	if got := unitNames(unitIDs(next)); got != "0::0 0::1 0::2 0::3 1::0 1::1 1::2 1::3 2::0 2::1 2::2 2::3" || !next.Retiring() {
		t.Errorf("right after: %s", got)
	}
	for u := range next.Units() {
		if stays := u.Replica < 2; u.Health.Schedulable() != stays || !stays && u.Health.Reason != health.ReasonWithdrawn {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
	if p, err := next.Reserve(parseUnits("1::0 1::1")...); err != nil || len(p.Devices) != 1 {
		t.Errorf("what is left: %v, %v", p.Devices, err)
	}
	if _, err := next.Reserve(parseUnits("1::0 1::2")...); !strings.Contains(fmt.Sprint(err), "WITHDRAWN") && !strings.Contains(fmt.Sprint(err), "no longer offered") {
		t.Errorf("what is not: %v", err)
	}
	if gone := two.WithRetiring(next, t0.Add(grace), grace); gone.Retiring() || !gone.Equal(two) {
		t.Errorf("after the grace: %s", unitNames(unitIDs(gone)))
	}
	if back := four.WithRetiring(next, t0.Add(time.Second), grace); back.Retiring() || !back.Equal(four) {
		t.Errorf("and back: %s", unitNames(unitIDs(back)))
	}
	alone := none.WithRetiring(two, t0, grace)
	if got := unitNames(unitIDs(alone)); got != "0 0::0 0::1 1 1::0 1::1 2 2::0 2::1" {
		t.Errorf("no longer shared: %s", got)
	}
	again := two.WithRetiring(alone, t0.Add(time.Second), grace)
	if got := unitNames(unitIDs(again)); got != "0 0::0 0::1 1 1::0 1::1 2 2::0 2::1" {
		t.Errorf("shared again: %s", got)
	}
	if u, _ := again.Unit(parseUnits("0")[0]); u.Health.Schedulable() {
		t.Error("a GPU takes work, and its shares do")
	}
}

// Every change of the offer makes the inventory unequal.
func TestEqual(t *testing.T) {
	machine := coretest.GPUs(2)
	build := func(change func(*core.Config)) *inventory.Inventory {
		cfg := core.DefaultConfig()
		one := served(2)
		cfg.Policy.Rules = []inventory.Rule{{Select: gpuIndices(0), Pool: "p", Sharing: &one}}
		change(&cfg)
		return core.Build(machine, health.Ledger{}, cfg).WithHost(inventory.Host{MPS: []string{"p", "q"}}, cfg.Overlap)
	}
	same := func(*core.Config) {}
	if !build(same).Equal(build(same)) || !build(same).WithRetiring(nil, testStart, time.Second).Equal(build(same)) {
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
		"reserved":        func(c *core.Config) { rule(c).Reserve = "kept" },
		"finding":         func(c *core.Config) { c.Policy.Rules = append(c.Policy.Rules, inventory.Rule{Select: gpuIndices(7)}) },
		"packed":          func(c *core.Config) { c.Packed = true },
		"device nodes":    func(c *core.Config) { c.DeviceNodes = true },
	} {
		if build(change).Equal(build(same)) {
			t.Errorf("%s: no difference", name)
		}
	}
	claimed := build(same).WithHost(inventory.Host{MPS: []string{"p"}, Claims: []inventory.Claim{{Agent: "nomad-gpu", At: gpuAt(1)}}}, inventory.OverlapWarn)
	if claimed.Equal(build(same)) {
		t.Error("a contest: no difference")
	}
}
