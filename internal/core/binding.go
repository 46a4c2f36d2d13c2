package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A policy may name devices by position: by index, by number ("the first 2"), or, under the MIG strategy "single", as those
// of the most common profile. Positions change when any device comes or goes, and what a device is offered as must not:
// a workload may hold it. So each position is bound to devices when they are first seen, and stays bound until a reboot or
// an operator's order (State.Rebind).
//
//	GPUs   a b c d     rule "index 3: reserved" means d
//	       b c d       a was removed, and the driver now counts b as 0 and d as 2: the rule still means d
//	       e b c d     e was added, and the driver counts it as 0: number 0 is free again, so e has it

// Binding is what is bound to which devices. The zero value binds nothing. It is immutable.
type Binding struct {
	Numbering Numbering         `json:",omitzero"`
	Profile   string            `json:",omitempty"` // of the MIG strategy "single"
	Counts    []ShareAssignment `json:",omitempty"` // of the shares that take a number of devices

	Unconfirmed bool      `json:"-"` // it is of a history that may be another machine's
	Proposed    Numbering `json:"-"` // with those numbers that are not shared yet: see Numbering.Update
}

// ShareAssignment is which devices a share has taken, of those that it was asked about.
type ShareAssignment struct {
	Share    string // its pool and selector
	First    int    // as many as it takes
	Taken    []DeviceID
	Rejected []DeviceID `json:"Left"`
}

// PositionBinding is one position of a policy and the devices that it means.
type PositionBinding struct {
	At       string // where it was written: "policy.yaml:12: rules[0].select"
	Position string // "index 5, 6", "the first 2", "profile 1g.10gb"
	Devices  []DeviceID
}

// Equal reports whether two bindings bind the same.
func (b Binding) Equal(o Binding) bool {
	return b.Numbering.Equal(o.Numbering) && b.Profile == o.Profile &&
		slices.EqualFunc(b.Counts, o.Counts, func(c, d ShareAssignment) bool {
			return c.Share == d.Share && c.First == d.First && slices.Equal(c.Taken, d.Taken) && slices.Equal(c.Rejected, d.Rejected)
		})
}

// assign decides whether a share that takes a number of devices has one of them. A device is decided on once; in the place of
// one that is gone only one that was never left out gets in. When the number in the policy changes, those that were
// taken come first.
func (o *offerBuilder) assign(i int, d *Device) bool {
	c := &o.assignments[i]
	taken := slices.Contains(c.Taken, d.ID)
	if !taken && !slices.Contains(c.Rejected, d.ID) {
		taken = len(c.Taken) < c.First && !o.lost[d.ID]
		if taken {
			c.Taken = append(c.Taken, d.ID)
		} else {
			c.Rejected = append(c.Rejected, d.ID)
		}
	}
	return taken
}

// restoreAssignments prepares the counts of the shares from those of before.
func (o *offerBuilder) restoreAssignments(s Snapshot, was []ShareAssignment) {
	gone := func(id DeviceID) bool {
		return s.Driver.State == DriverReady && !slices.ContainsFunc(s.Devices, func(d Device) bool { return d.ID == id })
	}
	used := map[string]int{}
	for i := range o.Policy.Shares {
		share := &o.Policy.Shares[i]
		c := ShareAssignment{Share: share.key(), First: share.First}
		if used[c.Share]++; used[c.Share] > 1 {
			c.Share += fmt.Sprint(" ", used[c.Share])
		}
		for _, b := range was {
			if b.Share != c.Share || share.First == 0 {
				continue
			}
			c.Taken, c.Rejected = slices.DeleteFunc(slices.Clone(b.Taken), gone), slices.DeleteFunc(slices.Clone(b.Rejected), gone)
			if b.First != c.First {
				c.Taken, c.Rejected = c.Taken[:min(len(c.Taken), c.First)], nil
			}
		}
		o.assignments = append(o.assignments, c)
	}
}

// key identifies a share over a change of what it does with its devices, and of where it is written.
func (s Share) key() string {
	sel := s.Select
	sel.At = ""
	return fmt.Sprintf("%s %+v", s.Pool, sel)
}

// binding is what is bound after all devices were decided on.
func (o *offerBuilder) binding() Binding {
	b := Binding{Numbering: o.numbering, Profile: o.profile, Proposed: o.proposed, Unconfirmed: o.unconfirmed}
	for _, c := range o.assignments {
		if c.First > 0 {
			b.Counts = append(b.Counts, c)
		}
	}
	return b
}

// positionBindings is what the positions of the policy mean, in its order.
func (o *offerBuilder) positionBindings() []PositionBinding {
	bound := o.selectorBindings()
	if o.profile != "" {
		bound = append(bound, o.profileBinding())
	}
	return bound
}

// profileBinding is the profile of the MIG strategy "single".
func (o *offerBuilder) profileBinding() PositionBinding {
	slices.Sort(o.singleDevices)
	return PositionBinding{"MIG strategy single", "profile " + o.profile, o.singleDevices}
}

// selectorBindings are the selectors of the policy that go by index or number, in its order.
func (o *offerBuilder) selectorBindings() (bound []PositionBinding) {
	add := func(s *Selector, first int) {
		what := s.positionText()
		if first > 0 {
			what = strings.TrimPrefix(what+", the first "+strconv.Itoa(first), ", ")
		}
		if what != "" {
			bound = append(bound, PositionBinding{s.At, what, slices.Sorted(slices.Values(o.chosen[s]))})
		}
	}
	for i := range o.Policy.Include {
		add(&o.Policy.Include[i], 0)
	}
	for i := range o.Policy.Rules {
		add(&o.Policy.Rules[i].Select, 0)
	}
	for i := range o.Policy.Names {
		add(&o.Policy.Names[i].Select, 0)
	}
	for i := range o.Policy.Shares {
		add(&o.Policy.Shares[i].Select, o.Policy.Shares[i].First)
	}
	return bound
}

// positionText is what of the selector depends on the order of devices; "" if nothing.
func (s Selector) positionText() string {
	var texts []string
	for _, i := range s.Indices {
		texts = append(texts, i.String())
	}
	if texts == nil {
		return ""
	}
	return "index " + strings.Join(texts, ", ")
}

// outdatedBindings is a line for each position that would mean other devices by the present order of those that the driver lists.
func (o *offerBuilder) outdatedBindings(present *offerBuilder) (findings []string) {
	differ := func(b, now PositionBinding) {
		if b.Position == now.Position && slices.Equal(b.Devices, now.Devices) {
			return
		}
		findings = append(findings, fmt.Sprintf("%s: %s is bound to %s; by the present order of devices %s would be %s; to apply that, end the work on these devices and run the command rebind",
			b.At, b.Position, joinIDs(b.Devices), now.Position, joinIDs(now.Devices)))
	}
	now := present.selectorBindings()
	for i, b := range o.selectorBindings() {
		differ(b, now[i])
	}
	if o.profile != "" {
		differ(o.profileBinding(), present.profileBinding())
	}
	return findings
}

func joinIDs(devices []DeviceID) string {
	if len(devices) == 0 {
		return "no device"
	}
	var texts []string
	for _, id := range devices {
		texts = append(texts, string(id))
	}
	return strings.Join(texts, ", ")
}
