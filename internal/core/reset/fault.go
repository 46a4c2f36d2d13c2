package reset

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// repair is what is done about a GPU.
type repair uint8

const (
	nothing repair = iota
	service
	handOver // the driver asks for another repair, or for none that is known
	proved   // it failed its proof, and the driver asks for no repair
	asked    // the driver asks for a reset
)

// repair returns what a GPU needs.
func (g *GPU) repair() repair {
	switch {
	case g.NeedsService:
		return service
	case g.Action == health.RecoveryReset || g.Action == health.RecoveryDrainAndReset:
		return asked
	case g.Action > health.RecoveryNone:
		return handOver
	case g.Action == health.RecoveryNone && g.ProofFailed:
		return proved
	case g.Action == health.RecoveryUnknown && (g.ProofFailed || g.Cause != "" && g.Repair >= health.Reset):
		return handOver
	}
	return nothing
}

// resets reports whether the repair is a reset.
func (r repair) resets() bool { return r >= proved }

// with is the P2P group of a GPU, if it must be free for a reset. A person may reset also a GPU whose driver asks for the end of its P2P work.
func (g *GPU) with(byPerson bool) []gpu.DeviceID {
	if g.Action == health.RecoveryDrainAndReset || byPerson && g.Action == health.RecoveryDrainP2P {
		return slices.Clone(g.Group)
	}
	return nil
}

// cause is the fault of a GPU; "" = none is known.
func (g *GPU) cause() string {
	switch {
	case g.Cause != "":
		return g.Cause
	case g.Action > health.RecoveryNone:
		return health.Condition{Reason: health.ReasonRecoveryAction, Code: uint64(g.Action)}.Cause()
	case g.ProofFailed:
		return health.ReasonProofFailed.String()
	}
	return ""
}

// actionOf is the recovery action of a GPU. One that this version does not know is another.
func actionOf(g *GPU) health.RecoveryAction { return min(g.Action, health.RecoveryOther) }
