package inventory

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
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

// WithHost returns the inventory as limited by the host: units of GPUs that another agent offers are left out. Units that move to
// another API, whose MPS daemon does not respond, that another agent claims, that processes occupy, that need a missing IMEX channel,
// or that need CDI and are not defined are unhealthy, with OverlapRefuse also those that this agent has not claimed (Host.Own). A unit that is unhealthy already keeps its reason.
func (inv *Inventory) WithHost(h Host, o OverlapMode) *Inventory {
	var against *Claim
	var occupied *Occupied
	var overlaps []Overlap
	awaitsClaim, withheld := false, map[gpu.DeviceID]health.Health{}
	inv = inv.withAssignments(h.Assignments)
	next := inv.withHealth(func(u *Unit, first bool) health.Health {
		moving, moves := inv.movingHealth(u)
		if first {
			occupied = h.occupied(u.Device.ID)
			if against = h.overlappingClaim(u.Device); against != nil {
				overlaps = append(overlaps, Overlap{Device: u.Device.ID, Agent: against.Agent})
			}
		}
		notOurs := health.Health{} // the GPU is not this agent's, or perhaps not
		switch {
		case moves:
			notOurs = moving
		case against != nil && against.Older && o == OverlapRefuse:
			notOurs = health.New(health.ReasonOverlap, against.Agent)
		case o == OverlapRefuse && h.Own.Else != "" && !h.Own.cover(u.Device.At):
			awaitsClaim = awaitsClaim || h.Own.Pending
			notOurs = health.New(health.ReasonOverlap, h.Own.Else)
		}
		switch {
		case !u.Health.Schedulable():
			if notOurs != (health.Health{}) && u.Health.Tolerable() {
				withheld[u.Device.ID] = notOurs
			}
		case notOurs != (health.Health{}):
			return notOurs
		case occupied != nil:
			return health.New(health.ReasonOccupied, occupied.Detail)
		case u.Sharing.Mode == MPS && !slices.Contains(h.MPS, u.Pool):
			return health.New(health.ReasonNoMPS, "pool "+u.Pool)
		case inv.imexMissing:
			return health.New(health.ReasonNoIMEX, gpu.IMEXChannelNode)
		case u.Injection.usesCDI(h.CDI, inv.incarnation):
			if ok, why := h.CDI.gives(u, inv.incarnation); !ok {
				return health.New(health.ReasonNoCDI, why)
			}
		}
		return u.Health
	})
	if inv.NeedsCDI() {
		next.cdi = h.CDI
	}
	next.overlaps, next.awaitsClaim, next.withheld = overlaps, awaitsClaim, withheld
	return next
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

// Overlaps returns the offered devices that other agents on this host offer too, in canonical order.
func (inv *Inventory) Overlaps() []Overlap { return slices.Clone(inv.orEmpty().overlaps) }

// String returns the overlap as one line for operators.
func (c Overlap) String() string { return fmt.Sprintf("%s is also offered by %s", c.Device, c.Agent) }

// Withhold returns inv with the given units unhealthy (ReasonHeld), because a workload holds their device under
// another name. The argument maps each unit to a description of the holder. A unit that is unhealthy already keeps
// its reason.
func (inv *Inventory) Withhold(why map[UnitID]string) *Inventory {
	if inv == nil || len(why) == 0 {
		return inv
	}
	return inv.withHealth(func(u *Unit, _ bool) health.Health {
		if detail, ok := why[u.ID]; ok && u.Health.Schedulable() {
			return health.New(health.ReasonHeld, detail)
		}
		return u.Health
	})
}
