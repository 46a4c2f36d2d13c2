package core_test

import (
	"errors"
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

func unitIDs(inv *inventory.Inventory) []inventory.UnitID {
	var out []inventory.UnitID
	for u := range inv.Units() {
		out = append(out, u.ID)
	}
	return out
}

func TestBuildMIGStrategies(t *testing.T) {
	empty := migMachine()
	empty = without(empty, "MIG-1", "MIG-2")
	for _, tc := range []struct {
		strategy inventory.MIGStrategy
		machine  gpu.Snapshot
		units    string
		excluded string
	}{
		{inventory.MIGNone, migMachine(), "GPU-0 GPU-m", ""},
		{inventory.MIGMixed, migMachine(), "GPU-0 MIG-1 MIG-2", ""},
		{inventory.MIGSingle, migMachine(), "MIG-1", "GPU-0: mig-strategy single: MIG mode is off on this GPU; MIG-2: mig-strategy single: profile 3g.40gb differs from this node's 1g.10gb"},
		{inventory.MIGSingle, coretest.GPUs(2), "GPU-0 GPU-1", ""},
		{inventory.MIGMixed, empty, "GPU-0", "GPU-m: MIG mode is on and there are no MIG instances"},
	} {
		t.Run(string(tc.strategy), func(t *testing.T) {
			cfg := core.DefaultConfig()
			cfg.MIG = tc.strategy
			inv := core.Build(tc.machine, health.Ledger{}, cfg)
			var units, excluded []string
			for _, id := range unitIDs(inv) {
				units = append(units, short(string(id)))
			}
			for _, e := range inv.Excluded() {
				name := string(e.At.GPU)
				if e.At.GI != gpu.Whole {
					name = fmt.Sprintf("MIG-%d", e.At.GI)
				}
				excluded = append(excluded, short(name)+": "+e.Reason)
			}
			if got := strings.Join(units, " "); got != tc.units {
				t.Errorf("units %q, want %q", got, tc.units)
			}
			if got := strings.Join(excluded, "; "); got != tc.excluded {
				t.Errorf("excluded %q, want %q", got, tc.excluded)
			}
		})
	}
}

// short shortens a UUID of coretest.GPU to "GPU-0".
func short(id string) string {
	if !strings.HasPrefix(id, "GPU-0000") {
		return id
	}
	return "GPU-" + id[len(id)-1:]
}

func TestBuildExcludesByID(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	cfg.Exclude = []gpu.DeviceID{"GPU-m", "MIG-2"}
	inv := core.Build(migMachine(), health.Ledger{}, cfg)
	if got := unitIDs(inv); !slices.Equal(got, []inventory.UnitID{inventory.UnitID(coretest.GPU(0)), "MIG-1"}) {
		t.Errorf("a parent's UUID must not hide its instances (as in nomad-device-nvidia): %v", got)
	}
}

// One GPU of eight returns an error for every call: seven are offered, the eighth is listed with the reason.
func TestBuildListsUnreadableGPUs(t *testing.T) {
	s := without(coretest.GPUs(8), coretest.GPU(7))
	s.Excluded = []gpu.Exclusion{{Index: 7, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error"}}
	s, _ = core.Reconcile(gpu.Snapshot{}, s)
	inv := core.Build(s, health.Ledger{}, core.DefaultConfig())
	if inv.Len() != 7 {
		t.Errorf("%d units", inv.Len())
	}
	if ex := inv.Excluded(); len(ex) != 1 || ex[0].Index != 7 || !strings.Contains(ex[0].Reason, "Unknown Error") {
		t.Errorf("excluded: %+v", ex)
	}
}

func TestWithRetiring(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	before := core.Build(migMachine(), health.Ledger{}, cfg)
	after := core.Build(without(migMachine(), "MIG-1"), health.Ledger{}, cfg)
	t0 := time.Unix(1000, 0)

	first := after.WithRetiring(before, t0, 2*time.Second)
	u, ok := first.Unit("MIG-1")
	if !ok || u.Health.Schedulable() || !first.Retiring() {
		t.Fatalf("right after: %+v, %v", u, ok)
	}
	if _, err := first.Reserve("MIG-1"); err == nil {
		t.Error("a retired unit can be reserved")
	}
	still := after.WithRetiring(first, t0.Add(1999*time.Millisecond), 2*time.Second)
	if !still.Equal(first) {
		t.Error("changed before the grace passed")
	}
	gone := after.WithRetiring(still, t0.Add(2*time.Second), 2*time.Second)
	if _, ok := gone.Unit("MIG-1"); ok || gone.Retiring() {
		t.Error("still there after the grace")
	}
	back := before.WithRetiring(first, t0.Add(time.Second), 2*time.Second)
	if u, _ := back.Unit("MIG-1"); !u.Health.Schedulable() || back.Retiring() {
		t.Errorf("came back but is %v", u.Health)
	}
}

func TestReserve(t *testing.T) {
	unhealthy := health.Ledger{}.Apply(health.DefaultPolicy(), time.Unix(0, 0),
		health.Observation{At: gpu.WholeGPU(coretest.GPU(3)), Kind: health.Lost, Detail: "GPU is lost"})
	cfg := core.DefaultConfig()
	cfg.DeviceNodes = true
	inv := core.Build(coretest.GPUs(4), unhealthy, cfg)
	id := func(n int) inventory.UnitID { return inventory.UnitID(coretest.GPU(n)) }

	t.Run("any order, repeated", func(t *testing.T) {
		want, err := inv.Reserve(id(0), id(2))
		if err != nil {
			t.Fatal(err)
		}
		got, err := inv.Reserve(id(2), id(0), id(2))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		env := []inventory.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: string(id(0) + "," + id(2))}}
		if diff := cmp.Diff(env, got.Env); diff != "" {
			t.Error(diff)
		}
		nodes := []string{}
		for _, n := range got.Nodes {
			nodes = append(nodes, n.Path+" "+n.Permissions)
		}
		// There is no nvidia-modeset on this host, so none in the plan.
		if want := []string{"/dev/nvidia-uvm rw", "/dev/nvidia-uvm-tools rw", "/dev/nvidia0 rw", "/dev/nvidia2 rw", "/dev/nvidiactl rw"}; !slices.Equal(nodes, want) {
			t.Errorf("nodes %v, want %v", nodes, want)
		}
	})
	t.Run("every bad ID is named", func(t *testing.T) {
		_, err := inv.Reserve("GPU-x", id(3), id(0), "GPU-y")
		var unknown *inventory.UnknownUnitsError
		var unhealthy *inventory.UnhealthyUnitsError
		if !errors.As(err, &unknown) || !slices.Equal(unknown.IDs, []inventory.UnitID{"GPU-x", "GPU-y"}) {
			t.Errorf("unknown: %v", err)
		}
		if !errors.As(err, &unhealthy) || len(unhealthy.Units) != 1 || unhealthy.Units[0].ID != id(3) {
			t.Errorf("unhealthy: %v", err)
		}
		want := "unknown device IDs: GPU-x,GPU-y; unhealthy devices: " + string(id(3)) + " is lost: GPU is lost (GPU is lost)" +
			" since 1970-01-01T00:00Z; action: check slot and power, reboot the host; clears: GPU answers again, or reboot"
		if err.Error() != want {
			t.Errorf("text\n%s\nwant\n%s", err, want)
		}
	})
	t.Run("none", func(t *testing.T) {
		p, err := inv.Reserve()
		if diff := cmp.Diff(inventory.Plan{}, p); diff != "" || err != nil {
			t.Error(diff, err)
		}
	})
	t.Run("MIG instance", func(t *testing.T) {
		cfg := cfg
		cfg.MIG = inventory.MIGMixed
		p, err := core.Build(migMachine(), health.Ledger{}, cfg).Reserve("MIG-1")
		if err != nil {
			t.Fatal(err)
		}
		var paths []string
		for _, n := range p.Nodes {
			paths = append(paths, n.Path)
		}
		want := []string{"/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidiactl"}
		if !slices.Equal(paths, want) {
			t.Errorf("nodes %v, want %v", paths, want)
		}
	})
	t.Run("nil inventory", func(t *testing.T) {
		var none *inventory.Inventory
		if _, err := none.Reserve("GPU-x"); err == nil {
			t.Error("want an error")
		}
	})
}

func TestPrefer(t *testing.T) {
	// Two islands of four: 0-3 and 4-7 have NVLinks to each other, and are on one NUMA node each.
	s := coretest.GPUs(8)
	for i, l := range s.Links {
		if slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == l.A })/4 !=
			slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == l.B })/4 {
			s.Links[i].NVLinks = 0
		}
	}
	inv := core.Build(s, health.Ledger{}, core.DefaultConfig())
	pick := func(ns ...int) []inventory.UnitID {
		var out []inventory.UnitID
		for _, n := range ns {
			out = append(out, inventory.UnitID(coretest.GPU(n)))
		}
		return out
	}
	for _, tc := range []struct {
		name                string
		available, required []inventory.UnitID
		n                   int
		want                []inventory.UnitID
	}{
		{"a whole island", pick(7, 6, 5, 4, 3, 2, 0), nil, 4, pick(4, 5, 6, 7)},
		{"two of one island", pick(0, 4, 5), nil, 2, pick(4, 5)},
		{"required decides", pick(0, 1, 2, 3, 4, 5, 6, 7), pick(6), 3, pick(4, 5, 6)},
		{"one", pick(3, 2), nil, 1, pick(2)},
		{"all", pick(1, 0), nil, 2, pick(0, 1)},
		{"more than there are", pick(1, 0), nil, 5, pick(0, 1)},
		{"none", pick(1, 0), nil, 0, nil},
		{"negative", pick(1, 0), pick(1), -1, nil},
		{"required beyond n", pick(0, 1, 2), pick(1, 2), 1, pick(1)},
		{"unknown and repeated", append(pick(1, 1, 0), "GPU-x"), nil, 2, pick(0, 1)},
		{"required not among available", pick(0), pick(5), 2, pick(0, 5)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := inv.Prefer(tc.available, tc.required, tc.n)
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
			rand.Shuffle(len(tc.available), func(i, j int) {
				tc.available[i], tc.available[j] = tc.available[j], tc.available[i]
			})
			if again := inv.Prefer(tc.available, tc.required, tc.n); !slices.Equal(again, got) {
				t.Errorf("another order gives %v, not %v", again, got)
			}
		})
	}
}

func TestPreferPacksInstances(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	inv := core.Build(migMachine(), health.Ledger{}, cfg)
	got := inv.Prefer(unitIDs(inv), nil, 2)
	if want := []inventory.UnitID{"MIG-1", "MIG-2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestConfigValidateNamesEveryProblem(t *testing.T) {
	if err := core.DefaultConfig().Validate(); err != nil {
		t.Errorf("the default is not valid: %v", err)
	}
	err := core.Config{Config: inventory.Config{MIG: "some"}}.Validate()
	for _, want := range []string{`mig strategy = "some"`, "rescan", "probe = ", "call deadline", "probe failures"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no mention of %q in: %v", want, err)
		}
	}
}
