package core_test

import (
	"fmt"
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

func sliced(n int) inventory.Sharing {
	return inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}
}

func served(n int) inventory.Sharing {
	return inventory.Sharing{Mode: inventory.MPS, Replicas: n, OnePerRequest: true}
}

// under returns the inventory of a node under a policy, with the MIG strategy mixed.
func under(s gpu.Snapshot, p inventory.Policy) *inventory.Allocatable {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Policy = inventory.MIGMixed, p
	return core.Build(s, health.Ledger{}, cfg).WithoutHost()
}

const notIncluded = "not among those that the policy includes"

func TestPolicies(t *testing.T) {
	machine := coretest.WithMIG(coretest.GPUs(4), 3, "1g.10gb", "1g.10gb", "3g.40gb+me")
	machine.Devices[2].Model = "NVIDIA L40S"
	l40, full := inventory.Selector{Models: []string{"*L40*"}}, inventory.Selector{Full: true}
	ones := inventory.Selector{Profiles: []string{"1g.*"}}
	by := func(s inventory.Sharing) *inventory.Sharing { return &s }
	for name, tc := range map[string]struct {
		policy         inventory.Policy
		units, refused string
		warnings       string
	}{
		"none": {inventory.Policy{}, "gpu: 0 1 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", ""},
		"the first rule decides": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(0), Pool: "a"}, {Select: gpuIndices(0, 1), Pool: "b"}, {Select: l40, Pool: "c"}}},
			"a: 0; b: 1; c: 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"a rule about a GPU is about its instances": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(3), Sharing: by(sliced(2))}}},
			"gpu: 0 1 2; mig-1g.10gb.shared: 3:0::0 3:0::1 3:1::0 3:1::1; mig-3g.40gb.me.shared: 3:2::0 3:2::1", "", "",
		},
		"a name of a rule's own has no suffix": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(0), Pool: "ours", Sharing: by(served(2))}, {Select: ones, Sharing: by(served(2))}}},
			"ours: 0::0 0::1; gpu: 1 2; mig-1g.10gb.mps: 3:0::0 3:0::1 3:1::0 3:1::1; mig-3g.40gb.me: 3:2", "", "",
		},
		"reserved": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(3), NotOffered: "kept"}, {Select: l40, NotOffered: "left to nomad"}}},
			"gpu: 0 1", "2 left to nomad; 3:0 kept; 3:1 kept; 3:2 kept", "",
		},
		"an exclusive rule before a share": {
			inventory.Policy{
				Rules:  []inventory.Rule{{Select: gpuIndices(0), Sharing: &inventory.Sharing{}}},
				Shares: []inventory.Share{{Pool: "gpu", Rename: "gpu.shared", Sharing: sliced(2)}},
			},
			"gpu: 0; gpu.shared: 1::0 1::1 2::0 2::1; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"names": {
			inventory.Policy{Names: []inventory.Naming{{Select: l40, Pool: "l40s"}, {Select: full, Pool: "big"}, {Select: ones, Pool: "small"}}},
			"big: 0 1; l40s: 2; small: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"a rule's name before a name": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(0), Pool: "mine"}}, Names: []inventory.Naming{{Select: full, Pool: "big"}}},
			"mine: 0; big: 1 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"a rule that shares what has a name": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(0), Sharing: by(sliced(2))}}, Names: []inventory.Naming{{Select: full, Pool: "big"}}},
			"big.shared: 0::0 0::1; big: 1 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"shares, by pool": {
			inventory.Policy{Shares: []inventory.Share{{Pool: "gpu", Sharing: sliced(2)}, {Pool: "mig-3g.40gb.me", Rename: "thirds", Sharing: sliced(3)}}},
			"gpu: 0::0 0::1 1::0 1::1 2::0 2::1; mig-1g.10gb: 3:0 3:1; thirds: 3:2::0 3:2::1 3:2::2", "", "",
		},
		"the first two are shared": {
			inventory.Policy{Shares: []inventory.Share{{Pool: "gpu", First: 2, Rename: "gpu.shared", Sharing: sliced(2)}}},
			"gpu.shared: 0::0 0::1 1::0 1::1; gpu: 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"one is shared, then all that are left": {
			inventory.Policy{Shares: []inventory.Share{{Pool: "gpu", First: 1, Rename: "two", Sharing: sliced(2)}, {Pool: "gpu", Rename: "three", Sharing: sliced(3)}}},
			"two: 0::0 0::1; three: 1::0 1::1 1::2 2::0 2::1 2::2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"those that are selected are shared": {
			inventory.Policy{Shares: []inventory.Share{{Pool: "mig-1g.10gb", Select: inventory.Selector{Indices: []gpu.DeviceIndex{{GPU: 3, Instance: 1}}}, Rename: "s", Sharing: sliced(2)}}},
			"gpu: 0 1 2; mig-1g.10gb: 3:0; s: 3:1::0 3:1::1; mig-3g.40gb.me: 3:2", "", "",
		},
		"what is named is shared by that name": {
			inventory.Policy{Names: []inventory.Naming{{Select: full, Pool: "big"}}, Shares: []inventory.Share{{Pool: "big", Rename: "big.shared", Sharing: sliced(2)}}},
			"big.shared: 0::0 0::1 1::0 1::1 2::0 2::1; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "", "",
		},
		"included": {
			inventory.Policy{Include: []inventory.Selector{gpuIndices(0), ones}},
			"gpu: 0; mig-1g.10gb: 3:0 3:1", "1 " + notIncluded + "; 2 " + notIncluded + "; 3:2 " + notIncluded, "",
		},
		"included, and kept by a rule": {
			inventory.Policy{Include: []inventory.Selector{gpuIndices(0, 1)}, Rules: []inventory.Rule{{Select: gpuIndices(1, 2), NotOffered: "kept"}, {Select: gpuIndices(3), NotOffered: "kept"}}},
			"gpu: 0", "1 kept; 2 " + notIncluded + "; 3:0 " + notIncluded + "; 3:1 " + notIncluded + "; 3:2 " + notIncluded, "",
		},
		"nothing is included": {
			inventory.Policy{Include: []inventory.Selector{{At: "p:1", IDs: []gpu.DeviceID{"GPU-x"}}}, Rules: []inventory.Rule{{Select: gpuIndices(0), Pool: "a"}}},
			"", strings.Join([]string{"0", "1", "2", "3:0", "3:1", "3:2 " + notIncluded}, " "+notIncluded+"; "),
			"p:1: selects no device of this node",
		},
		"unmatched parts in their order": {
			inventory.Policy{
				Include: []inventory.Selector{{}, {At: "p:1", IDs: []gpu.DeviceID{"GPU-x"}}},
				Rules:   []inventory.Rule{{Select: gpuIndices(0)}, {Select: inventory.Selector{At: "p:2", Indices: gpuIndices(0).Indices}}},
				Names:   []inventory.Naming{{Select: full, Pool: "big"}, {Select: inventory.Selector{At: "p:3", Models: []string{"*L40*"}}, Pool: "l40s"}},
				Shares:  []inventory.Share{{Pool: "gpu", Select: inventory.Selector{At: "p:4"}, Sharing: sliced(2)}},
			},
			"big: 0 1 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "",
			"p:1: selects no device of this node; p:2: selects no device of this node, or only such as earlier rules select; " +
				"p:3: selects no device of this node, or only such as have a name already; p:4: there is no gpu on this node to share",
		},
		"one pool, differing shares": {
			inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(0), Pool: "p", Sharing: by(sliced(2))}, {Select: gpuIndices(1), Pool: "p"}, {Select: gpuIndices(2), Pool: "p", Sharing: by(served(2))}}},
			"p: 0::0 0::1 1 2::0 2::1; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "",
			"pool p has units that are shared differently (time-slicing by 2 and exclusive): give them different names",
		},
		"one pool, differing injection": {
			inventory.Policy{Rules: []inventory.Rule{
				{Select: gpuIndices(0), Injection: &inventory.Injection{Name: "cdi", CDI: inventory.CDIRequired}},
				{Select: gpuIndices(1), Injection: &inventory.Injection{Name: "devices", Nodes: true}},
				{Select: gpuIndices(2), Pool: "p", Injection: &inventory.Injection{Name: "devices", Nodes: true}},
			}},
			"gpu: 0 1; p: 2; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "",
			"pool gpu has units that containers get differently (cdi and devices): give them different names",
		},
		"one pool, differing shares and injection": {
			inventory.Policy{Rules: []inventory.Rule{
				{Select: gpuIndices(0), Pool: "p", Injection: &inventory.Injection{Name: "cdi", CDI: inventory.CDIRequired}},
				{Select: gpuIndices(1), Pool: "p", Sharing: by(sliced(2)), Injection: &inventory.Injection{Name: "devices", Nodes: true}},
				{Select: gpuIndices(2), Pool: "p", Sharing: by(served(2))},
			}},
			"p: 0 1::0 1::1 2::0 2::1; mig-1g.10gb: 3:0 3:1; mig-3g.40gb.me: 3:2", "",
			"pool p has units that are shared differently (exclusive and time-slicing by 2): give them different names; " +
				"pool p has units that containers get differently (cdi and devices): give them different names",
		},
	} {
		t.Run(name, func(t *testing.T) {
			inv := under(machine, tc.policy)
			expectOffer(t, inv, tc.units, tc.refused)
			if got := strings.Join(inv.PolicyWarnings(), "; "); got != tc.warnings {
				t.Errorf("warnings %q, want %q", got, tc.warnings)
			}
		})
	}
}

