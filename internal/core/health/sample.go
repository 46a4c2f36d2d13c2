package health

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Sample is the result of one health check of a GPU. It is comparable. The zero value of a field means that
// the GPU does not report it (not supported), which is never a fault.
type Sample struct {
	RecoveryAction RecoveryAction

	RemapPending      Tristate // a row remap takes effect at the next reset (Ampere and newer)
	RemapFailed       Tristate // a row could not be remapped
	BankRemapPending  Tristate `json:",omitempty"` // the remap of a memory bank is pending (Rubin and newer)
	RetirementPending Tristate // a page retirement takes effect at the next reset (before Ampere)
	RepairPending     Tristate // a channel or TPC repair takes effect at the next reset
	Unrepairable      Tristate // memory that can't be repaired (Hopper and newer)
	SRAMThreshold     Tristate // SRAM errors above the driver's threshold; reported to root only
	InfoROMCorrupt    Tristate // read once per session, because it reads flash memory

	Uncorrectable gpu.OptionalUint64 // volatile uncorrectable ECC errors since the last reset
	Energy        gpu.OptionalUint64 // millijoules since the driver was last loaded
	Replays       gpu.OptionalUint64 // PCIe replays since the last reset

	ThermalSlowdown gpu.OptionalUint64 // nanoseconds that the hardware throttled for heat (NVML field 270)
	PowerBrake      gpu.OptionalUint64 // nanoseconds that an external power brake throttled (NVML field 271)

	PCIeWidth    int  // lanes at present; 0 = unknown. Fewer than the maximum is normal while idle
	PCIeMaxWidth int  // lanes that GPU and slot both support
	PCIeGen      int  // present generation
	Busy         bool // the GPU was computing when the width was read

	LinksUp gpu.OptionalUint64 // active NVLinks
	Fabric  Fabric
	Clique  string   `json:",omitempty"` // cluster UUID and clique of the NVLink domain: "5aa670e3-c604-50d0-9fe6-03876178f7cd.32766"; "" = in none
	VGPU    Tristate `json:",omitempty"` // a virtual GPU of a virtual machine (nvmlDeviceGetVirtualizationMode)
	Events  Tristate // whether the driver raises XID events for this GPU, and the agent receives them

	// OperationalEvents is the same of operational events, which drivers from 615 on may have.
	OperationalEvents Tristate `json:",omitempty"`

	// Partial means that a value which this GPU reported before could not be read this time. Such a check can show
	// faults, but it is not a clean check.
	Partial bool
}

// Tristate is yes, no or not reported (the zero value).
type Tristate uint8

// The values of a Tristate.
const (
	NotReported Tristate = iota
	No
	Yes
)

// TristateOf returns Yes or No.
func TristateOf(yes bool) Tristate {
	if yes {
		return Yes
	}
	return No
}

// RecoveryAction is the action that the driver recommends for a GPU (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, field
// 230, nvmlDeviceGpuRecoveryAction_t). The zero value means not reported: the field is not supported, or the
// driver is that of a vGPU guest, where it is always NONE.
type RecoveryAction uint8

// The recovery actions. Their order is not that of severity.
const (
	RecoveryUnknown RecoveryAction = iota
	RecoveryNone
	RecoveryReset
	RecoveryReboot
	RecoveryDrainP2P
	RecoveryDrainAndReset
	RecoveryIMEX
	RecoveryBusReset
	RecoverySystemReboot
	RecoveryOther // a value above 7, the largest in this version of nvml.h
)

// String returns the action as text for operators: "GPU reset".
func (v RecoveryAction) String() string {
	return [...]string{
		"not reported", "none", "GPU reset", "node reboot", "drain P2P", "drain and reset", "recover IMEX domain", "bus reset", "system reboot",
		"unknown action",
	}[v]
}

// recoveryActionOf returns the recovery action in the code of a condition. A code that is out of range, in a
// damaged file, is RecoveryOther.
func recoveryActionOf(code uint64) RecoveryAction {
	return RecoveryAction(min(code, uint64(RecoveryOther)))
}

// action returns what an operator should do about the recovery action.
func (v RecoveryAction) action() string {
	return [...]string{
		RecoveryReset: "drain and reset the GPU", RecoveryReboot: "drain and reboot the node",
		RecoveryDrainP2P: "end peer-to-peer work, reset the GPU", RecoveryDrainAndReset: "drain and reset the GPU",
		RecoveryIMEX:     "recover the IMEX domain",
		RecoveryBusReset: "drain and reset the GPU's PCIe bus, reboot the node if that is not possible", RecoverySystemReboot: "drain and reboot the system",
		RecoveryOther: "see the driver's release notes, reset the GPU",
	}[v]
}

// Fabric is the state of a GPU in an NVSwitch fabric (nvmlGpuFabricInfo_t and its health mask).
type Fabric uint8

// The states of a fabric.
const (
	FabricNotReported Fabric = iota // not supported, or not part of a fabric
	FabricStarting                  // NOT_STARTED or IN_PROGRESS: probing has not completed
	FabricHealthy
	FabricLimited       // LIMITED_CAPACITY, or degraded bandwidth
	FabricUnhealthy     // health summary UNHEALTHY, or probing completed with an error
	FabricMisconfigured // the health mask contains INCORRECT_CONFIGURATION
)
