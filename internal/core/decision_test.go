package core_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// withPlaces gives each selector of a policy a place of its own.
func withPlaces(p *inventory.Policy) {
	n := 0
	place := func(s *inventory.Selector, what string, i int) {
		n++
		s.At = fmt.Sprintf("p.yaml:%d: %s[%d]", n, what, i)
	}
	for i := range p.Include {
		place(&p.Include[i], "include", i)
	}
	for i := range p.Rules {
		place(&p.Rules[i].Select, "rules", i)
	}
	for i := range p.Names {
		place(&p.Names[i].Select, "names", i)
	}
	for i := range p.Shares {
		place(&p.Shares[i].Select, "sharing", i)
	}
}

// Decisions are those of the inventory, for any policy: each device has the pool, sharing and injection, or the reason. What is named as
// the decider decides: without the parts of the policy that decide nothing about any device, every device is offered as before. Each
// part that selects a device either decides something about it, or is listed with a reason.
func TestDecisionsAreThoseOfTheInventory(t *testing.T) {
	for seed := range uint64(3000) {
		g := newGenerator(seed)
		s := g.snapshot()
		cfg := g.config(s)
		withPlaces(&cfg.Policy)
		for i := range cfg.Policy.Rules {
			if r := &cfg.Policy.Rules[i]; g.oneIn(3) {
				r.Injection = &inventory.Injection{Name: r.Select.At, Nodes: true}
			}
		}
		state := core.NewState(cfg).Read(cfg, testStart, s)
		decisions := state.Decisions()
		verifyDecisions(t, state, decisions)
		verifyMatches(t, state, cfg, decisions)
		decided := map[string]bool{}
		for _, d := range decisions {
			for _, at := range []string{d.Rule, d.By.At, d.MIGBy.At, d.BasePoolBy.At, d.PoolBy.At, d.SharingBy.At, d.InjectionBy.At} {
				decided[at] = true
			}
		}
		less := cfg
		p := &less.Policy
		p.Rules = slices.DeleteFunc(slices.Clone(p.Rules), func(r inventory.Rule) bool { return !decided[r.Select.At] })
		p.Names = slices.DeleteFunc(slices.Clone(p.Names), func(n inventory.Naming) bool { return !decided[n.Select.At] })
		p.Shares = slices.DeleteFunc(slices.Clone(p.Shares), func(s inventory.Share) bool { return !decided[s.Select.At] })
		with, without := core.Build(state.Snapshot, health.Ledger{}, cfg).WithoutHost(), core.Build(state.Snapshot, health.Ledger{}, less).WithoutHost()
		if !slices.Equal(slices.Collect(with.Units()), slices.Collect(without.Units())) || !slices.Equal(with.Excluded(), without.Excluded()) {
			t.Errorf("parts of the policy decide and are not named: of %+v\nremain %+v", cfg.Policy, less.Policy)
		}
		if t.Failed() {
			t.Fatalf("seed %d: %d devices, policy %+v", seed, len(s.Devices), cfg.Policy)
		}
	}
}

// verifyDecisions compares decisions with the inventory.
func verifyDecisions(t *testing.T, s core.State, decisions []inventory.Decision) {
	t.Helper()
	if len(decisions) != len(s.Snapshot.Devices) {
		t.Fatalf("%d decisions about %d devices", len(decisions), len(s.Snapshot.Devices))
	}
	excluded := map[gpu.Placement]string{}
	for _, e := range s.Allocatable.Excluded() {
		excluded[e.At] = e.Reason
	}
	offered := map[gpu.DeviceID]inventory.Unit{}
	for u := range s.Allocatable.Devices() {
		offered[u.Device.ID] = u
	}
	for i, d := range decisions {
		u, isOffered := offered[d.Device.ID]
		reason, isExcluded := excluded[d.Device.At]
		outcome := map[bool]inventory.Outcome{isOffered: inventory.Offered, isExcluded: inventory.NotOffered, !isOffered && !isExcluded: inventory.Represented}[true]
		if d.Device != s.Snapshot.Devices[i] || d.Outcome != outcome || d.Reason != reason || d.Pool != u.Pool || d.Sharing != u.Sharing || d.Injection != u.Injection {
			t.Errorf("decision %+v, but the inventory has %q of pool %q, %s, %+v, reason %q", d, outcome, u.Pool, u.Sharing, u.Injection, reason)
		}
	}
}

