package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// A policy may select devices by position: by index, by count ("the first 2"), or, under the MIG strategy
// "single", by the most common profile. Positions change whenever a device is added or removed, but a device that
// a workload may use must not change what it is offered as. So each position is bound to devices when they are
// first seen, and stays bound until a reboot or an operator's command (State.Rebind).
//
//	GPUs   a b c d     rule "index 3: reserved" selects d
//	       b c d       a was removed; NVML now has b at index 0 and d at index 2: the rule still selects d
//	       e b c d     e was added at NVML index 0: number 0 is free again, so e gets it

// Binding is which positions of a policy are bound to which devices. The zero value binds nothing. It is
// immutable. It is written to the checkpoint.
type Binding struct {
	Numbering Numbering         `json:",omitzero"`
	Profile   string            `json:",omitempty"` // of the MIG strategy "single"
	Counts    []ShareAssignment `json:",omitempty"` // of the shares with a First

	Unconfirmed bool      `json:"-"` // read from a checkpoint that may be another node's
	Proposed    Numbering `json:"-"` // Numbering plus the numbers that are not shared yet: see Numbering.Update
}

// ShareAssignment is which devices a share with a First includes.
type ShareAssignment struct {
	Share    string // its pool and selector
	First    int    // as in the policy
	Taken    []gpu.DeviceID
	Rejected []gpu.DeviceID
}

// PositionBinding is one position in a policy and the devices that it is bound to.
type PositionBinding struct {
	At       string // place in the configuration: "policy.yaml:12: rules[0].select"
	Position string // "index 5, 6", "the first 2", "profile 1g.10gb"
	Devices  []gpu.DeviceID
}

// Equal reports whether the numbers, the profile and the assignments are equal.
func (b Binding) Equal(o Binding) bool {
	return b.Numbering.Equal(o.Numbering) && b.Profile == o.Profile &&
		slices.EqualFunc(b.Counts, o.Counts, func(c, d ShareAssignment) bool {
			return c.Share == d.Share && c.First == d.First && slices.Equal(c.Taken, d.Taken) && slices.Equal(c.Rejected, d.Rejected)
		})
}

// assign reports whether a share with a First includes a device. The decision for a device is made once. The place
// of a device that was removed is given only to a device without a decision. When First changes, devices that were
// included come first.
func (o *offerBuilder) assign(i int, d *gpu.Device) bool {
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

// restoreAssignments prepares the assignments of the shares from the previous ones.
func (o *offerBuilder) restoreAssignments(s gpu.Snapshot, previous []ShareAssignment) {
	gone := func(id gpu.DeviceID) bool {
		return s.Driver.State == gpu.DriverReady && !slices.ContainsFunc(s.Devices, func(d gpu.Device) bool { return d.ID == id })
	}
	used := map[string]int{}
	for i := range o.Policy.Shares {
		share := &o.Policy.Shares[i]
		c := ShareAssignment{Share: share.key(), First: share.First}
		if used[c.Share]++; used[c.Share] > 1 {
			c.Share += fmt.Sprint(" ", used[c.Share])
		}
		for _, b := range previous {
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

// key identifies a share, so that the assignment remains when only its line, Rename or Sharing changes. It is
// written to the checkpoint: names of Selector's fields do not change.
func (s Share) key() string {
	sel := s.Select
	sel.At = ""
	return fmt.Sprintf("%s %+v", s.Pool, sel)
}

// binding returns what is bound after all devices were decided.
func (o *offerBuilder) binding() Binding {
	b := o.bound
	b.Counts = slices.DeleteFunc(slices.Clone(o.assignments), func(c ShareAssignment) bool { return c.First == 0 })
	return b
}

// positionBindings returns the positions of the policy with their devices, in the policy's order.
func (o *offerBuilder) positionBindings() []PositionBinding {
	bound := o.selectorBindings()
	if o.bound.Profile != "" {
		bound = append(bound, o.profileBinding())
	}
	return bound
}

// profileBinding returns the profile of the MIG strategy "single" with its devices.
func (o *offerBuilder) profileBinding() PositionBinding {
	return PositionBinding{"MIG strategy single", "profile " + o.bound.Profile, slices.Sorted(slices.Values(o.singleDevices))}
}

// selectorBindings returns the selectors of the policy that use an index or a First, in the policy's order.
func (o *offerBuilder) selectorBindings() (bound []PositionBinding) {
	for _, s := range o.selectors {
		var positions []string
		for _, at := range s.Indices {
			positions = append(positions, at.String())
		}
		if positions != nil {
			positions[0] = "index " + positions[0]
		}
		if s.first > 0 {
			positions = append(positions, "the first "+strconv.Itoa(s.first))
		}
		if positions != nil {
			bound = append(bound, PositionBinding{s.At, strings.Join(positions, ", "), slices.Sorted(slices.Values(o.chosen[s.Selector]))})
		}
	}
	return bound
}

// outdatedBindings returns a line for each position that would be bound to other devices by the present order of
// devices. That a device of it is lost is no other order.
func (o *offerBuilder) outdatedBindings(present *offerBuilder) (lines []string) {
	wouldBe := append(present.selectorBindings(), present.profileBinding())
	for i, b := range o.positionBindings() {
		now := wouldBe[i]
		listed := slices.DeleteFunc(slices.Clone(b.Devices), func(id gpu.DeviceID) bool { return o.lost[id] })
		if b.Position == now.Position && (slices.Equal(b.Devices, now.Devices) || slices.Equal(listed, now.Devices)) {
			continue
		}
		lines = append(lines, fmt.Sprintf("%s: %s is bound to %s; by the present order of devices %s would be %s; to apply that, after GPUs were changed on purpose, end the work on these devices and run the command rebind",
			b.At, b.Position, devicesText(b.Devices), now.Position, devicesText(now.Devices)))
	}
	return lines
}

func devicesText(devices []gpu.DeviceID) string {
	return cmp.Or(joinIDs(devices, ", "), "no device")
}

func joinIDs[T ~string](ids []T, separator string) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = string(id)
	}
	return strings.Join(texts, separator)
}
