package core

// HealthSample are what one check of a GPU says about its health. They are comparable; the zero value of a
// field means that the GPU does not say (not supported here), which is never a fault.
type HealthSample struct {
	RecoveryAction RecoveryAction `json:"Verdict"`

	RemapPending      Tristate // a row remap takes effect at the next reset (Ampere and newer)
	RemapFailed       Tristate // a row could not be remapped
	RetirementPending Tristate // a page retirement takes effect at the next reset (before Ampere)
	RepairPending     Tristate // a channel or TPC repair takes effect at the next reset
	Unrepairable      Tristate // memory that can't be repaired (Hopper and newer)
	SRAMThreshold     Tristate // SRAM errors above the driver's threshold; only root is told
	InfoROMCorrupt    Tristate // looked at once a session, as it reads flash

	Uncorrectable OptionalUint64 // volatile uncorrectable ECC errors since the last reset
	Energy        OptionalUint64 // millijoules since the driver was last loaded
	Replays       OptionalUint64 // PCIe replays since the last reset

	ThermalSlowdown OptionalUint64 // nanoseconds that the hardware throttled for heat (NVML field 270)
	PowerBrake      OptionalUint64 // nanoseconds that an external power brake throttled (NVML field 271)

	PCIeWidth    int  // lanes at present; 0 = unknown. Fewer than the maximum is normal while idle
	PCIeMaxWidth int  // lanes that GPU and slot can have together
	PCIeGen      int  // generation at present
	Busy         bool // the GPU was computing when the width was read

	LinksUp OptionalUint64 // active NVLinks
	Fabric  Fabric
	Events  Tristate // whether the driver raises XID events for this GPU and they are listened to

	// Partial says that something that this GPU has said before could not be read this time: such a
	// check tells of faults, but it is no sign of health.
	Partial bool
}

// Tristate is a yes or a no that may be missing (the zero value).
type Tristate uint8

// The answers.
const (
	NotReported Tristate = iota
	No
	Yes
)

// TristateOf is a yes or a no.
func TristateOf(yes bool) Tristate {
	if yes {
		return Yes
	}
	return No
}

// RecoveryAction is what the driver wants done about a GPU: NVML field 230, nvmlDeviceGpuRecoveryAction_t. The
// zero value is no verdict: the field is not there, or, in a vGPU guest, NONE is what it always says.
type RecoveryAction uint8

// The verdicts. Their order is not that of severity.
const (
	RecoveryUnknown RecoveryAction = iota
	RecoveryNone
	RecoveryReset
	RecoveryReboot
	RecoveryDrainP2P
	RecoveryDrainAndReset
	RecoveryIMEX
	RecoveryOther // a value above 5, which nvml.h of this version does not name
)

func (v RecoveryAction) String() string {
	return [...]string{
		"no verdict", "none", "GPU reset", "node reboot", "drain P2P", "drain and reset", "recover IMEX domain", "unknown action",
	}[v]
}

// recoveryActionOf is the verdict that a condition holds as its code, whatever a file says that it was.
func recoveryActionOf(code uint64) RecoveryAction {
	return RecoveryAction(min(code, uint64(RecoveryOther)))
}

// action is what an operator does about a verdict.
func (v RecoveryAction) action() string {
	return [...]string{
		RecoveryReset: "drain and reset the GPU", RecoveryReboot: "drain and reboot the node",
		RecoveryDrainP2P: "end peer-to-peer work, reset the GPU", RecoveryDrainAndReset: "drain and reset the GPU",
		RecoveryIMEX: "recover the IMEX domain", RecoveryOther: "see the driver's release notes, reset the GPU",
	}[v]
}

// Fabric is the standing of a GPU in an NVSwitch fabric (nvmlGpuFabricInfo_t and its health mask).
type Fabric uint8

// The states of a fabric.
const (
	FabricNotReported Fabric = iota // not supported, or no part of a fabric
	FabricStarting                  // NOT_STARTED or IN_PROGRESS: probing has not completed
	FabricHealthy
	FabricLimited       // LIMITED_CAPACITY, or degraded bandwidth
	FabricUnhealthy     // health summary UNHEALTHY, or completed with an error
	FabricMisconfigured // the health mask says INCORRECT_CONFIGURATION
)
