package core_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const mib, gib = 1 << 20, 1 << 30

// limited is a configuration that shares every full GPU by time-slicing with limits.
func limited(api inventory.API, injection inventory.Injection, limits inventory.LimitPolicy, s inventory.Sharing) core.Config {
	c := core.DefaultConfig()
	s.Mode = inventory.TimeSlicing
	c.API, c.Injection, c.MIG = api, injection, inventory.MIGMixed
	limits.On = true
	c.Policy = inventory.Policy{Limits: limits, Rules: []inventory.Rule{{Select: inventory.Selector{Full: true}, Sharing: &s}}}
	return c
}

// The limit of a share is that of the rule, or an equal part of what the GPU has without the reserve, in whole MiB. A GPU on which the limits do not fit is not offered, with
// the numbers.
func TestLimitOfShare(t *testing.T) {
	const required = inventory.LimitRequired
	for name, tc := range map[string]struct {
		memory  uint64 // of the GPU
		limits  inventory.LimitPolicy
		sharing inventory.Sharing
		want    uint64
		why     string
	}{
		"no limit":               {80 * gib, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 4}, 0, ""},
		"of the rule":            {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 3, Memory: 20 * gib, Limit: required}, 20 * gib, ""},
		"an equal part":          {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 4, Limit: inventory.LimitBestEffort}, 20224 * mib, ""},
		"rounded down":           {80*gib + 12345, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 3, Limit: required}, 26965 * mib, ""},
		"all of it":              {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 79, Memory: gib, Limit: required}, gib, ""},
		"too much":               {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 4, Memory: 20 * gib, Limit: required}, 0, "the limits of 4 shares of 20480 MiB, 81920 MiB, are more than its 81920 MiB less the reserve of 1024 MiB"},
		"too much, overcommit":   {80 * gib, inventory.LimitPolicy{Reserve: gib, Overcommit: true}, inventory.Sharing{Replicas: 4, Memory: 20 * gib, Limit: required}, 20 * gib, ""},
		"one share too much":     {80 * gib, inventory.LimitPolicy{Reserve: gib, Overcommit: true}, inventory.Sharing{Replicas: 2, Memory: 80 * gib, Limit: required}, 0, "the limit of a share, 81920 MiB, is more than its 81920 MiB less"},
		"reserve of everything":  {gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 2, Limit: required}, 0, "less than 1 MiB for each of 2 shares"},
		"no memory of its own":   {0, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 2, Limit: required}, 0, ""},
		"only by time-slicing":   {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 0, Limit: inventory.LimitNone}, 0, ""},
		"a thousand small ones":  {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 1000, Limit: required}, 80 * mib, ""},
		"the largest that fits":  {80 * gib, inventory.LimitPolicy{Reserve: gib, Overcommit: true}, inventory.Sharing{Replicas: 2, Memory: 79 * gib, Limit: required}, 79 * gib, ""},
		"1 MiB above the memory": {80 * gib, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 2, Memory: 79*gib/2 + mib, Limit: required}, 0, "the limits of 2 shares"},
	} {
		s := coretest.GPUs(1)
		s.Devices[0].Memory = tc.memory
		tc.sharing.Replicas = max(tc.sharing.Replicas, 2)
		inv := core.Build(s, health.Ledger{}, limited(inventory.DRA, inventory.Injection{}, tc.limits, tc.sharing))
		excluded := inv.Excluded()
		if tc.why != "" {
			if inv.Len() > 0 || len(excluded) != 1 || !strings.Contains(excluded[0].Reason, tc.why) {
				t.Errorf("%s: %d units, excluded %v, want %q", name, inv.Len(), excluded, tc.why)
			}
			continue
		}
		for u := range inv.Units() {
			if u.Memory != tc.want {
				t.Errorf("%s: %s has %d MiB, want %d", name, u.ID, u.Memory/mib, tc.want/mib)
			}
		}
		if inv.Len() != tc.sharing.Replicas {
			t.Errorf("%s: %d units, excluded %v", name, inv.Len(), excluded)
		}
	}
}

// supports is what a node can do for the limits of GPUs.
func supports(ids ...gpu.DeviceID) *inventory.Limits {
	l := &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}, Backend: "misc"}
	for _, id := range ids {
		l.Withheld[id] = inventory.LimitMissing{}
	}
	return l
}

