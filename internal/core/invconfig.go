package core

// MIGStrategy says which devices of a GPU in MIG mode are offered.
type MIGStrategy string

// The strategies; names and meanings are those of NVIDIA's k8s-device-plugin.
const (
	MIGNone   MIGStrategy = "none"   // full GPUs only, MIG mode is ignored
	MIGSingle MIGStrategy = "single" // every GPU is cut into instances of one profile, offered as GPUs
	MIGMixed  MIGStrategy = "mixed"  // instances beside full GPUs, each under its own profile
)

// InventoryConfig says what of a machine is offered, and how.
type InventoryConfig struct {
	MIG         MIGStrategy
	Exclude     []DeviceID // never offered; a full GPU's UUID does not exclude its MIG instances
	Policy      Policy
	Packed      bool        // of shared devices those in use are preferred; else those that are used least
	Overlap     OverlapMode // what becomes of a device that another agent on this host offers too
	DeviceNodes bool        // plans carry device nodes beside the environment
}
