package inventory

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// MIGStrategy is which devices of a GPU in MIG mode are offered.
type MIGStrategy string

// The MIG strategies. Names and meanings are those of NVIDIA's k8s-device-plugin.
const (
	MIGNone   MIGStrategy = "none"   // full GPUs only; MIG mode is ignored
	MIGSingle MIGStrategy = "single" // all GPUs have instances of one profile, which are offered as GPUs
	MIGMixed  MIGStrategy = "mixed"  // full GPUs and MIG instances, in a pool for each profile
)

// Config configures what a host offers.
type Config struct {
	MIG         MIGStrategy
	Exclude     []gpu.DeviceID // not offered; the UUID of a full GPU does not exclude its MIG instances
	Policy      Policy
	Packed      bool        // prefer the shared devices that are used most; default: those used least
	Overlap     OverlapMode // for devices that another agent on this host offers too
	DeviceNodes bool        // plans contain device nodes, not only environment variables
}
