package inventory

import (
	"fmt"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Host is the state of the node apart from the driver. It is always replaced as a whole.
type Host struct {
	MPS       []string     // pools whose MPS control daemon responds
	Peers     []PeerDevice // what other agents on this node offer
	Recorded  Recorded     // what this agent offers, where other agents read it
	Ownership Ownership
	CDI       *CDI       // CDI specifications of this agent; nil = the first attempt to write one is not completed
	Proofs    *Proofs    // nil = no GPU is proved
	Limits    *Limits    // nil = no part of this agent looks whether memory can be limited
	Occupied  []Occupied // devices that take no new work because of processes; empty unless OccupancyWithhold

	// SharesNumbers means that Numbering is updated: a number that this agent proposes is in it shortly after.
	SharesNumbers bool
	Numbering     Numbering // of all agents on this node, including earlier processes of this one; that of the highest generation
}

// PeerDevice is a device that another agent offers.
type PeerDevice struct {
	Agent   string // "nomad-gpu"
	At      gpu.Placement
	Earlier bool // it was recorded before this agent recorded the same hardware
}

// Recorded are the devices of this agent that are on disk, where other agents read them. It is always replaced as a whole.
type Recorded struct {
	At []gpu.Placement

	// Reason is why, with OverlapRefuse, a device that no placement in At covers takes no new work: another agent may offer it. "" = it does,
	// as no other agent of this node has recorded any.
	Reason string

	// Pending means that this agent is about to record such a device, or to find out that it can't: within milliseconds, unless the disk
	// is slow.
	Pending bool
}

// Equal reports whether two values have the same devices.
func (r Recorded) Equal(o Recorded) bool {
	return r.Reason == o.Reason && r.Pending == o.Pending && slices.Equal(r.At, o.At)
}

func (r Recorded) cover(p gpu.Placement) bool {
	return slices.ContainsFunc(r.At, func(at gpu.Placement) bool { return at.Covers(p) })
}

// OverlapMode configures what happens to a device that another agent on this node offers, or may offer, too.
type OverlapMode string

// The overlap modes.
const (
	OverlapWarn OverlapMode = "warn" // both agents offer it, with a warning

	// Only the agent that recorded it first offers it for new work, and none before that is on disk. It is the default. Without
	// another agent that has files in the state directory it has no effect.
	OverlapRefuse OverlapMode = "refuse"
)

// Overlap is a device that this agent and another agent offer.
type Overlap struct {
	Device gpu.DeviceID
	Agent  string
}

// peerOn returns a device of another agent on the hardware of a device, preferably one that was recorded earlier; nil if there is
// none. A GPU shares hardware with its instances, but two instances do not.
func (h Host) peerOn(d gpu.Device) (found *PeerDevice) {
	for i := range h.Peers {
		p := &h.Peers[i]
		if p.At.Overlaps(d.At) && (found == nil || p.Earlier && !found.Earlier) {
			found = p
		}
	}
	return found
}

// Proofs is what a node that proves its GPUs knows of their proofs. It is never changed.
type Proofs struct {
	// Withheld is why a GPU takes no new work before a proof, "since the boot", or "" if it does. A GPU that is missing takes none until that is decided:
	// within milliseconds, unless the disk is slow.
	Withheld map[gpu.DeviceID]string

	Passed map[gpu.DeviceID]string // on which day a GPU passed its latest proof, "2026-11-27" in UTC; one that has not passed it is missing
}

// Equal reports whether two values have the same content.
func (p *Proofs) Equal(o *Proofs) bool {
	return p == o || p != nil && o != nil && maps.Equal(p.Withheld, o.Withheld) && maps.Equal(p.Passed, o.Passed)
}

// Withholds returns why a GPU takes no new work before a proof, or before that is decided; "" if it takes work. With nil every GPU does.
func (p *Proofs) Withholds(id gpu.DeviceID) (why string, decided bool) {
	if p == nil {
		return "", true
	}
	if why, decided = p.Withheld[id]; !decided {
		why = "until its record is read"
	}
	return why, decided
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
