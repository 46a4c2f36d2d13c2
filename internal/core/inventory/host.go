package inventory

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Host is the state of the host apart from the driver. It is always replaced as a whole.
type Host struct {
	MPS    []string  // pools whose MPS control daemon responds
	Claims []Claim   // of other agents on this host
	Own    OwnClaims // of this agent
	CDI    *CDI      // CDI specifications of this agent; nil = the first attempt to write one is not completed

	Assignments Assignments // of GPUs to APIs

	Occupied []Occupied // devices that take no new work because of processes; empty unless OccupancyWithhold

	// SharesNumbers means that Numbering is updated: a number that this agent proposes is in it shortly after.
	SharesNumbers bool
	Numbering     Numbering // of all agents on this host, including earlier processes of this one; that of the highest generation
}

// Claim is a device that another agent offers.
type Claim struct {
	Agent string // "nomad-gpu"
	At    gpu.Placement
	Older bool // it is older than the claim of this agent
}

// OwnClaims are the claims of this agent that are on disk, where other agents read them. It is always replaced as a whole.
type OwnClaims struct {
	At []gpu.Placement

	// Else is why, with OverlapRefuse, a device that no placement in At covers takes no new work: another agent may offer it. "" = it does,
	// as no other agent of this host has claims.
	Else string

	// Pending means that this agent is about to claim such a device, or to find out that it can't: within milliseconds, unless the disk
	// is slow.
	Pending bool
}

// Equal reports whether two values are the same claims.
func (o OwnClaims) Equal(p OwnClaims) bool {
	return o.Else == p.Else && o.Pending == p.Pending && slices.Equal(o.At, p.At)
}

func (o OwnClaims) cover(p gpu.Placement) bool {
	return slices.ContainsFunc(o.At, func(at gpu.Placement) bool { return at.Covers(p) })
}

// OverlapMode configures what happens to a device that another agent on this host offers, or may offer, too.
type OverlapMode string

// The overlap modes.
const (
	OverlapWarn OverlapMode = "warn" // both agents offer it, with a warning

	// Only the agent with the older claim offers it for new work, and none before its claim is on disk. It is the default. Without
	// another agent that has files in the state directory it has no effect.
	OverlapRefuse OverlapMode = "refuse"
)

// Overlap is a device that this agent and another agent offer.
type Overlap struct {
	Device gpu.DeviceID
	Agent  string
}

// overlappingClaim returns a claim on the hardware of a device, preferably one that is older; nil if there is
// none. A GPU shares hardware with its instances, but two instances do not.
func (h Host) overlappingClaim(d gpu.Device) (found *Claim) {
	for i := range h.Claims {
		c := &h.Claims[i]
		if c.At.Overlaps(d.At) && (found == nil || c.Older && !found.Older) {
			found = c
		}
	}
	return found
}

// occupied returns the processes of a device because of which it takes no new work; nil if there are none.
func (h Host) occupied(id gpu.DeviceID) *Occupied {
	for i := range h.Occupied {
		if h.Occupied[i].Device == id {
			return &h.Occupied[i]
		}
	}
	return nil
}

// String returns the overlap as one line for operators.
func (c Overlap) String() string { return fmt.Sprintf("%s is also offered by %s", c.Device, c.Agent) }
