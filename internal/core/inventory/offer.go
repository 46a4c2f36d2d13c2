package inventory

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// visibility is whether a device is part of the inventory.
type visibility uint8

const (
	visible  visibility = iota // offered
	hidden                     // not offered, as another device of the same hardware is: the GPU or its MIG instances
	excluded                   // not offered, and listed with the reason
)

// awaitsNumber is the reason of a device that is not offered yet, because a policy selects by index and the agents of this host have
// not shared the number of the device: for milliseconds after it was found.
const awaitsNumber = "waits for its number, which the agents of this host share"

// offer is how one device is offered.
type offer struct {
	visibility visibility
	reason     string // of excluded
	pool       string
	sharing    Sharing
	injection  Injection

	rule *Rule // that applies; nil = none, or one without effect on the device
	by   deciders
}

// offerBuilder determines the offers of the devices of one snapshot, in canonical order.
type offerBuilder struct {
	Config
	selectors     []policySelector
	indexed       bool                         // a selector uses an index
	strategy      map[gpu.DeviceID]*Rule       // of the GPUs whose rule sets the MIG strategy
	partitioned   map[gpu.DeviceID]bool        // GPUs that have MIG instances
	singleDevices []gpu.DeviceID               // under the MIG strategy "single": the instances of its profile
	matched       map[*Selector]bool           // selectors that apply to a device
	chosen        map[*Selector][]gpu.DeviceID // devices of the selectors that depend on positions

	bound        Binding               // its Counts are the previous ones
	assignments  []ShareAssignment     // by share
	awaitsNumber bool                  // a device has no number yet
	lost         map[gpu.DeviceID]bool // devices that the driver does not list any more
}

// newOfferBuilder prepares the offers of the devices of s, some of which are lost. Positions that are bound stay bound.
// Every device has its number already.
func newOfferBuilder(s gpu.Snapshot, c Config, previous Binding, lost map[gpu.DeviceID]bool) *offerBuilder {
	o := &offerBuilder{
		Config: c, selectors: c.Policy.selectors(), strategy: map[gpu.DeviceID]*Rule{}, partitioned: map[gpu.DeviceID]bool{},
		matched: map[*Selector]bool{}, chosen: map[*Selector][]gpu.DeviceID{}, bound: previous, lost: lost,
	}
	o.indexed = slices.ContainsFunc(o.selectors, func(s policySelector) bool { return len(s.Indices) > 0 })
	o.restoreAssignments(s, previous.Counts)
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.At.GI == gpu.Whole {
			if r := o.rule(d); r != nil && r.MIG != "" {
				o.strategy[d.ID] = r
			}
		} else {
			o.partitioned[d.At.GPU] = true
		}
	}
	o.bound.Profile = o.chooseProfile(s)
	return o
}

// strategyOf returns the MIG strategy of a GPU and its instances.
func (o *offerBuilder) strategyOf(d *gpu.Device) MIGStrategy {
	if r := o.strategy[d.At.GPU]; r != nil {
		return r.MIG
	}
	return o.MIG
}

// decide returns the offer of a device.
func (o *offerBuilder) decide(d *gpu.Device) offer {
	rule := o.rule(d)
	seen, why := o.migVisibility(d)
	made := offer{visibility: seen, reason: why, rule: rule}
	made.by.visibility = o.strategyDecider(d)
	if rule != nil && (seen != hidden || rule.MIG != "") { // otherwise the rule has no effect on d
		o.recordMatch(&rule.Select, d, false)
	} else if d.At.GI != gpu.Whole { // the rule of a GPU decides that later ones do not set its MIG strategy
		made.rule = nil
	}
	if reason, by := o.excludedReason(d, rule, seen == hidden); reason != "" {
		made.visibility, made.reason, made.by.visibility = excluded, reason, by
		return made
	}
	if seen != visible {
		return made
	}
	if rule == nil {
		rule = &Rule{}
	}
	made.by.visibility = o.offeredBy(d, made)
	made.injection, made.by.injection = o.Injection, Decider{Kind: BySetting}
	if rule.Injection != nil {
		made.injection, made.by.injection = *rule.Injection, decidedBy(ByRule, &rule.Select)
	}
	made.pool, made.by.pool = rule.Pool, decidedBy(ByRule, &rule.Select)
	if made.pool == "" {
		made.pool, made.by.pool = o.poolName(d)
	}
	made.by.basePool = made.by.pool
	switch {
	case rule.Sharing == nil:
		return o.sharedOffer(d, made)
	case rule.Pool == "":
		made.pool += rule.Sharing.Mode.Suffix()
	}
	made.sharing, made.by.sharing = *rule.Sharing, decidedBy(ByRule, &rule.Select)
	return made
}

