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

// Sharing is how a device is offered more than once. The zero value is a device that is offered once.
type Sharing struct {
	Mode          SharingMode
	Replicas      int    // units per device, 2 or more
	OnePerRequest bool   // a request for more than one unit is refused: more would not be more of a GPU
	Memory        uint64 // bytes of device memory that one MPS client may have; 0 = what the daemon says
	Threads       int    // percent of a GPU's threads that one MPS client may use; 0 = what the daemon says
}

// SharingMode is what workloads on one device share it by.
type SharingMode uint8

// The modes. Neither of the last two isolates workloads from each other as MIG does.
const (
	Exclusive   SharingMode = iota // one workload
	TimeSlicing                    // CUDA's time slices; nothing limits memory
	MPS                            // CUDA's Multi-Process Service, of a control daemon per pool
)

var sharingModes = [...]string{"exclusive", "time-slicing", "mps"}

func (m SharingMode) String() string { return sharingModes[m] }

// suffix ends the default name of a pool whose devices are shared by a rule, so that no request for a GPU of
// one's own gets a share.
func (m SharingMode) suffix() string { return [...]string{"", ".shared", ".mps"}[m] }

// DefaultPool is the pool of full GPUs, and of all units under the MIG strategy "single".
const DefaultPool = "gpu"

// MIGPool is the pool of the instances of a profile under the MIG strategy "mixed": "mig-1g.10gb.me" for
// "1g.10gb+me", because a resource name has no '+'.
func MIGPool(profile string) string { return "mig-" + strings.ReplaceAll(profile, "+", ".") }

// offer is how one device is offered.
type offer struct {
	refused string // why it is not; hidden, if that need not be said
	pool    string
	sharing Sharing
}

// hidden marks a device that is not offered because another view of the same hardware is.
const hidden = "hidden"

// offers decides on the devices of one reading, one after the other in canonical order.
type offers struct {
	Config
	strategy map[DeviceID]MIGStrategy // by GPU
	cut      map[DeviceID]bool        // GPUs that have MIG instances
	profile  string                   // of the MIG strategy "single"
	hit      map[*Selector]bool
	shared   []int // by share: the devices that it took
}

func newOffers(devices []Device, c Config) *offers {
	o := &offers{
		Config: c, strategy: map[DeviceID]MIGStrategy{}, cut: map[DeviceID]bool{},
		hit: map[*Selector]bool{}, shared: make([]int, len(c.Policy.Shares)),
	}
	for _, d := range devices {
		if d.At.GI == Whole {
			o.strategy[d.ID] = c.MIG
			if r := o.rule(d); r != nil && r.MIG != "" {
				o.strategy[d.ID] = r.MIG
			}
		} else {
			o.cut[d.At.GPU] = true
		}
	}
	o.profile = commonProfile(devices, o.strategyOf)
	return o
}

// strategyOf is the MIG strategy for a GPU and its instances.
func (o *offers) strategyOf(d Device) MIGStrategy {
	if s, ok := o.strategy[d.At.GPU]; ok {
		return s
	}
	return o.MIG
}

// of decides on a device.
func (o *offers) of(d Device) offer {
	rule := o.rule(d)
	if slices.Contains(o.Exclude, d.ID) {
		return offer{refused: "ignored by configuration"}
	}
	if why := o.view(d); why != "" {
		return offer{refused: why}
	}
	if o.Policy.Include != nil && !o.included(d) {
		return offer{refused: "not among those that the policy includes"}
	}
	if rule == nil {
		rule = &Rule{}
	}
	if rule.Reserve != "" {
		return offer{refused: rule.Reserve}
	}
	pool := rule.Pool
	if pool == "" {
		pool = o.name(d)
	}
	switch {
	case rule.Sharing == nil:
		return o.share(d, pool)
	case rule.Pool == "":
		pool += rule.Sharing.Mode.suffix()
	}
	return offer{pool: pool, sharing: *rule.Sharing}
}

// rule is the one that counts for a device; nil = none.
func (o *offers) rule(d Device) *Rule {
	for i := range o.Policy.Rules {
		if r := &o.Policy.Rules[i]; o.selects(&r.Select, d) {
			return r
		}
	}
	return nil
}

func (o *offers) selects(s *Selector, d Device) bool {
	if !s.Selects(d) {
		return false
	}
	o.hit[s] = true
	return true
}

func (o *offers) included(d Device) (ok bool) {
	for i := range o.Policy.Include {
		ok = o.selects(&o.Policy.Include[i], d) || ok
	}
	return ok
}

// name is the pool of a device before it is shared.
func (o *offers) name(d Device) string {
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
func (o *offers) share(d Device, pool string) offer {
	for i := range o.Policy.Shares {
		s := &o.Policy.Shares[i]
		if s.Pool != pool || s.First > 0 && o.shared[i] >= s.First || !o.selects(&s.Select, d) {
			continue
		}
		o.shared[i]++
		if s.Rename != "" {
			pool = s.Rename
		}
		return offer{pool: pool, sharing: s.Sharing}
	}
	return offer{pool: pool}
}

// view is why the MIG strategy does not offer a device; "" if it does.
func (o *offers) view(d Device) string {
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
func (o *offers) instead(gpu Device) string {
	if o.cut[gpu.ID] {
		return hidden
	}
	return "MIG mode is on and there are no MIG instances"
}

// commonProfile is the profile with the most instances under the strategy "single", the lesser name among
// equals; "" without any.
func commonProfile(devices []Device, strategyOf func(Device) MIGStrategy) string {
	count := map[string]int{}
	best := ""
	for _, d := range devices {
		if d.Profile != "" && strategyOf(d) == MIGSingle {
			count[d.Profile]++
		}
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

// mixed names the pools whose units are not alike: a request can't tell them apart.
func mixed(units []Unit) (findings []string) {
	first := map[string]Sharing{}
	said := map[string]bool{}
	for _, u := range units {
		s, ok := first[u.Pool]
		if !ok {
			first[u.Pool] = u.Sharing
		} else if s != u.Sharing && !said[u.Pool] {
			said[u.Pool] = true
			findings = append(findings, fmt.Sprintf("pool %s has units that are shared differently (%s and %s): give them different names",
				u.Pool, s, u.Sharing))
		}
	}
	return findings
}

func (s Sharing) String() string {
	if s.Mode == Exclusive {
		return s.Mode.String()
	}
	return fmt.Sprintf("%s by %d", s.Mode, s.Replicas)
}