// written is what a specification defines for GPUs, with devices for these limits.
func written(limits ...uint64) *inventory.CDI {
	return &inventory.CDI{Kind: "k/gpu", Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}, Usable: true, LimitKind: "k/memory-limit", Limits: limits}
}

var (
	byCDI  = inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
	byEnv  = inventory.Injection{Name: "envvar", Runtime: true}
	byAuto = inventory.Injection{Name: "auto", Runtime: true, CDI: inventory.CDIAuto}
)

// A share with a required limit takes no work while nothing can hold the limit, also not work that tolerates conditions; one with best effort takes it without.
func TestSharesWaitForLimits(t *testing.T) {
	const share = 20 * gib
	withheld := supports()
	withheld.Withheld[coretest.GPU(0)] = inventory.LimitMissing{Reason: health.ReasonNoController, Detail: "nomad.slice has no misc"}
	old := written(share)
	old.NoHook = "hook program /usr/bin/nvidia-ctk has version 1.19.1: want 1.20.1 or newer"
	unhooked := written(share)
	unhooked.WithoutHook = []gpu.DeviceID{coretest.GPU(0)}
	unusable := written(share)
	unusable.Usable, unusable.Reason = false, "containerd 1.6 has no CDI"
	const name = "k/memory-limit=20480"
	for about, tc := range map[string]struct {
		api       inventory.API
		injection inventory.Injection
		host      inventory.Host
		required  string // why a share with limit: required takes no work; "" = it does
		cause     health.Reason
		names     bool // whether best effort has the limit by a CDI device
	}{
		"hook":                            {inventory.DevicePlugin, byCDI, inventory.Host{CDI: written(share), Limits: supports(coretest.GPU(0))}, "", 0, true},
		"hook of auto":                    {inventory.DevicePlugin, byAuto, inventory.Host{CDI: written(share), Limits: supports(coretest.GPU(0))}, "", 0, true},
		"auto without CDI":                {inventory.DevicePlugin, byAuto, inventory.Host{CDI: unusable, Limits: supports(coretest.GPU(0))}, "containerd 1.6 has no CDI", health.ReasonNoLimit, false},
		"strategy without CDI":            {inventory.DevicePlugin, byEnv, inventory.Host{Limits: supports(coretest.GPU(0))}, "strategy envvar has no CDI device", health.ReasonNoLimit, false},
		"hook program too old (fence 32)": {inventory.DevicePlugin, byCDI, inventory.Host{CDI: old, Limits: supports(coretest.GPU(0))}, "has version 1.19.1: want 1.20.1", health.ReasonNoLimit, false},
		"not written yet":                 {inventory.DevicePlugin, byCDI, inventory.Host{CDI: written(), Limits: supports(coretest.GPU(0))}, "20480 MiB is written yet", health.ReasonNoCDI, false},
		"written for the pod":             {inventory.DevicePlugin, byCDI, inventory.Host{CDI: unhooked, Limits: supports(coretest.GPU(0))}, "not written yet with the hook", health.ReasonNoCDI, false},
		"withheld":                        {inventory.DevicePlugin, byCDI, inventory.Host{CDI: written(share), Limits: withheld}, "nomad.slice has no misc", health.ReasonNoController, false},
		"no part looks":                   {inventory.DevicePlugin, byCDI, inventory.Host{CDI: written(share)}, "until the agent has looked", health.ReasonNoLimit, false},
		"task":                            {inventory.Nomad, byEnv, inventory.Host{Limits: supports(coretest.GPU(0))}, "", 0, false},
		"task, withheld":                  {inventory.Nomad, byEnv, inventory.Host{Limits: withheld}, "nomad.slice has no misc", health.ReasonNoController, false},
		"task or hook":                    {inventory.Nomad, byCDI, inventory.Host{CDI: written(share), Limits: supports(coretest.GPU(0))}, "", 0, true},
		"task or hook, program too old":   {inventory.Nomad, byCDI, inventory.Host{CDI: old, Limits: supports(coretest.GPU(0))}, "has version 1.19.1", health.ReasonNoLimit, false},
	} {
		for _, mode := range []inventory.LimitMode{inventory.LimitRequired, inventory.LimitBestEffort} {
			cfg := limited(tc.api, tc.injection, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 2, Memory: share, Limit: mode})
			inv := core.Build(coretest.GPUs(1), health.Ledger{}, cfg).WithHost(tc.host, inventory.OverlapWarn)
			id := inventory.UnitID(coretest.GPU(0)) + "::0"
			want, wantName := "", mode == inventory.LimitRequired || tc.names
			if mode == inventory.LimitRequired {
				want = tc.required
			}
			u, _ := inv.Unit(id)
			if u.Health.Schedulable() != (want == "") || !strings.Contains(u.Health.String(), want) || want != "" && u.Health.Reason != tc.cause {
				t.Errorf("%s, %s: %s, want %q", about, mode, u.Health, want)
			}
			for _, reserve := range []func(...inventory.UnitID) (inventory.Plan, error){inv.Reserve, func(ids ...inventory.UnitID) (inventory.Plan, error) {
				return inv.ReserveTolerated(func(inventory.Unit, health.Health) bool { return true }, ids...)
			}} {
				p, err := reserve(id)
				if _, unhealthy := errors.AsType[*inventory.UnhealthyUnitsError](err); unhealthy != (want != "") {
					t.Errorf("%s, %s: %v", about, mode, err)
				}
				if want == "" && (p.Memory != share || slices.Contains(p.CDI, name) != (wantName && inv.UsesCDI(tc.injection))) {
					t.Errorf("%s, %s: %d MiB, CDI %v", about, mode, p.Memory/mib, p.CDI)
				}
				if p.Env != nil {
					t.Errorf("%s: variables %v", about, p.Env)
				}
			}
		}
	}
}