// verifyMatches: each part of the policy that selects a device decides, or is among the others with a reason.
func verifyMatches(t *testing.T, s core.State, cfg core.Config, decisions []inventory.Decision) {
	t.Helper()
	for i := range decisions {
		d := &decisions[i]
		number, _ := s.Binding.Numbering.Of(d.Device.ID)
		deciders := []string{d.Rule, d.By.At, d.MIGBy.At, d.BasePoolBy.At, d.PoolBy.At, d.SharingBy.At, d.InjectionBy.At}
		check := func(sel *inventory.Selector) {
			other := slices.IndexFunc(d.Others, func(o inventory.OtherMatch) bool { return o.At == sel.At })
			switch selects := sel.Selects(&d.Device, number); {
			case !selects && (other >= 0 || slices.Contains(deciders, sel.At) && d.Device.At.GI == gpu.Whole):
				t.Errorf("%s does not select %s, and has a part in its decision: %+v", sel.At, d.Device.ID, d)
			case selects && (other >= 0) == slices.Contains(deciders, sel.At) && d.Outcome == inventory.Offered:
				t.Errorf("%s selects %s: it must decide or be listed, not both: %+v", sel.At, d.Device.ID, d)
			case other >= 0 && d.Others[other].Why == "":
				t.Errorf("no reason why %s does not decide about %s", sel.At, d.Device.ID)
			}
		}
		for j := range cfg.Policy.Rules {
			check(&cfg.Policy.Rules[j].Select)
		}
		for j := range cfg.Policy.Names {
			check(&cfg.Policy.Names[j].Select)
		}
		for j := range cfg.Policy.Shares {
			check(&cfg.Policy.Shares[j].Select)
		}
	}
}

// The deciders and the reasons of one policy, in words.
func TestDecisions(t *testing.T) {
	at := func(line int, of string) string { return fmt.Sprintf("p.yaml:%d: %s", line, of) }
	index := func(at string, n int) inventory.Selector {
		return inventory.Selector{At: at, Indices: []gpu.DeviceIndex{{GPU: n, Instance: -1}}}
	}
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Exclude = inventory.MIGMixed, []gpu.DeviceID{coretest.GPU(5)}
	half := inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}
	cfg.Policy = inventory.Policy{
		Rules: []inventory.Rule{
			{Select: index(at(1, "rules[0]"), 0), NotOffered: "reserved by p.yaml:1"},
			{Select: index(at(2, "rules[1]"), 0), Pool: "late"},
			{Select: index(at(3, "rules[2]"), 1), Pool: "mine"},
		},
		Names:  []inventory.Naming{{Select: inventory.Selector{At: at(4, "names[0]"), Full: true}, Pool: "big"}},
		Shares: []inventory.Share{{Pool: "big", First: 1, Select: inventory.Selector{At: at(5, "sharing[0]")}, Sharing: half, Rename: "big.shared"}},
	}
	s := coretest.WithMIG(coretest.GPUs(6), 4, "1g.10gb")
	got := map[gpu.DeviceID]inventory.Decision{}
	for _, d := range core.NewState(cfg).Read(cfg, testStart, s).Decisions() {
		got[d.Device.ID] = d
	}
	instance := s.Devices[slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.Profile != "" })].ID
	for id, want := range map[gpu.DeviceID]string{
		coretest.GPU(0): `excluded {rule p.yaml:1: rules[0]} reserved by p.yaml:1; pool { }, sharing { }; others [{{rule p.yaml:2: rules[1]} p.yaml:1: rules[0] selects the device first} {{name p.yaml:4: names[0]} the device is not offered} {{sharing p.yaml:5: sharing[0]} the device is not offered}]`,
		coretest.GPU(1): `offered {rule p.yaml:3: rules[2]} ; pool mine{rule p.yaml:3: rules[2]}, sharing { }; others [{{name p.yaml:4: names[0]} p.yaml:3: rules[2] names the pool} {{sharing p.yaml:5: sharing[0]} it is about pool big}]`,
		coretest.GPU(2): `offered { } ; pool big.shared{sharing p.yaml:5: sharing[0]}, sharing {sharing p.yaml:5: sharing[0]}; others []`,
		coretest.GPU(3): `offered { } ; pool big{name p.yaml:4: names[0]}, sharing { }; others [{{sharing p.yaml:5: sharing[0]} it shares 1 devices of pool big, which are ` + string(coretest.GPU(2)) + `}]`,
		coretest.GPU(4): `hidden {mig strategy } ; pool { }, sharing { }; others [{{name p.yaml:4: names[0]} the device is not offered} {{sharing p.yaml:5: sharing[0]} the device is not offered}]`,
		instance:        `offered {mig strategy } ; pool mig-1g.10gb{mig strategy }, sharing { }; others [{{sharing p.yaml:5: sharing[0]} it is about pool big}]`,
		coretest.GPU(5): `excluded {exclude } ignored by configuration; pool { }, sharing { }; others [{{name p.yaml:4: names[0]} the device is not offered} {{sharing p.yaml:5: sharing[0]} the device is not offered}]`,
	} {
		d := got[id]
		if text := fmt.Sprintf("%s %v %s; pool %s%v, sharing %v; others %v", d.Outcome, d.By, d.Reason, d.Pool, d.PoolBy, d.SharingBy, d.Others); text != want {
			t.Errorf("%s:\n%s, want\n%s", id, text, want)
		}
	}
}
