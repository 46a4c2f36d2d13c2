package inventory

import (
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Allocatable is what takes work now: the devices of an inventory that this agent has, with the health that follows from the node, too. It is
// immutable. The zero value has no units. Its units and excluded devices are its own, all else is the inventory's.
type Allocatable struct {
	*Inventory
	unitList
	excluded     []gpu.Exclusion
	cdi          *CDI // nil = not known, or not needed
	needsCDI     bool // as the inventory's, or a unit has come to DRA
	awaitsRecord bool // a device takes no work yet, because this agent has not recorded it so far
	overlaps     []Overlap
	proofs       *Proofs
	awaitsProofs bool // a device takes no work yet, because it is not decided so far whether it waits for a proof
	limits       *Limits
	awaitsLimits bool                           // a device takes no work yet, because it is not known so far whether its memory can be limited
	ownership    Ownership                      // as applied
	retiring     map[UnitID]time.Time           // since when
	withheld     map[gpu.DeviceID]health.Health // why a device with a fault takes no work that tolerates that: it is not this agent's
}

// WithoutHost returns what would take work if the node did not limit it.
func (inv *Inventory) WithoutHost() *Allocatable {
	return &Allocatable{Inventory: inv, unitList: inv.unitList, excluded: inv.excluded, needsCDI: inv.needsCDI}
}

// WithHost returns what takes work by the state of the node. Units of GPUs that another agent offers are left out. Units that move to
// another API, that the agent has taken for itself, whose MPS daemon does not respond, that another agent offers, too, that wait for a proof, that processes occupy, that need a missing IMEX channel,
// that need CDI and are not defined, or whose memory can't be limited as the policy requires are unhealthy, with OverlapRefuse also those that this agent has not recorded (Host.Recorded), and all while
// the driver is released for a reset. A unit that is unhealthy already keeps its reason.
func (inv *Inventory) WithHost(h Host, o OverlapMode) *Allocatable {
	a := inv.WithoutHost()
	a.withheld, a.proofs, a.limits = map[gpu.DeviceID]health.Health{}, h.Proofs, h.Limits
	a.applyOwnership(h.Ownership)
	if a.needsCDI {
		a.cdi = h.CDI
	}
	var peer *PeerDevice // of the device of the unit
	var occupied *Occupied
	a.unitList = a.withHealth(func(u *Unit, first bool) health.Health {
		if first {
			occupied = h.occupied(u.Device.ID)
			if peer = h.peerOn(u.Device); peer != nil {
				a.overlaps = append(a.overlaps, Overlap{Device: u.Device.ID, Agent: peer.Agent})
			}
		}
		limited := a.notOurs(u, h, o, peer)
		switch {
		case !u.Health.Schedulable():
			if resets := a.released(u); resets != (health.Health{}) {
				return resets
			}
			if limited != (health.Health{}) && u.Health.Tolerable() {
				a.withheld[u.Device.ID] = limited
			}
			return u.Health
		case limited == (health.Health{}):
			if limited = a.missing(u, h, occupied); limited == (health.Health{}) {
				limited = a.released(u)
			}
			if limited == (health.Health{}) {
				return u.Health
			}
		}
		limited.MissingNodes = u.Health.MissingNodes
		return limited
	})
	return a
}

// notOurs returns the health of a unit whose GPU is not this agent's, or perhaps not; zero if it is.
func (a *Allocatable) notOurs(u *Unit, h Host, o OverlapMode, peer *PeerDevice) health.Health {
	pending, isPending := a.pendingHealth(u)
	switch {
	case isPending:
		return pending
	case peer != nil && peer.Earlier && o == OverlapRefuse:
		return health.New(health.ReasonOverlap, peer.Agent)
	case o == OverlapRefuse && h.Recorded.Reason != "" && !h.Recorded.cover(u.Device.At):
		a.awaitsRecord = a.awaitsRecord || h.Recorded.Pending
		return health.New(health.ReasonOverlap, h.Recorded.Reason)
	}
	return health.Health{}
}

// missing returns the health of a unit for which the node lacks something that work on it needs, or that is unproved or occupied; zero if that
// is not so.
func (a *Allocatable) missing(u *Unit, h Host, occupied *Occupied) health.Health {
	switch unproved, decided := h.Proofs.Withholds(u.Device.At.GPU); {
	case unproved != "":
		a.awaitsProofs = a.awaitsProofs || !decided
		return health.New(health.ReasonProving, unproved)
	case occupied != nil:
		return health.New(health.ReasonOccupied, occupied.Detail)
	case u.Sharing.Mode == MPS && !slices.Contains(h.MPS, u.Pool):
		return health.New(health.ReasonNoMPS, "pool "+u.Pool)
	case a.imexMissing:
		return health.New(health.ReasonNoIMEX, gpu.IMEXChannelNode)
	case u.Injection.usesCDI(h.CDI, a.incarnation):
		if ok, why := h.CDI.gives(u, a.incarnation); !ok {
			return health.New(health.ReasonNoCDI, why)
		}
	}
	a.awaitsLimits = a.awaitsLimits || a.awaitsLimit(u)
	return a.noLimit(u)
}

// Withhold returns a with the given units unhealthy (ReasonHeld), because a workload holds their device under
// another name. The argument maps each unit to a description of the holder. A unit that is unhealthy already keeps
// its reason.
func (a *Allocatable) Withhold(why map[UnitID]string) *Allocatable {
	if len(why) == 0 {
		return a
	}
	next := *a
	next.unitList = a.withHealth(func(u *Unit, _ bool) health.Health {
		if detail, ok := why[u.ID]; ok && u.Health.Schedulable() {
			return health.New(health.ReasonHeld, detail)
		}
		return u.Health
	})
	return &next
}

// Provisional reports whether devices may be missing that will be offered, or unhealthy only because the agent has just started:
// until the first snapshot, or (for milliseconds) while AwaitsNumbers or AwaitsFirstPass.
// An adapter must not treat such a value as complete, because a missing device may be in use by a workload.
func (a *Allocatable) Provisional() bool {
	return a.Driver().State == gpu.DriverPending || a.AwaitsNumbers() || a.AwaitsFirstPass()
}

// AwaitsNumbers reports whether devices are missing that will be offered when the agents of the node have shared their numbers.
func (a *Allocatable) AwaitsNumbers() bool { return a.orEmpty().awaitsNumber }

// AwaitsFirstPass reports whether devices are unhealthy only because a part of this agent has not seen them so far: it has not written a CDI
// specification for the present incarnation of the driver, or its record of them, or has not read whether they wait for a proof or their memory can be limited.
// It has done so, or has failed, within milliseconds, unless the disk is slow.
func (a *Allocatable) AwaitsFirstPass() bool {
	awaitsCDI := a.Driver().State == gpu.DriverReady && a.needsCDI && (a.cdi == nil || a.cdi.Incarnation != a.incarnation)
	return awaitsCDI || a.awaitsRecord || a.awaitsProofs || a.awaitsLimits
}

// Excluded returns the devices that are not offered, with reasons.
func (a *Allocatable) Excluded() []gpu.Exclusion { return slices.Clone(a.excluded) }

// Overlaps returns the offered devices that other agents on this node offer too, in canonical order.
func (a *Allocatable) Overlaps() []Overlap { return slices.Clone(a.overlaps) }

// Equal reports whether two values offer the same, so that the second one need not be published.
func (a *Allocatable) Equal(b *Allocatable) bool {
	asInventories := a.is(a.orEmpty().unitList) && b.is(b.orEmpty().unitList) // which are compared already
	return a.Inventory.Equal(b.Inventory) && (asInventories || slices.Equal(a.units, b.units)) && slices.Equal(a.excluded, b.excluded) &&
		slices.Equal(a.overlaps, b.overlaps) && a.awaitsRecord == b.awaitsRecord && a.awaitsProofs == b.awaitsProofs && a.awaitsLimits == b.awaitsLimits && a.ownership.Equal(b.ownership) &&
		maps.Equal(a.withheld, b.withheld) && a.cdi.Equal(b.cdi) && a.proofs.Equal(b.proofs) && a.limits.Equal(b.limits)
}

// ProvedOn is the day on which a GPU passed its latest proof, "" if it has not passed it; false if no GPU is proved.
func (a *Allocatable) ProvedOn(id gpu.DeviceID) (string, bool) {
	if a.proofs == nil {
		return "", false
	}
	return a.proofs.Passed[id], true
}
