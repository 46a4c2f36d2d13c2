package core

import (
	"fmt"
	"slices"
	"strings"
)

// Policy says which devices are offered, under which names, and how often each. The zero value offers every
// device once, under its own name.
type Policy struct {
	Include []Selector // only devices that one of them selects are offered; none = all
	Rules   []Rule
	Names   []Naming
	Shares  []Share
}

// Rule says how the devices that it selects are offered. Of the rules that select a device the first counts,
// and what it leaves open is as for devices without a rule.
type Rule struct {
	Select  Selector
	Reserve string      // why the devices are not offered; "" = they are
	MIG     MIGStrategy // of the GPUs that it selects; "" = Config.MIG
	Pool    string      // "" = the default name, with a suffix if they are shared
	Sharing *Sharing    // nil = as Policy.Shares says
}

// Naming gives the devices that it selects a pool. Of several the first counts.
type Naming struct {
	Select Selector
	Pool   string
}

// Share says how the devices of a pool are shared. Of several that concern a device the first counts.
type Share struct {
	Pool    string
	Select  Selector
	First   int    // only so many of those devices, the first in canonical order; 0 = all
	Rename  string // the pool of what is shared; "" = the same pool
	Sharing Sharing
}

// DefaultPool is the pool of full GPUs, and of all units under the MIG strategy "single".
const DefaultPool = "gpu"

// MIGPool is the pool of the instances of a profile under the MIG strategy "mixed": "mig-1g.10gb.me" for
// "1g.10gb+me", NewHealth a resource name has no '+'.
func MIGPool(profile string) string { return "mig-" + strings.ReplaceAll(profile, "+", ".") }

// offer is how one device is offered.
type offer struct {
	refused string // why it is not; hidden, if that need not be said
	pool    string
	sharing Sharing
}

// hidden marks a device that is not offered NewHealth another view of the same hardware is.
const hidden = "hidden"

// offers decides on the devices of one reading, one after the other in canonical order.
type offers struct {
	InventoryConfig
	strategy map[DeviceID]MIGStrategy // by GPU
	cut      map[DeviceID]bool        // GPUs that have MIG instances
	profile  string                   // of the MIG strategy "single"
	single   []DeviceID               // the instances of that profile that it offers
	hit      map[*Selector]bool
	chosen   map[*Selector][]DeviceID // the devices that each selector decides on

	numbering   Numbering
	proposed    Numbering
	unconfirmed bool
	waiting     bool              // a device has no number yet
	indexed     bool              // a selector goes by index
	counts      []ShareAssignment // by share
	lost        map[DeviceID]bool // devices that the driver does not list any more
}

// newOffers prepares to decide on the devices of s, of which some are lost. What is bound stays so; every device has its number already.
func newOffers(s Snapshot, c InventoryConfig, was Binding, lost map[DeviceID]bool) *offers {
	o := &offers{
		InventoryConfig: c, strategy: map[DeviceID]MIGStrategy{}, cut: map[DeviceID]bool{},
		hit: map[*Selector]bool{}, chosen: map[*Selector][]DeviceID{}, lost: lost,
		numbering: was.Numbering, proposed: was.Proposed, unconfirmed: was.Unconfirmed, indexed: c.Policy.indexed(),
	}
	o.recount(s, was.Counts)
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.At.GI == Whole {
			o.strategy[d.ID] = c.MIG
			if r := o.rule(d); r != nil && r.MIG != "" {
				o.strategy[d.ID] = r.MIG
			}
		} else {
			o.cut[d.At.GPU] = true
		}
	}
	o.profile = o.commonProfile(s.Devices, was.Profile, s.Driver.State == DriverReady)
	return o
}

// indexed reports whether a selector goes by index.
func (p Policy) indexed() bool {
	by := func(s Selector) bool { return len(s.Indices) > 0 }
	return slices.ContainsFunc(p.Include, by) ||
		slices.ContainsFunc(p.Rules, func(r Rule) bool { return by(r.Select) }) ||
		slices.ContainsFunc(p.Names, func(n Naming) bool { return by(n.Select) }) ||
		slices.ContainsFunc(p.Shares, func(s Share) bool { return by(s.Select) })
}

// strategyOf is the MIG strategy for a GPU and its instances.
func (o *offers) strategyOf(d *Device) MIGStrategy {
	if s, ok := o.strategy[d.At.GPU]; ok {
		return s
	}
	return o.MIG
}

// of decides on a device.
func (o *offers) of(d *Device) offer {
	rule, view := o.rule(d), o.view(d)
	if rule != nil && (view != hidden || rule.MIG != "") { // one that decides nothing is idle
		o.choose(&rule.Select, d, false)
	}
	if why := o.kept(d, rule, view == hidden); why != "" {
		return offer{refused: why}
	}
	if view != "" {
		return offer{refused: view}
	}
	if rule == nil {
		rule = &Rule{}
	}
	pool := rule.Pool
	if pool == "" {
		pool = o.name(d)
	}
	switch {
	case rule.Sharing == nil:
		return o.share(d, pool)
	case rule.Pool == "":
		pool += rule.Sharing.Mode.Suffix()
	}
	return offer{pool: pool, sharing: *rule.Sharing}
}