// A fault of the GPU that work tolerates does not hide that its limit can't be held.
func TestToleratedFaultNeedsLimit(t *testing.T) {
	fault := health.Ledger{}.Apply(health.DefaultPolicy(), testStart, health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95})
	for _, can := range []bool{false, true} {
		host := inventory.Host{CDI: written(), Limits: supports()}
		if can {
			host.Limits, host.CDI.WithoutHook = supports(coretest.GPU(0)), []gpu.DeviceID{coretest.GPU(0)}
		}
		cfg := limited(inventory.DRA, byCDI, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 2, Limit: inventory.LimitRequired})
		inv := core.Build(coretest.GPUs(1), fault, cfg).WithHost(host, inventory.OverlapWarn)
		_, err := inv.ReserveTolerated(func(inventory.Unit, health.Health) bool { return true }, inventory.UnitID(coretest.GPU(0))+"::0")
		if (err == nil) != can {
			t.Errorf("limits can be set: %t; reserved: %v", can, err)
		}
	}
}

// No device is offered until it is known whether memory can be limited; nodes whose policy has no limits wait for nothing.
func TestLimitsAwaited(t *testing.T) {
	for name, tc := range map[string]struct {
		mode   inventory.LimitMode
		limits *inventory.Limits
		want   bool
	}{
		"no limits":                  {inventory.LimitNone, nil, false},
		"required, no part looks":    {inventory.LimitRequired, nil, true},
		"required, not looked":       {inventory.LimitRequired, &inventory.Limits{}, true},
		"required, known":            {inventory.LimitRequired, supports(coretest.GPU(0)), false},
		"best effort, no part looks": {inventory.LimitBestEffort, nil, false},
		"best effort, not looked":    {inventory.LimitBestEffort, &inventory.Limits{}, true},
		"best effort, known":         {inventory.LimitBestEffort, supports(coretest.GPU(0)), false},
	} {
		cfg := limited(inventory.Nomad, byEnv, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 2, Limit: tc.mode})
		inv := core.Build(coretest.GPUs(1), health.Ledger{}, cfg).WithHost(inventory.Host{Limits: tc.limits}, inventory.OverlapWarn)
		if inv.AwaitsFirstPass() != tc.want {
			t.Errorf("%s: awaits %t", name, inv.AwaitsFirstPass())
		}
		again := core.Build(coretest.GPUs(1), health.Ledger{}, cfg).WithHost(inventory.Host{Limits: supports("GPU-x")}, inventory.OverlapWarn)
		if inv.Equal(again) {
			t.Errorf("%s: equal with other limits", name)
		}
	}
}

