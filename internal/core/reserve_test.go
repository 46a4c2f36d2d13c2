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

func unitIDs(inv *inventory.Allocatable) []inventory.UnitID {
	return idsOf(slices.Collect(inv.Units()))
}

func idsOf(units []inventory.Unit) (ids []inventory.UnitID) {
	for _, u := range units {
		ids = append(ids, u.ID)
	}
	return ids
}

// sharedGPUs returns three GPUs, all shared as in s.
func sharedGPUs(s inventory.Sharing, packed bool) *inventory.Allocatable {
	cfg := core.DefaultConfig()
	cfg.Packed = packed
	cfg.Policy.Rules = []inventory.Rule{{Sharing: &s}}
	return core.Build(coretest.GPUs(3), health.Ledger{}, cfg).WithoutHost()
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
func unitNames[T ~string](ids []T) string {
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

func TestReserve(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Injection.Nodes = inventory.MIGMixed, true
	lost := health.Observation{At: gpuAt(3), Kind: health.Lost, Detail: "GPU is lost"}
	inv := core.Build(coretest.WithMIG(coretest.GPUs(4), 1, "1g.10gb"), health.Ledger{}.Apply(cfg.Health, time.Unix(0, 0), lost), cfg).WithoutHost()
	gpus := coretest.GPU(0) + "," + coretest.GPU(2)
	for _, tc := range []struct {
		ids         []inventory.UnitID
		units       string
		gpus        gpu.DeviceID // of the devices, with commas
		nodes, errs string
	}{
		{ // the node has no nvidia-modeset
			parseUnits("2 0 2"), "0 2", gpus, "/dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidia0 /dev/nvidia2 /dev/nvidiactl", "",
		},
		{
			[]inventory.UnitID{inventory.UnitID(coretest.Instance(1, 0))}, "1:0", coretest.Instance(1, 0),
			"/dev/nvidia-caps/nvidia-cap200 /dev/nvidia-caps/nvidia-cap201 /dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidia1 /dev/nvidiactl", "",
		},
		{
			append(parseUnits("3 0"), "GPU-y", "GPU-x"), "", "", "",
			"unknown device IDs: GPU-x,GPU-y; unhealthy devices: " + string(coretest.GPU(3)) + " is lost: GPU is lost (GPU is lost)" +
				" since 1970-01-01T00:00Z; action: check slot and power, reboot the node; cleared by: an answer from the GPU, or a reboot",
		},
		{nil, "", "", "", ""},
	} {
		p, err := inv.Reserve(tc.ids...)
		if text := strings.TrimPrefix(fmt.Sprint(err), "<nil>"); text != tc.errs {
			t.Errorf("%v: error\n%s\nwant\n%s", tc.ids, text, tc.errs)
		}
		want := inventory.Plan{Units: p.Units, Devices: p.Devices}
		if tc.gpus != "" {
			want.IDs, want.Injection = strings.Split(string(tc.gpus), ","), cfg.Injection
		}
		for _, path := range strings.Fields(tc.nodes) {
			want.Nodes = append(want.Nodes, inventory.DeviceNode{Path: path, Permissions: "rw"})
		}
		if diff := cmp.Diff(want, p); diff != "" || unitNames(idsOf(p.Units)) != tc.units {
			t.Errorf("%v: units %s: %s", tc.ids, unitNames(idsOf(p.Units)), diff)
		}
	}
	if _, err := (&inventory.Allocatable{}).Reserve("GPU-x"); err == nil {
		t.Error("a unit of nothing is reserved")
	}
}

func TestReserveShares(t *testing.T) {
	limited := served(10)
	limited.Memory, limited.Threads = 4<<30+1<<20, 25
	strict := sliced(4)
	strict.OnePerRequest = true
	for name, tc := range map[string]struct {
		sharing inventory.Sharing
		ids     string
		gpus    string // of the plan
		env     []inventory.EnvVar
		mps     string
		err     string
	}{
		"one":                              {sliced(4), "1::2", "1", nil, "", ""},
		"two of one GPU are the GPU once":  {sliced(4), "1::2 1::0", "1", nil, "", ""},
		"all of all":                       {sliced(2), "2::1 0::1 1::0 0::0 2::0 1::1", "0 1 2", nil, "", ""},
		"10 is after 9 and before nothing": {sliced(11), "2::10 0::9 0::10", "0 2", nil, "", ""},
		"one, twice":                       {strict, "0::1 0::1", "0", nil, "", ""},
		"one per request, two asked for": {
			strict, "0::1 0::2", "", nil, "", "2 units of gpu.shared, whose devices are shared: maximum request size for shared resources is 1",
		},
		"one per request, of two GPUs": {
			strict, "0::1 1::1 2::1", "", nil, "", "3 units of gpu.shared, whose devices are shared: maximum request size for shared resources is 1",
		},
		"MPS": {served(10), "0::9", "0", nil, "gpu.mps", ""},
		"MPS, limited": {limited, "2::3", "2", []inventory.EnvVar{
			{Name: "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", Value: "25"}, {Name: "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", Value: "0=4097M"},
		}, "gpu.mps", ""},
		"MPS, two asked for": {served(10), "0::9 0::8", "", nil, "", "2 units of gpu.mps, whose devices are shared: maximum request size for shared resources is 1"},
		"the GPU itself":     {sliced(4), "0", "", nil, "", "unknown device IDs: " + string(coretest.GPU(0))},
		"beyond the last":    {sliced(4), "0::3 0::4", "", nil, "", "unknown device IDs: " + string(coretest.GPU(0)) + "::4"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := inventory.Host{MPS: []string{"gpu.mps"}}
			inv := sharedGPUs(tc.sharing, false).WithHost(cfg, inventory.OverlapWarn)
			asked := parseUnits(tc.ids)
			p, err := inv.Reserve(asked...)
			if text := fmt.Sprint(err); err != nil && text != tc.err || err == nil && tc.err != "" {
				t.Fatalf("error %q, want %q", text, tc.err)
			}
			if diff := cmp.Diff(tc.env, p.Env); diff != "" || p.MPS != tc.mps || unitNames(p.IDs) != tc.gpus {
				t.Errorf("GPUs %s, MPS %q, environment: %s", unitNames(p.IDs), p.MPS, diff)
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
	// Errors of single units come before the error that there are too many.
	down := sharedGPUs(served(2), false).WithHost(inventory.Host{}, inventory.OverlapWarn)
	_, err := down.Reserve(parseUnits("0::0 0::1 1::7")...)
	var unhealthy *inventory.UnhealthyUnitsError
	var unknown *inventory.UnknownUnitsError
	if !errors.As(err, &unhealthy) || unitNames(idsOf(unhealthy.Units)) != "0::0 0::1" || !errors.As(err, &unknown) || unitNames(unknown.IDs) != "1::7" {
		t.Errorf("%v", err)
	}
}

func TestPrefer(t *testing.T) {
	// Two islands of four: 0-3 and 4-7 have NVLinks to each other. Odd GPUs are on another NUMA node. GPU 8 has two instances.
	s := coretest.WithMIG(coretest.GPUs(9), 8, "1g.10gb", "1g.10gb")
	island := map[gpu.DeviceID]int{}
	for i := range s.Devices {
		d := &s.Devices[i]
		island[d.ID], d.NUMANode = d.Index/4, d.Index%2
	}
	for i, l := range s.Links {
		if island[l.A] != island[l.B] {
			s.Links[i].NVLinks = 0
		}
	}
	inv := under(s, inventory.Policy{})
	instances := []inventory.UnitID{inventory.UnitID(coretest.Instance(8, 0)), inventory.UnitID(coretest.Instance(8, 1))}
	for _, tc := range []struct {
		name                string
		available, required []inventory.UnitID
		n                   int
		want                string
	}{
		{"a whole island", parseUnits("7 6 5 4 3 2 0"), nil, 4, "4 5 6 7"},
		{"two of one island", parseUnits("0 4 5"), nil, 2, "4 5"},
		{"one NUMA node of an island", parseUnits("4 1 2 3"), nil, 2, "1 3"},
		{"required decides", parseUnits("0 1 2 3 4 5 6 7"), parseUnits("6"), 3, "4 5 6"},
		{"one", parseUnits("3 2"), nil, 1, "2"},
		{"all", parseUnits("1 0"), nil, 2, "0 1"},
		{"more than there are", parseUnits("1 0"), nil, 5, "0 1"},
		{"none", parseUnits("1 0"), nil, 0, ""},
		{"negative", parseUnits("1 0"), parseUnits("1"), -1, ""},
		{"required beyond n", parseUnits("0 1 2"), parseUnits("1 2"), 1, "1"},
		{"unknown and repeated", append(parseUnits("1 1 0"), "GPU-x"), nil, 2, "0 1"},
		{"required not among available", parseUnits("0"), parseUnits("5"), 2, "0 5"},
		{"instances of one GPU", append(instances, parseUnits("0 1")...), nil, 2, "8:0 8:1"},
	} {
		for range 2 {
			if got := unitNames(inv.Prefer(tc.available, tc.required, tc.n)); got != tc.want {
				t.Errorf("%s: %v: got %s, want %s", tc.name, tc.available, got, tc.want)
			}
			rand.Shuffle(len(tc.available), func(i, j int) { tc.available[i], tc.available[j] = tc.available[j], tc.available[i] })
		}
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

// A unit that takes no new work is reserved for work that tolerates each of its conditions, but never a lost GPU, one in maintenance, one
// of another agent or one without a CDI definition.
func TestReserveTolerated(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(0))
	observe := func(all ...health.Observation) health.Ledger {
		for i := range all {
			all[i].At = at
		}
		return health.Ledger{}.Apply(health.DefaultPolicy(), testStart, all...)
	}
	xid := health.Observation{Kind: health.XID, Code: 95}
	other := health.Observation{Kind: health.XID, Code: 64}
	lost := health.Observation{Kind: health.Lost}
	conf := core.DefaultConfig()
	conf.Injection = inventory.Injection{CDI: inventory.CDIRequired}
	defined := &inventory.CDI{Kind: "k/gpu", Defined: []gpu.DeviceID{coretest.GPU(0)}}
	tolerate := func(causes ...string) func(inventory.Unit, health.Health) bool {
		return func(_ inventory.Unit, h health.Health) bool { return slices.Contains(causes, h.Cause()) }
	}
	for name, c := range map[string]struct {
		ledger    health.Ledger
		host      inventory.Host
		tolerates func(inventory.Unit, health.Health) bool
		want      string // in the error; "" = a plan
	}{
		"healthy":                  {host: inventory.Host{CDI: defined}, tolerates: tolerate()},
		"not tolerated":            {observe(xid), inventory.Host{CDI: defined}, tolerate(), "XID 95"},
		"tolerated":                {observe(xid), inventory.Host{CDI: defined}, tolerate("XID_95"), ""},
		"one of two conditions":    {observe(xid, other), inventory.Host{CDI: defined}, tolerate("XID_95"), "XID 64"},
		"both":                     {observe(xid, other), inventory.Host{CDI: defined}, tolerate("XID_95", "XID_64"), ""},
		"lost":                     {observe(lost), inventory.Host{CDI: defined}, tolerate("LOST"), "GPU is lost"},
		"lost, hidden or not":      {observe(xid, lost), inventory.Host{CDI: defined}, tolerate("XID_95", "LOST"), "GPU is lost"},
		"no CDI definition":        {observe(xid), inventory.Host{CDI: &inventory.CDI{Kind: "k/gpu", Problem: "disk full"}}, tolerate("XID_95"), "disk full"},
		"no CDI definition, alone": {host: inventory.Host{CDI: &inventory.CDI{Kind: "k/gpu", Problem: "disk full"}}, tolerates: tolerate("CDI_UNDEFINED"), want: "disk full"},
		"another agent's": {host: inventory.Host{CDI: defined, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}}},
			tolerates: tolerate("OVERLAP"), want: "offered by another agent (nomad-gpu)"},
		"another agent's, with a fault": {observe(xid), inventory.Host{CDI: defined, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}}},
			tolerate("XID_95", "OVERLAP"), "offered by another agent (nomad-gpu)"},
		"not recorded, with a fault": {observe(xid), inventory.Host{CDI: defined, Recorded: inventory.Recorded{Reason: "perhaps"}},
			tolerate("XID_95", "OVERLAP"), "offered by another agent (perhaps)"},
		"moves here, with a fault": {observe(xid), inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Pending: "to nomad"}}}}, tolerate("XID_95", "MOVING"), "moves (to nomad)"},
		"not proved so far": {host: inventory.Host{CDI: defined, Proofs: &inventory.Proofs{Withheld: map[gpu.DeviceID]string{at.GPU: "not proved since the boot"}}},
			tolerates: tolerate("PROVING"), want: "withheld for a proof for a short time (not proved since the boot)"},
		"not decided whether it is to be proved": {host: inventory.Host{CDI: defined, Proofs: &inventory.Proofs{}}, tolerates: tolerate("PROVING"),
			want: "withheld for a proof for a short time (until its record is read)"},
		"another GPU is not proved so far": {host: inventory.Host{CDI: defined, Proofs: &inventory.Proofs{Withheld: map[gpu.DeviceID]string{"GPU-x": "since the boot", at.GPU: ""}}}, tolerates: tolerate()},
		"taken for a proof": {host: inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Taken: inventory.Proof}}}}, tolerates: tolerate("PROVING"), want: "withheld for a proof"},
		"taken for a proof, with a fault, and moves away": {observe(xid), inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Taken: inventory.Proof, Pending: "to nomad", Draining: true}}}},
			tolerate("XID_95", "PROVING", "MOVING"), "withheld for a proof"},
		"moves away, with a fault": {observe(xid), inventory.Host{CDI: defined, Ownership: inventory.Ownership{
			GPUs: []inventory.GPUOwner{{GPU: at.GPU, API: inventory.DRA, Local: true, Pending: "to nomad", Draining: true}}}}, tolerate("XID_95"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			inv := core.Build(coretest.GPUs(1), c.ledger, conf).WithHost(c.host, inventory.OverlapRefuse)
			plan, err := inv.ReserveTolerated(c.tolerates, inventory.UnitID(coretest.GPU(0)))
			if c.want != "" {
				if _, ok := errors.AsType[*inventory.UnhealthyUnitsError](err); !ok || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"k/gpu=" + string(coretest.GPU(0))}, plan.CDI); diff != "" {
				t.Error(diff)
			}
		})
	}
}
