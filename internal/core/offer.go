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

// offerBuilder decides on the devices of one reading, one after the other in canonical order.
type offerBuilder struct {
	InventoryConfig
	strategy      map[DeviceID]MIGStrategy // by GPU
	partitioned   map[DeviceID]bool        // GPUs that have MIG instances
	profile       string                   // of the MIG strategy "single"
	singleDevices []DeviceID               // the instances of that profile that it offers
	matched       map[*Selector]bool
	chosen        map[*Selector][]DeviceID // the devices that each selector decides on

	numbering    Numbering
	proposed     Numbering
	unconfirmed  bool
	awaitsNumber bool              // a device has no number yet
	indexed      bool              // a selector goes by index
	assignments  []ShareAssignment // by share
	lost         map[DeviceID]bool // devices that the driver does not list any more
}

// newOfferBuilder prepares to decide on the devices of s, of which some are lost. What is bound stays so; every device has its number already.
func newOfferBuilder(s Snapshot, c InventoryConfig, was Binding, lost map[DeviceID]bool) *offerBuilder {
	o := &offerBuilder{
		InventoryConfig: c, strategy: map[DeviceID]MIGStrategy{}, partitioned: map[DeviceID]bool{},
		matched: map[*Selector]bool{}, chosen: map[*Selector][]DeviceID{}, lost: lost,
		numbering: was.Numbering, proposed: was.Proposed, unconfirmed: was.Unconfirmed, indexed: c.Policy.indexed(),
	}
	o.restoreAssignments(s, was.Counts)
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.At.GI == Whole {
			o.strategy[d.ID] = c.MIG
			if r := o.rule(d); r != nil && r.MIG != "" {
				o.strategy[d.ID] = r.MIG
			}
		} else {
			o.partitioned[d.At.GPU] = true
		}
	}
	o.profile = o.chooseProfile(s.Devices, was.Profile, s.Driver.State == DriverReady)
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
func (o *offerBuilder) strategyOf(d *Device) MIGStrategy {
	if s, ok := o.strategy[d.At.GPU]; ok {
		return s
	}
	return o.MIG
}

// decide decides on a device.
func (o *offerBuilder) decide(d *Device) offer {
	rule, view := o.rule(d), o.migVisibility(d)
	if rule != nil && (view != hidden || rule.MIG != "") { // one that decides nothing is idle
		o.recordMatch(&rule.Select, d, false)
	}
	if why := o.excludedReason(d, rule, view == hidden); why != "" {
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
		pool = o.poolName(d)
	}
	switch {
	case rule.Sharing == nil:
		return o.sharedOffer(d, pool)
	case rule.Pool == "":
		pool += rule.Sharing.Mode.Suffix()
	}
	return offer{pool: pool, sharing: *rule.Sharing}
}

// excludedReason is why a device is kept from this agent whatever its view; "" if it is not. Of a hidden one only its ID says so.
func (o *offerBuilder) excludedReason(d *Device, rule *Rule, isHidden bool) string {
	switch {
	case slices.Contains(o.Exclude, d.ID):
		return "ignored by configuration"
	case isHidden:
	case o.hasProposedNumber(d):
		o.awaitsNumber = true
		return "waits for its number, which the agents of this host share"
	case o.indexed && o.number(d).GPU < 0:
		return "has no number: that of its index belongs to another GPU; the command rebind numbers the GPUs anew"
	case o.Policy.Include != nil && !o.isIncluded(d):
		return "not among those that the policy includes"
	case rule != nil:
		return rule.Reserve
	}
	return ""
}

// rule is the one that counts for a device; nil = none.
func (o *offerBuilder) rule(d *Device) *Rule {
	for i := range o.Policy.Rules {
		if r := &o.Policy.Rules[i]; r.Select.Selects(d, o.number(d)) {
			return r
		}
	}
	return nil
}

func (o *offerBuilder) selects(s *Selector, d *Device) bool {
	if !s.Selects(d, o.number(d)) {
		return false
	}
	o.recordMatch(s, d, false)
	return true
}

// recordMatch notes that a selector decides on a device; which ones it decides on, only of those that depend on positions.
func (o *offerBuilder) recordMatch(s *Selector, d *Device, counted bool) {
	o.matched[s] = true
	if (counted || len(s.Indices) > 0) && !slices.Contains(o.chosen[s], d.ID) {
		o.chosen[s] = append(o.chosen[s], d.ID)
	}
}

func (o *offerBuilder) isIncluded(d *Device) (ok bool) {
	for i := range o.Policy.Include {
		ok = o.selects(&o.Policy.Include[i], d) || ok
	}
	return ok
}

// poolName is the pool of a device before it is shared.
func (o *offerBuilder) poolName(d *Device) string {
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

// sharedOffer shares a device of a pool if the policy says so.
func (o *offerBuilder) sharedOffer(d *Device, pool string) offer {
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if s.Pool != pool || !s.Select.Selects(d, o.number(d)) || s.First > 0 && !o.assign(i, d) {
			continue
		}
		o.recordMatch(&s.Select, d, s.First > 0)
		if s.Rename != "" {
			pool = s.Rename
		}
		return offer{pool: pool, sharing: s.Sharing}
	}
	return offer{pool: pool}
}

// migVisibility is why the MIG strategy does not offer a device; "" if it does.
func (o *offerBuilder) migVisibility(d *Device) string {
	switch o.strategyOf(d) {
	case MIGMixed:
		if d.MIG {
			return o.parentVisibility(d)
		}
	case MIGSingle:
		switch {
		case d.MIG:
			return o.parentVisibility(d)
		case d.Profile == o.profile:
			o.singleDevices = append(o.singleDevices, d.ID)
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

// parentVisibility says why a GPU in MIG mode is not offered itself.
func (o *offerBuilder) parentVisibility(parent *Device) string {
	if o.partitioned[parent.ID] {
		return hidden
	}
	return "MIG mode is on and there are no MIG instances"
}

// chooseProfile is the profile that is offered under the strategy "single": the one of before while there is an instance of it,
// else the one with the most instances, the lesser name among equals; "" without any. Instances that are kept from this agent
// do not count.
func (o *offerBuilder) chooseProfile(devices []Device, was string, ready bool) string {
	count := map[string]int{}
	best := ""
	for i := range devices {
		d := &devices[i]
		if d.Profile != "" && o.strategyOf(d) == MIGSingle && o.excludedReason(d, o.rule(d), false) == "" {
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

// unmatchedRules names the parts of the policy that concern no device, in their order.
func (o *offerBuilder) unmatchedRules() (findings []string) {
	idle := func(s *Selector, what string) {
		if !o.matched[s] {
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