// A part of the policy is reported as unmatched only if every device could be read, because an unreadable device
// may match it.
func TestPolicyWarningsNeedCompleteSnapshot(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{At: "p:1", IDs: []gpu.DeviceID{coretest.GPU(2)}}, Pool: "third"}}
	now := time.Unix(0, 0)
	three, two := coretest.GPUs(3), coretest.GPUs(2)
	unreadable := two
	unreadable.Excluded = []gpu.Exclusion{{Index: 2, Failure: gpu.FailureError, Reason: "Unknown Error"}}
	unmatched := []string{"p:1: selects no device of this node, or only such as earlier rules select"}
	for name, tc := range map[string]struct {
		readings []gpu.Snapshot
		want     []string
	}{
		"listed":                         {[]gpu.Snapshot{three}, nil},
		"not listed":                     {[]gpu.Snapshot{two}, unmatched},
		"no snapshot yet":                {nil, nil},
		"no driver":                      {[]gpu.Snapshot{gpu.NoDriver(gpu.DriverAbsent, "none")}, nil},
		"unreadable":                     {[]gpu.Snapshot{unreadable}, nil},
		"listed before, and lost":        {[]gpu.Snapshot{three, two}, nil},
		"listed before, and unreadable":  {[]gpu.Snapshot{three, unreadable}, nil},
		"the driver is lost":             {[]gpu.Snapshot{two, gpu.NoDriver(gpu.DriverAbsent, "none")}, nil},
		"the driver is back, not listed": {[]gpu.Snapshot{gpu.NoDriver(gpu.DriverAbsent, "none"), two}, unmatched},
	} {
		t.Run(name, func(t *testing.T) {
			s := core.NewState(cfg)
			for _, reading := range tc.readings {
				s = s.Read(cfg, now, reading)
			}
			if got := s.Allocatable.PolicyWarnings(); !slices.Equal(got, tc.want) {
				t.Errorf("warnings %q, want %q", got, tc.want)
			}
		})
	}
}

