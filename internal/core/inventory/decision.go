package inventory

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Outcome is whether a device is offered.
type Outcome string

// The outcomes.
const (
	Offered     Outcome = "offered"
	NotOffered  Outcome = "excluded" // with the reason in Offer.Reason
	Represented Outcome = "hidden"   // another device of the same hardware is offered: the GPU or its MIG instances
)

// DeciderKind is a kind of setting that decides something about a device.
type DeciderKind string

// The kinds of deciders. The zero value means that nothing sets the property: it has its default.
const (
	ByDefault     DeciderKind = ""
	ByExclude     DeciderKind = "exclude"      // Config.Exclude
	ByNumber      DeciderKind = "number"       // the number of the device: see Numbering
	ByInclude     DeciderKind = "include"      // Policy.Include
	ByRule        DeciderKind = "rule"         // Policy.Rules
	ByName        DeciderKind = "name"         // Policy.Names
	BySharing     DeciderKind = "sharing"      // Policy.Shares
	ByMIGStrategy DeciderKind = "mig strategy" // Config.MIG; that of a rule is ByRule
	BySetting     DeciderKind = "setting"      // Config.Injection
)

// Decider is what decides a property of a device.
type Decider struct {
	Kind DeciderKind
	At   string // place in the configuration: "policy.yaml:12: rules[1].select"; "" = a setting outside of the policy
}

func decidedBy(kind DeciderKind, s *Selector) Decider { return Decider{kind, s.At} }

// Offer is how a device is offered, and which part of the configuration decides each property.
type Offer struct {
	Outcome Outcome
	Reason  string // of NotOffered
	By      Decider

	// Of Offered.
	Pool      string
	Sharing   Sharing
	Memory    uint64 // see Unit.Memory
	Injection Injection

	BasePoolBy Decider // of the pool in which the device is before it is shared: a share selects by that
	PoolBy     Decider // of Pool

	SharingBy, InjectionBy Decider

	rule *Rule // that applies; nil = none, or one without effect on the device
}

// Decision is what the configuration makes of a device and which part of it decides that.
type Decision struct {
	Device gpu.Device
	Offer
	MIGBy  Decider      // of the MIG strategy of the GPU and its instances
	Rule   string       // place of the rule that applies, whether or not it decides more than that later ones don't; "" = none
	Others []OtherMatch // other parts of the policy that select the device, in the policy's order
}

// OtherMatch is a part of the policy that selects a device and decides nothing about it.
type OtherMatch struct {
	Decider
	Why string // one line
}

// Decisions returns a decision for each device of a snapshot, in canonical order. Build decides by the same code.
func Decisions(in Input) []Decision {
	all := newOfferBuilder(in.Snapshot, in.Config, in.Binding, in.Ledger.Lost(in.Snapshot.Devices))
	decisions := make([]Decision, len(in.Snapshot.Devices))
	for i := range in.Snapshot.Devices {
		d := &in.Snapshot.Devices[i]
		made := all.decide(d)
		decisions[i] = Decision{Device: *d, Offer: made, MIGBy: all.strategyDecider(d), Others: all.others(d, made)}
		if made.rule != nil {
			decisions[i].Rule = made.rule.Select.At
		}
	}
	return decisions
}

// strategyDecider returns what decides the MIG strategy of a GPU and its instances.
func (o *offerBuilder) strategyDecider(d *gpu.Device) Decider {
	if r := o.strategy[d.At.GPU]; r != nil {
		return decidedBy(ByRule, &r.Select)
	}
	return Decider{Kind: ByMIGStrategy}
}

// offeredBy returns why a visible device is offered: its rule, else the first part of Include that selects it, else nothing excludes it.
func (o *offerBuilder) offeredBy(d *gpu.Device, made Offer) Decider {
	if made.rule != nil {
		return decidedBy(ByRule, &made.rule.Select)
	}
	for i := range o.Policy.Include {
		if s := &o.Policy.Include[i]; s.Selects(d, o.number(d)) {
			return decidedBy(ByInclude, s)
		}
	}
	if d.Profile != "" {
		return o.strategyDecider(d)
	}
	return Decider{}
}

// others returns the rules, names and shares that select a device and decide nothing about it, with the reasons.
func (o *offerBuilder) others(d *gpu.Device, made Offer) (all []OtherMatch) {
	add := func(kind DeciderKind, s *Selector, why string) {
		if s.Selects(d, o.number(d)) {
			all = append(all, OtherMatch{decidedBy(kind, s), why})
		}
	}
	first := o.rule(d)
	for i := range o.Policy.Rules {
		switch r := &o.Policy.Rules[i]; {
		case r == first && made.rule == nil:
			add(ByRule, &r.Select, "the device is hidden by the MIG strategy")
		case r != first && first != nil && r != o.strategy[d.At.GPU]:
			add(ByRule, &r.Select, first.Select.At+" selects the device first")
		}
	}
	for i := range o.Policy.Names {
		n := &o.Policy.Names[i]
		if why := o.whyNotNamed(d, made, n); why != "" {
			add(ByName, &n.Select, why)
		}
	}
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if why := o.whyNotShared(i, d, made); why != "" {
			add(BySharing, &s.Select, why)
		}
	}
	return all
}

// firstName returns the first name that selects a device; nil = none does.
func (o *offerBuilder) firstName(d *gpu.Device) *Naming {
	for i := range o.Policy.Names {
		if n := &o.Policy.Names[i]; n.Select.Selects(d, o.number(d)) {
			return n
		}
	}
	return nil
}

// whyNotNamed returns why a name that selects a device does not name its pool; "" if it does.
func (o *offerBuilder) whyNotNamed(d *gpu.Device, made Offer, n *Naming) string {
	switch first := o.firstName(d); {
	case made.Outcome != Offered:
		return "the device is not offered"
	case made.rule != nil && made.rule.Pool != "":
		return made.rule.Select.At + " names the pool"
	case first != nil && first != n:
		return first.Select.At + " names the pool first"
	}
	return ""
}

// whyNotShared returns why the i-th share does not share a device that it selects; "" if it does, or is about another pool.
func (o *offerBuilder) whyNotShared(i int, d *gpu.Device, made Offer) string {
	s := &o.Policy.Shares[i]
	switch {
	case made.Outcome != Offered:
		return "the device is not offered"
	case made.SharingBy == decidedBy(BySharing, &s.Select) && made.Sharing == s.Sharing:
		return ""
	case made.rule != nil && made.rule.Sharing != nil:
		return made.rule.Select.At + " sets how the device is shared"
	case s.First > 0 && slices.Contains(o.assignments[i].Rejected, d.ID):
		return fmt.Sprintf("it shares %d devices of pool %s, which are %s", s.First, s.Pool, devicesText(o.assignments[i].Taken))
	case made.SharingBy.Kind == BySharing:
		return made.SharingBy.At + " shares the device first"
	}
	return "it is about pool " + s.Pool
}