// excludedReason returns why the configuration or the policy excludes a device; "" if neither does. A hidden device can
// only be excluded by its ID.
func (o *offerBuilder) excludedReason(d *gpu.Device, rule *Rule, isHidden bool) (string, Decider) {
	switch {
	case slices.Contains(o.Exclude, d.ID):
		return "ignored by configuration", Decider{Kind: ByExclude}
	case isHidden:
	case o.hasProposedNumber(d):
		o.awaitsNumber = true
		return awaitsNumber, Decider{Kind: ByNumber}
	case o.indexed && o.number(d).GPU < 0:
		return "has no number, because its index belongs to another GPU; the command rebind assigns new numbers", Decider{Kind: ByNumber}
	case o.Policy.Include != nil && !o.isIncluded(d):
		return "not among those that the policy includes", Decider{Kind: ByInclude}
	case rule != nil:
		return rule.Reserve, decidedBy(ByRule, &rule.Select)
	}
	return "", Decider{}
}

// rule returns the rule that applies to a device; nil = none.
func (o *offerBuilder) rule(d *gpu.Device) *Rule {
	for i := range o.Policy.Rules {
		if r := &o.Policy.Rules[i]; r.Select.Selects(d, o.number(d)) {
			return r
		}
	}
	return nil
}

// selects reports whether a selector selects a device, and records it.
func (o *offerBuilder) selects(s *Selector, d *gpu.Device) bool {
	if !s.Selects(d, o.number(d)) {
		return false
	}
	o.recordMatch(s, d, false)
	return true
}

// recordMatch records that a selector applies to a device. The devices are kept for selectors that depend on positions.
func (o *offerBuilder) recordMatch(s *Selector, d *gpu.Device, counted bool) {
	o.matched[s] = true
	if (counted || len(s.Indices) > 0) && !slices.Contains(o.chosen[s], d.ID) {
		o.chosen[s] = append(o.chosen[s], d.ID)
	}
}

// isIncluded reports whether Policy.Include selects a device.
func (o *offerBuilder) isIncluded(d *gpu.Device) (ok bool) {
	for i := range o.Policy.Include {
		ok = o.selects(&o.Policy.Include[i], d) || ok
	}
	return ok
}

// poolName returns the pool of a device before it is shared.
func (o *offerBuilder) poolName(d *gpu.Device) (string, Decider) {
	for i := range o.Policy.Names {
		if n := &o.Policy.Names[i]; o.selects(&n.Select, d) {
			return n.Pool, decidedBy(ByName, &n.Select)
		}
	}
	if d.Profile != "" && o.strategyOf(d) == MIGMixed {
		return MIGPool(d.Profile), o.strategyDecider(d)
	}
	return DefaultPool, Decider{}
}

// sharedOffer returns the offer of a device of a pool, shared if the policy shares it.
func (o *offerBuilder) sharedOffer(d *gpu.Device, made offer) offer {
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if s.Pool != made.pool || !s.Select.Selects(d, o.number(d)) || s.First > 0 && !o.assign(i, d) {
			continue
		}
		o.recordMatch(&s.Select, d, s.First > 0)
		made.sharing, made.by.sharing = s.Sharing, decidedBy(BySharing, &s.Select)
		if s.Rename != "" {
			made.pool, made.by.pool = s.Rename, made.by.sharing
		}
		return made
	}
	return made
}

// migVisibility returns the visibility of a device under its MIG strategy, and the reason if it is excluded.
func (o *offerBuilder) migVisibility(d *gpu.Device) (visibility, string) {
	switch o.strategyOf(d) {
	case MIGMixed:
		if d.MIG {
			return o.parentVisibility(d)
		}
	case MIGSingle:
		switch {
		case d.MIG:
			return o.parentVisibility(d)
		case d.Profile == o.bound.Profile:
			o.singleDevices = append(o.singleDevices, d.ID)
		case d.Profile == "":
			return excluded, "mig-strategy single: MIG mode is off on this GPU"
		default:
			return excluded, "mig-strategy single: profile " + d.Profile + " differs from this node's " + o.bound.Profile
		}
	default: // MIGNone
		if d.Profile != "" {
			return hidden, ""
		}
	}
	return visible, ""
}

// parentVisibility returns the visibility of a GPU in MIG mode whose instances are offered.
func (o *offerBuilder) parentVisibility(parent *gpu.Device) (visibility, string) {
	if o.partitioned[parent.ID] {
		return hidden, ""
	}
	return excluded, "MIG mode is on and there are no MIG instances"
}

// chooseProfile returns the profile that is offered under the strategy "single": the previous one while there is an
// instance of it, else the one with the most instances (of several the first by name); "" if there is none. Excluded
// instances do not count.
func (o *offerBuilder) chooseProfile(s gpu.Snapshot) string {
	count := map[string]int{}
	best := ""
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Profile != "" && o.strategyOf(d) == MIGSingle {
			if reason, _ := o.excludedReason(d, o.rule(d), false); reason == "" {
				count[d.Profile]++
			}
		}
	}
	if count[o.bound.Profile] > 0 || s.Driver.State != gpu.DriverReady && len(count) == 0 {
		return o.bound.Profile
	}
	for p, n := range count {
		if n > count[best] || n == count[best] && p < best {
			best = p
		}
	}
	return best
}

// unmatchedRules returns a warning for each part of the policy that applies to no device, in their order.
func (o *offerBuilder) unmatchedRules() (warnings []string) {
	for _, s := range o.selectors {
		if !o.matched[s.Selector] {
			warnings = append(warnings, s.At+": "+s.unmatched)
		}
	}
	return warnings
}