// Fence 36: a GPU whose MIG mode is on takes no work on shares with a required limit, with and without instances, and its instances have none. It takes work again when MIG mode is off.
func TestMIGModeHasNoLimits(t *testing.T) {
	cfg := limited(inventory.Nomad, byEnv, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 2, Limit: inventory.LimitRequired})
	for _, profiles := range [][]string{nil, {"1g.10gb"}} {
		for _, strategy := range []inventory.MIGStrategy{inventory.MIGNone, inventory.MIGMixed} {
			cfg.MIG = strategy
			s := coretest.WithMIG(coretest.GPUs(2), 1, profiles...)
			for i := range s.Devices {
				s.Devices[i].MIG = s.Devices[i].ID == coretest.GPU(1)
			}
			inv := core.Build(s, health.Ledger{}, cfg).WithHost(inventory.Host{Limits: supports(coretest.GPU(0), coretest.GPU(1))}, inventory.OverlapWarn)
			for u := range inv.Units() {
				if onMIG := u.Device.At.GPU == coretest.GPU(1); onMIG && u.Memory != 0 || !onMIG && !u.Health.Schedulable() ||
					u.Sharing.Limit == inventory.LimitRequired && onMIG && (u.Health.Reason != health.ReasonNoLimit || u.Health.Detail != "MIG mode is on") {
					t.Errorf("strategy %s, instances %v: %s has %d MiB, %s", strategy, profiles, u.ID, u.Memory/mib, u.Health)
				}
			}
		}
	}
}

// Fence 7: shares of one GPU for one container are one limit, their sum, at most what all shares of the GPU have. Fence 8: a container with shares of GPUs whose limits differ is refused where
// NVIDIA's hook sets the limit, which has one for all GPUs; the agent sets one for each.
func TestSumOfShares(t *testing.T) {
	id := func(g, n int) inventory.UnitID { return inventory.UnitID(fmt.Sprintf("%s::%d", coretest.GPU(g), n)) }
	for name, tc := range map[string]struct {
		api       inventory.API
		injection inventory.Injection
		ids       []inventory.UnitID
		want      uint64
		refused   bool
	}{
		"one":                        {inventory.DevicePlugin, byCDI, []inventory.UnitID{id(0, 1)}, 20 * gib, false},
		"two of a GPU":               {inventory.DevicePlugin, byCDI, []inventory.UnitID{id(0, 0), id(0, 2)}, 40 * gib, false},
		"all of a GPU":               {inventory.DevicePlugin, byCDI, []inventory.UnitID{id(0, 0), id(0, 1), id(0, 2), id(0, 3), id(0, 4)}, 79 * gib, false},
		"one of each":                {inventory.DevicePlugin, byCDI, []inventory.UnitID{id(0, 0), id(1, 0)}, 20 * gib, false},
		"different":                  {inventory.DevicePlugin, byCDI, []inventory.UnitID{id(0, 0), id(0, 1), id(1, 0)}, 0, true},
		"different, tasks":           {inventory.Nomad, byEnv, []inventory.UnitID{id(0, 0), id(0, 1), id(1, 0)}, 0, false},
		"different, task with names": {inventory.Nomad, byCDI, []inventory.UnitID{id(0, 0), id(0, 1), id(1, 0)}, 0, true},
	} {
		cfg := limited(tc.api, tc.injection, inventory.LimitPolicy{Overcommit: true, Reserve: gib}, inventory.Sharing{Replicas: 5, Memory: 20 * gib, Limit: inventory.LimitRequired})
		s := coretest.GPUs(2) // of 81559 MiB
		s.Devices[0].Memory, s.Devices[1].Memory = 80*gib+5, 80*gib
		built := core.Build(s, health.Ledger{}, cfg)
		host := inventory.Host{Limits: supports(coretest.GPU(0), coretest.GPU(1)), CDI: written(built.WithoutHost().HookLimits()...)}
		inv := built.WithHost(host, inventory.OverlapWarn)
		p, err := inv.Reserve(tc.ids...)
		if _, unequal := errors.AsType[*inventory.UnequalLimitsError](err); unequal != tc.refused || (err != nil) != tc.refused {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if p.Memory != tc.want {
			t.Errorf("%s: %d MiB, want %d", name, p.Memory/mib, tc.want/mib)
		}
		var names []string
		for _, n := range p.CDI {
			if strings.HasPrefix(n, "k/memory-limit=") {
				names = append(names, n)
			}
		}
		if want := []string{fmt.Sprintf("k/memory-limit=%d", tc.want/mib)}; inv.UsesCDI(tc.injection) && !tc.refused && (!slices.Equal(names, want) || p.CDI[len(p.CDI)-1] != want[0]) {
			t.Errorf("%s: CDI %v, want %v at the end", name, p.CDI, want)
		}
		if sums := inv.LimitPolicy().MemoryLimits(p.Units); name == "different, tasks" && (sums[coretest.GPU(0)] != 40*gib || sums[coretest.GPU(1)] != 20*gib) {
			t.Errorf("%s: %v", name, sums)
		}
	}
}

// A container of several GPUs gets no variables if one of the GPUs has no limits: NVIDIA's hook would end it.
func TestBestEffortOnAllGPUs(t *testing.T) {
	cfg := limited(inventory.DevicePlugin, byCDI, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 2, Limit: inventory.LimitBestEffort, Memory: 20 * gib})
	limits := supports(coretest.GPU(0))
	limits.Withheld[coretest.GPU(1)] = inventory.LimitMissing{Reason: health.ReasonNoLimit, Detail: "no probe"}
	inv := core.Build(coretest.GPUs(2), health.Ledger{}, cfg).WithHost(inventory.Host{Limits: limits, CDI: written(20*gib, 40*gib)}, inventory.OverlapWarn)
	p, err := inv.Reserve(inventory.UnitID(coretest.GPU(0))+"::0", inventory.UnitID(coretest.GPU(1))+"::0")
	if err != nil || len(p.CDI) != 2 {
		t.Errorf("CDI %v, %v", p.CDI, err)
	}
}