// kept is why a device is kept from this agent whatever its view; "" if it is not. Of a hidden one only its ID says so.
func (o *offers) kept(d *Device, rule *Rule, isHidden bool) string {
	switch {
	case slices.Contains(o.Exclude, d.ID):
		return "ignored by configuration"
	case isHidden:
	case o.waits(d):
		o.waiting = true
		return "waits for its number, which the agents of this host share"
	case o.indexed && o.number(d).GPU < 0:
		return "has no number: that of its index belongs to another GPU; the command rebind numbers the GPUs anew"
	case o.Policy.Include != nil && !o.included(d):
		return "not among those that the policy includes"
	case rule != nil:
		return rule.Reserve
	}
	return ""
}

// rule is the one that counts for a device; nil = none.
func (o *offers) rule(d *Device) *Rule {
	for i := range o.Policy.Rules {
		if r := &o.Policy.Rules[i]; r.Select.Selects(d, o.number(d)) {
			return r
		}
	}
	return nil
}

func (o *offers) selects(s *Selector, d *Device) bool {
	if !s.Selects(d, o.number(d)) {
		return false
	}
	o.choose(s, d, false)
	return true
}

// choose notes that a selector decides on a device; which ones it decides on, only of those that depend on positions.
func (o *offers) choose(s *Selector, d *Device, counted bool) {
	o.hit[s] = true
	if (counted || len(s.Indices) > 0) && !slices.Contains(o.chosen[s], d.ID) {
		o.chosen[s] = append(o.chosen[s], d.ID)
	}
}

func (o *offers) included(d *Device) (ok bool) {
	for i := range o.Policy.Include {
		ok = o.selects(&o.Policy.Include[i], d) || ok
	}
	return ok
}

// name is the pool of a device before it is shared.
func (o *offers) name(d *Device) string {
	for i := range o.Policy.Names {
		if n := &o.Policy.Names[i]; o.selects(&n.Select, d) {
			return n.Pool
		}
	}
	if d.Profile != "" && o.strategyOf(d) == MIGMixed {
		return MIGPool(d.Profile)
	}
	return DefaultPool
}

// share shares a device of a pool if the policy says so.
func (o *offers) share(d *Device, pool string) offer {
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if s.Pool != pool || !s.Select.Selects(d, o.number(d)) || s.First > 0 && !o.take(i, d) {
			continue
		}
		o.choose(&s.Select, d, s.First > 0)
		if s.Rename != "" {
			pool = s.Rename
		}
		return offer{pool: pool, sharing: s.Sharing}
	}
	return offer{pool: pool}
}

// view is why the MIG strategy does not offer a device; "" if it does.
func (o *offers) view(d *Device) string {
	switch o.strategyOf(d) {
	case MIGMixed:
		if d.MIG {
			return o.instead(d)
		}
	case MIGSingle:
		switch {
		case d.MIG:
			return o.instead(d)
		case d.Profile == o.profile:
			o.single = append(o.single, d.ID)
		case d.Profile == "":
			return "mig-strategy single: MIG mode is off on this GPU"
		default:
			return "mig-strategy single: profile " + d.Profile + " differs from this node's " + o.profile
		}
	default: // MIGNone
		if d.Profile != "" {
			return hidden
		}
	}
	return ""
}

// instead says why a GPU in MIG mode is not offered itself.
func (o *offers) instead(gpu *Device) string {
	if o.cut[gpu.ID] {
		return hidden
	}
	return "MIG mode is on and there are no MIG instances"
}

// commonProfile is the profile that is offered under the strategy "single": the one of before while there is an instance of it,
// else the one with the most instances, the lesser name among equals; "" without any. Instances that are kept from this agent
// do not count.
func (o *offers) commonProfile(devices []Device, was string, ready bool) string {
	count := map[string]int{}
	best := ""
	for i := range devices {
		d := &devices[i]
		if d.Profile != "" && o.strategyOf(d) == MIGSingle && o.kept(d, o.rule(d), false) == "" {
			count[d.Profile]++
		}
	}
	if count[was] > 0 || !ready && len(count) == 0 {
		return was
	}
	for p, n := range count {
		if best == "" || n > count[best] || n == count[best] && p < best {
			best = p
		}
	}
	return best
}

// idle names the parts of the policy that concern no device, in their order.
func (o *offers) idle() (findings []string) {
	idle := func(s *Selector, what string) {
		if !o.hit[s] {
			findings = append(findings, fmt.Sprintf("%s: %s", s.At, what))
		}
	}
	for i := range o.Policy.Include {
		idle(&o.Policy.Include[i], "selects no device of this machine")
	}
	for i := range o.Policy.Rules {
		idle(&o.Policy.Rules[i].Select, "selects no device of this machine, or only such as earlier rules select")
	}
	for i := range o.Policy.Names {
		idle(&o.Policy.Names[i].Select, "selects no device of this machine, or only such as have a name already")
	}
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		idle(&s.Select, "there is no "+s.Pool+" on this machine to share")
	}
	return findings
}
