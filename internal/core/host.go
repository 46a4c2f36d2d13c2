package core

import (
	"fmt"
	"slices"
)

// Host is what an agent knows of its host beside the driver. It is replaced as a whole.
type Host struct {
	MPS    []string // pools whose MPS control daemon answers
	Claims []Claim  // of other agents on this host

	// SharesNumbers says that Numbering is kept up: what this agent proposes is in it a moment later.
	SharesNumbers bool
	Numbering     Numbering // of the agents on this host, this one's earlier processes among them: that of the highest generation
}

// Claim is a device that another agent offers.
type Claim struct {
	Agent string // "nomad-gpu"
	At    Placement
	Prior bool // made before this agent's own
}

// OverlapMode is what becomes of a device that another agent on this host offers too.
type OverlapMode string

// The ways to deal with an overlap.
const (
	OverlapWarn   OverlapMode = "warn"   // both offer it, and say so
	OverlapRefuse OverlapMode = "refuse" // only the one that claimed it first gives it to new work
)

// Overlap is a unit's device that another agent offers too.
type Overlap struct {
	Device DeviceID
	Agent  string
}

// WithHost returns what is left of the offer on a host: units that the host lacks something for are unhealthy. The
// driver's faults come first, as a unit has one reason.
func (inv *Inventory) WithHost(h Host, o OverlapMode) *Inventory {
	next := *inv
	next.units, next.overlaps = slices.Clone(inv.units), nil
	var against *Claim
	for i := range next.units {
		u := &next.units[i]
		if i == 0 || u.Device.ID != next.units[i-1].Device.ID {
			if against = h.overlappingClaim(u.Device); against != nil {
				next.overlaps = append(next.overlaps, Overlap{Device: u.Device.ID, Agent: against.Agent})
			}
		}
		switch {
		case !u.Health.Schedulable():
		case against != nil && against.Prior && o == OverlapRefuse:
			u.Health = NewHealth(ReasonClaimed, against.Agent)
		case u.Sharing.Mode == MPS && !slices.Contains(h.MPS, u.Pool):
			u.Health = NewHealth(ReasonNoMPS, "pool "+u.Pool)
		}
	}
	return &next
}

// overlappingClaim is a claim on the hardware of a device, of several one that was made before this agent's own; nil if there
// is none. A GPU and its instances are the same hardware, two instances are not.
func (h Host) overlappingClaim(d Device) (found *Claim) {
	for i := range h.Claims {
		c := &h.Claims[i]
		if c.At.Overlaps(d.At) && (found == nil || c.Prior && !found.Prior) {
			found = c
		}
	}
	return found
}

// Overlaps are the devices on offer that other agents on this host offer too, in canonical order.
func (inv *Inventory) Overlaps() []Overlap {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.overlaps)
}

func (c Overlap) String() string { return fmt.Sprintf("%s is also offered by %s", c.Device, c.Agent) }