// The work of a claim is limited by the group of its pod, and NVIDIA's hook does not limit its containers.
func TestPodsAreNotLimitedByTheHook(t *testing.T) {
	cfg := limited(inventory.DRA, byCDI, inventory.LimitPolicy{}, inventory.Sharing{Replicas: 2, Limit: inventory.LimitRequired, Memory: 20 * gib})
	built, id := core.Build(coretest.GPUs(1), health.Ledger{}, cfg), inventory.UnitID(coretest.GPU(0))+"::0"
	if ids := built.WithoutHost().PodLimited(); !slices.Equal(ids, []gpu.DeviceID{coretest.GPU(0)}) || built.WithoutHost().HookLimits() != nil {
		t.Errorf("limited by pod: %v, by hook: %v", ids, built.WithoutHost().HookLimits())
	}
	c := written()
	host := inventory.Host{Limits: supports(coretest.GPU(0)), CDI: c}
	if _, err := built.WithHost(host, inventory.OverlapWarn).Reserve(id); err == nil {
		t.Error("reserved while the definition has the hook")
	}
	c.WithoutHook = []gpu.DeviceID{coretest.GPU(0)}
	if p, err := built.WithHost(host, inventory.OverlapWarn).Reserve(id); err != nil || len(p.CDI) != 1 || p.Memory != 20*gib {
		t.Errorf("%+v, %v", p.CDI, err)
	}
}

// Where NVIDIA's hook sets limits, which has one for all GPUs of a container, Prefer chooses the same number of shares of each GPU if there are such, in every state of the shares:
// what it chooses is given out. Without limits it chooses by load alone.
func TestPreferredSharesHaveOneLimit(t *testing.T) {
	const gpus, shares = 3, 3
	host := inventory.Host{Limits: supports(coretest.GPU(0), coretest.GPU(1), coretest.GPU(2)), CDI: written(20*gib, 40*gib, 60*gib)}
	host.CDI.Defined = append(host.CDI.Defined, coretest.GPU(2))
	for _, packed := range []bool{false, true} {
		cfg := limited(inventory.DevicePlugin, byCDI, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: shares, Memory: 20 * gib, Limit: inventory.LimitRequired})
		cfg.Packed = packed
		inv := core.Build(coretest.GPUs(gpus), health.Ledger{}, cfg).WithHost(host, inventory.OverlapWarn)
		for state := range 1 << (gpus * shares) {
			var available []inventory.UnitID
			free := make([]int, gpus)
			for i := range gpus * shares {
				if state>>i&1 == 1 {
					available = append(available, inventory.UnitID(fmt.Sprintf("%s::%d", coretest.GPU(i/shares), i%shares)))
					free[i/shares]++
				}
			}
			for n := 1; n <= len(available); n++ {
				ids := inv.Prefer(available, nil, n)
				if _, err := inv.Reserve(ids...); len(ids) != n || (err == nil) != haveEqual(free, n) {
					t.Fatalf("packed %t: %d of %v: %v: %v", packed, n, available, ids, err)
				}
			}
		}
	}
}