func TestNamedByPolicy(t *testing.T) {
	for _, tc := range []struct {
		pool, profile string
		want          bool
	}{
		{"gpu", "", false}, {"gpu.shared", "", false}, {"gpu.mps", "", false}, {"gpu", "1g.10gb", false}, {"big", "", true}, {"gpu.big", "", true},
		{"mig-1g.10gb.me", "1g.10gb+me", false}, {"mig-1g.10gb.shared", "1g.10gb", false}, {"mig-1g.10gb", "2g.20gb", true}, {"mig-1g.10gb", "", true},
	} {
		if u := (inventory.Unit{Pool: tc.pool, Device: gpu.Device{Profile: tc.profile}}); u.NamedByPolicy() != tc.want {
			t.Errorf("%s of profile %q: %t", tc.pool, tc.profile, !tc.want)
		}
	}
}

func TestSharingText(t *testing.T) {
	strict, limited := sliced(4), served(2)
	strict.OnePerRequest, limited.Memory, limited.Threads = true, 4<<30, 25
	for s, want := range map[inventory.Sharing][2]string{
		{}:        {"exclusive", "exclusive"},
		sliced(4): {"time-slicing by 4", "time-slicing by 4"},
		served(2): {"mps by 2", "mps by 2"},
		strict:    {"time-slicing by 4", "time-slicing by 4, one a request"},
		limited:   {"mps by 2", "mps by 2, 4096 MiB each, 25% of the threads each"},
	} {
		if got := [2]string{s.String(), s.Description()}; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// offerText formats an inventory: "gpu: 0 1::0 1::1", one pool after the other.
func offerText(inv *inventory.Allocatable) string {
	var order []string
	names := map[string][]string{}
	for u := range inv.Units() {
		if names[u.Pool] == nil {
			order = append(order, u.Pool)
		}
		name := deviceName(u.Device.ID)
		if u.Sharing.Mode != inventory.Exclusive {
			name += fmt.Sprintf("::%d", u.Replica)
		}
		names[u.Pool] = append(names[u.Pool], name)
	}
	var lines []string
	for _, pool := range order {
		lines = append(lines, pool+": "+strings.Join(names[pool], " "))
	}
	return strings.Join(lines, "; ")
}

// expectOffer compares the units and the excluded devices of an inventory, as offerText and excludedText format them.
func expectOffer(t *testing.T, inv *inventory.Allocatable, units, excluded string) {
	t.Helper()
	if got := offerText(inv); got != units {
		t.Errorf("offered %q, want %q", got, units)
	}
	if got := excludedText(inv); got != excluded {
		t.Errorf("refused %q, want %q", got, excluded)
	}
}

// excludedText lists the excluded devices with reasons.
func excludedText(inv *inventory.Allocatable) string {
	var lines []string
	for _, e := range inv.Excluded() {
		name := fmt.Sprint(e.Index)
		if e.At.GI != gpu.Whole {
			name += fmt.Sprintf(":%d", e.At.GI-1)
		}
		lines = append(lines, name+" "+e.Reason)
	}
	return strings.Join(lines, "; ")
}
