package inventory

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// awaitsNumber is the reason of a device that is not offered yet, because a policy selects by index and the agents of this node have
// not shared the number of the device: for milliseconds after it was found.
const awaitsNumber = "waits for its number, which the agents of this node share"

// offerBuilder decides about the devices of one snapshot, in canonical order.
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

// newOfferBuilder prepares the decisions about the devices of s, some of which are lost. Positions that are bound stay bound.
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
func (o *offerBuilder) decide(d *gpu.Device) Offer {
	rule := o.rule(d)
	outcome, why := o.migOutcome(d)
	made := Offer{Outcome: outcome, Reason: why, By: o.strategyDecider(d), rule: rule}
	if rule != nil && (outcome != Represented || rule.MIG != "") { // otherwise the rule has no effect on d
		o.recordMatch(&rule.Select, d, false)
	} else if d.At.GI != gpu.Whole { // the rule of a GPU decides that later ones do not set its MIG strategy
		made.rule = nil
	}
	if reason, by := o.excludedReason(d, rule, outcome == Represented); reason != "" {
		made.Outcome, made.Reason, made.By = NotOffered, reason, by
		return made
	}
	if outcome != Offered {
		return made
	}
	if rule == nil {
		rule = &Rule{}
	}
	made.By = o.offeredBy(d, made)
	made.Injection, made.InjectionBy = o.Injection, Decider{Kind: BySetting}
	if rule.Injection != nil {
		made.Injection, made.InjectionBy = *rule.Injection, decidedBy(ByRule, &rule.Select)
	}
	made.Pool, made.PoolBy = rule.Pool, decidedBy(ByRule, &rule.Select)
	if made.Pool == "" {
		made.Pool, made.PoolBy = o.poolName(d)
	}
	made.BasePoolBy = made.PoolBy
	switch {
	case rule.Sharing == nil:
		return o.sharedOffer(d, made)
	case rule.Pool == "":
		made.Pool += rule.Sharing.Mode.Suffix()
	}
	made.Sharing, made.SharingBy = *rule.Sharing, decidedBy(ByRule, &rule.Select)
	memory, why := o.Policy.Limits.share(d, made.Sharing)
	if made.Memory = memory; why != "" {
		return Offer{Outcome: NotOffered, Reason: why, By: made.SharingBy, rule: made.rule}
	}
	return made
}

// excludedReason returns why the configuration or the policy excludes a device; "" if neither does. A device that is represented by
// another one can only be excluded by its ID.
func (o *offerBuilder) excludedReason(d *gpu.Device, rule *Rule, represented bool) (string, Decider) {
	switch {
	case slices.Contains(o.Exclude, d.ID):
		return "ignored by configuration", Decider{Kind: ByExclude}
	case represented:
	case o.hasProposedNumber(d):
		o.awaitsNumber = true
		return awaitsNumber, Decider{Kind: ByNumber}
	case o.indexed && o.number(d).GPU < 0:
		return "has no number, because its index belongs to another GPU; the command rebind assigns new numbers", Decider{Kind: ByNumber}
	case o.Policy.Include != nil && !o.isIncluded(d):
		return "not among those that the policy includes", Decider{Kind: ByInclude}
	case rule != nil:
		return rule.NotOffered, decidedBy(ByRule, &rule.Select)
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
		if s := &o.Policy.Include[i]; s.Selects(d, o.number(d)) {
			o.recordMatch(s, d, false)
			ok = true
		}
	}
	return ok
}

// poolName returns the pool of a device before it is shared.
func (o *offerBuilder) poolName(d *gpu.Device) (string, Decider) {
	if n := o.firstName(d); n != nil {
		o.recordMatch(&n.Select, d, false)
		return n.Pool, decidedBy(ByName, &n.Select)
	}
	if d.Profile != "" && o.strategyOf(d) == MIGMixed {
		return MIGPool(d.Profile), o.strategyDecider(d)
	}
	return DefaultPool, Decider{}
}

// sharedOffer returns the offer of a device of a pool, shared if the policy shares it.
func (o *offerBuilder) sharedOffer(d *gpu.Device, made Offer) Offer {
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if s.Pool != made.Pool || !s.Select.Selects(d, o.number(d)) || s.First > 0 && !o.assign(i, d) {
			continue
		}
		o.recordMatch(&s.Select, d, s.First > 0)
		made.Sharing, made.SharingBy = s.Sharing, decidedBy(BySharing, &s.Select)
		if s.Rename != "" {
			made.Pool, made.PoolBy = s.Rename, made.SharingBy
		}
		return made
	}
	return made
}

// migOutcome returns whether the MIG strategy of a device offers it, and the reason if it is excluded.
func (o *offerBuilder) migOutcome(d *gpu.Device) (Outcome, string) {
	switch o.strategyOf(d) {
	case MIGMixed:
		if d.MIG {
			return o.parentOutcome(d)
		}
	case MIGSingle:
		switch {
		case d.MIG:
			return o.parentOutcome(d)
		case d.Profile == o.bound.Profile:
			o.singleDevices = append(o.singleDevices, d.ID)
		case d.Profile == "":
			return NotOffered, "mig-strategy single: MIG mode is off on this GPU"
		default:
			return NotOffered, "mig-strategy single: profile " + d.Profile + " differs from this node's " + o.bound.Profile
		}
	default: // MIGNone
		if d.Profile != "" {
			return Represented, ""
		}
	}
	return Offered, ""
}

// parentOutcome is that of a GPU in MIG mode whose instances are offered.
func (o *offerBuilder) parentOutcome(parent *gpu.Device) (Outcome, string) {
	if o.partitioned[parent.ID] {
		return Represented, ""
	}
	return NotOffered, "MIG mode is on and there are no MIG instances"
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