// haveEqual reports whether GPUs with these free shares have n, the same number of each that has any.
func haveEqual(free []int, n int) bool {
	for each := 1; each <= n; each++ {
		enough := 0
		for _, f := range free {
			if f >= each {
				enough++
			}
		}
		if n%each == 0 && enough >= n/each {
			return true
		}
	}
	return false
}

// Shares of one limit are many of few GPUs with packed, else few of many; required ones count; and the reason why others are not chosen is in the explanation.
func TestPreferEqualShares(t *testing.T) {
	host := inventory.Host{Limits: supports(coretest.GPU(0), coretest.GPU(1)), CDI: written(20*gib, 40*gib, 60*gib, 80*gib)}
	share := func(g, n int) inventory.UnitID {
		return inventory.UnitID(fmt.Sprintf("%s::%d", coretest.GPU(g), n))
	}
	all := []inventory.UnitID{share(0, 0), share(0, 1), share(0, 2), share(1, 0), share(1, 1), share(1, 2)}
	for name, tc := range map[string]struct {
		packed    bool
		available []inventory.UnitID
		required  []inventory.UnitID
		n         int
		method    inventory.Method
		want      []inventory.UnitID
	}{
		"by load":         {false, all, nil, 4, inventory.MethodShared, []inventory.UnitID{share(0, 0), share(0, 1), share(1, 0), share(1, 1)}},
		"of one GPU":      {false, all, nil, 3, inventory.MethodEqual, []inventory.UnitID{share(0, 0), share(0, 1), share(0, 2)}},
		"of the required": {false, all, []inventory.UnitID{share(1, 1)}, 3, inventory.MethodEqual, []inventory.UnitID{share(1, 0), share(1, 1), share(1, 2)}},
		"packed":          {true, all, nil, 4, inventory.MethodEqual, []inventory.UnitID{share(0, 0), share(0, 1), share(1, 0), share(1, 1)}},
		"there are none":  {false, all[1:5], nil, 3, inventory.MethodShared, []inventory.UnitID{share(0, 1), share(0, 2), share(1, 0)}},
	} {
		cfg := limited(inventory.DevicePlugin, byCDI, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 3, Memory: 20 * gib, Limit: inventory.LimitRequired})
		cfg.Packed = tc.packed
		inv := core.Build(coretest.GPUs(2), health.Ledger{}, cfg).WithHost(host, inventory.OverlapWarn)
		p := inv.ExplainPreference(tc.available, tc.required, tc.n)
		if p.Method != tc.method || !slices.Equal(p.Units, tc.want) {
			t.Errorf("%s: %v, %s; want %v, %s", name, p.Units, p.Method, tc.want, tc.method)
		}
		if tc.method == inventory.MethodEqual && len(p.GPUs) == 1 && (len(p.Others) != 1 || !strings.Contains(p.Others[0].Why, "the same number of shares of each")) {
			t.Errorf("%s: %+v", name, p.Others)
		}
	}
}

// GPUs of one pool whose shares have different limits are not chosen together.
func TestPreferSharesOfOneSize(t *testing.T) {
	s := coretest.GPUs(3)
	s.Devices[2].Memory = 41 * gib
	cfg := limited(inventory.DevicePlugin, byCDI, inventory.LimitPolicy{Reserve: gib}, inventory.Sharing{Replicas: 2, Limit: inventory.LimitRequired})
	built := core.Build(s, health.Ledger{}, cfg)
	host := inventory.Host{Limits: supports(coretest.GPU(0), coretest.GPU(1), coretest.GPU(2)), CDI: written(built.WithoutHost().HookLimits()...)}
	host.CDI.Defined = append(host.CDI.Defined, coretest.GPU(2))
	inv := built.WithHost(host, inventory.OverlapWarn)
	var available []inventory.UnitID
	for u := range inv.Units() {
		if u.ID != inventory.UnitID(coretest.GPU(0))+"::0" {
			available = append(available, u.ID)
		}
	}
	p, err := inv.Reserve(inv.Prefer(available, nil, 2)...)
	if err != nil || len(p.Devices) != 2 || p.Devices[0].ID != coretest.GPU(0) || p.Devices[1].ID != coretest.GPU(1) {
		t.Errorf("%+v, %v; want one share of each large GPU", p.Units, err)
	}
}
