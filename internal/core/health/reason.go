package health

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Reason is the kind of cause of a condition.
type Reason uint8

// Reasons. The zero value is the reason of a healthy unit.
const (
	ReasonNone           Reason = iota
	ReasonXID                   // the driver reported an XID; Code is its number
	ReasonEvent                 // the driver raised another event; Code is its NVML type
	ReasonRecoveryAction        // the driver reports a recovery action other than None; Detail is its text
	ReasonLost                  // the GPU can't be reached, or is not listed
	ReasonProbe                 // calls about this GPU return errors
	ReasonUnresponsive          // a call about this GPU does not return
	ReasonUnchecked             // no check of the GPU was complete yet
	ReasonDriver                // the driver can't be called
	ReasonMaintenance           // the driver is not called, by an operator's command
	ReasonRemapFailed           // remapping a memory row failed
	ReasonUnrepairable          // memory that can't be repaired
	ReasonSRAM                  // SRAM errors above the driver's threshold
	ReasonRemapPending          // a row remap is pending until the next reset
	ReasonRetirement            // a page retirement is pending until the next reset
	ReasonRepair                // a channel or TPC repair is pending until the next reset
	ReasonInfoROM               // the InfoROM is corrupt
	ReasonECC                   // uncorrectable errors were counted that no XID reported
	ReasonOperational           // the driver raised a fatal operational event without an XID
	ReasonFabricWait            // the fabric has not completed yet
	ReasonFabric                // the fabric is unhealthy or misconfigured
	ReasonFabricLimits          // the fabric has reduced capacity or bandwidth
	ReasonNVLinksDown           // fewer NVLinks are active than before
	ReasonThermal               // the hardware throttles for heat most of the time
	ReasonPowerBrake            // an external power brake throttles most of the time
	ReasonReplays               // the PCIe link replays more packets than a sound link does
	ReasonPCIeWidth             // the PCIe link is narrower under load than it can be
	ReasonWorkloads             // several workloads had application faults on this GPU
	ReasonNeedsService          // too many recoveries, the same severe XID soon after a reset, or another failed proof after one
	ReasonProofFailed           // the GPU failed its latest proof
	ReasonFaultUnknown          // a health history could not be read: the GPU may have a fault

	// Reasons of units in an inventory, which the ledger does not use.

	ReasonWithdrawn    // no longer offered, after a change of MIG configuration, policy or hardware
	ReasonNoMPS        // the MPS control daemon of the unit's pool does not respond
	ReasonOverlap      // another agent on this node offers the device
	ReasonHeld         // a workload holds the device under another name than that of its present offer, or its memory by the limit of an older policy
	ReasonNoIMEX       // a required IMEX channel is missing
	ReasonNoCDI        // no CDI specification defines the device
	ReasonOccupied     // processes use the device that no work runs to which it was given
	ReasonMoving       // the GPU moves to another API
	ReasonProving      // the agent has taken the GPU from its API for a proof, or withholds it until there was one
	ReasonResetting    // the GPU is reset, or the driver is released for the reset of another one
	ReasonNoLimit      // the policy requires a limit of memory for the unit, and nothing on the node can hold one
	ReasonNoController // the same, because a controller of control groups is off
)

// OfUnit reports whether a reason is one of a unit, and not of a condition in the ledger: what holds or moves its device, or what it lacks on the node.
func (r Reason) OfUnit() bool { return r >= ReasonWithdrawn }

// meaning is what a reason results in. XIDs and NVML events have their own rules in package xid.
type meaning struct {
	name       string // for programs and metrics; never changes
	text       string // for operators
	state      State
	checks     int          // consecutive checks until it has an effect; 0 = one
	clears     xid.Evidence // LevelClear = the state itself is gone
	clearsText string       // text of the evidence, if more exact than that of clears
	action     string
	repair     Repair // what it takes to clear it
	severe     bool   // Policy.MaxRecoveries limits recoveries from it
}

const (
	level   = xid.LevelClear | xid.Reboot
	service = "run field diagnostics, replace the GPU if they fail"
)

var meanings = [...]meaning{
	ReasonNone:  {},
	ReasonXID:   {name: "XID"},
	ReasonEvent: {name: "EVENT"},
	ReasonRecoveryAction: {name: "RECOVERY_ACTION", // causes add the action
		text: "recovery action", state: Unhealthy, clears: level, clearsText: "recovery action None", severe: true},
	ReasonLost:         {name: "LOST", text: "GPU is lost", state: GPULost, clears: level, clearsText: "an answer from the GPU, or a reboot", action: "check slot and power, reboot the node", repair: Reboot, severe: true},
	ReasonProbe:        {name: "PROBE_FAILED", text: "GPU answers with an error", state: Unhealthy, clears: level, clearsText: "checks without an error", action: "see the driver's log, reset the GPU", repair: Reset},
	ReasonUnresponsive: {name: "NOT_ANSWERING", text: "driver does not answer", state: Unhealthy, clears: level, clearsText: "an answer from the driver, then checks without an error", action: "reset the GPU, reboot if it persists", repair: Reset},
	ReasonUnchecked:    {name: "UNCHECKED", text: "not checked yet", state: Unknown, clears: level, clearsText: "the first complete check"},
	ReasonDriver:       {name: "NVML_UNAVAILABLE", text: "driver is not usable", state: Unknown, clears: level, clearsText: "an answer from the driver"},
	ReasonMaintenance:  {name: "MAINTENANCE", text: "maintenance", state: Unknown, clears: level, clearsText: "the command resume", action: "resume when the work is done"},
	ReasonRemapFailed:  {name: "ROW_REMAP_FAILED", text: "row remapping failed", state: Unhealthy, checks: 2, action: service, repair: Replace},
	ReasonUnrepairable: {name: "MEMORY_UNREPAIRABLE", text: "memory can't be repaired", state: Unhealthy, checks: 2, action: service, repair: Replace},
	ReasonSRAM:         {name: "SRAM_THRESHOLD", text: "SRAM errors above the threshold", state: Unhealthy, checks: 2, action: service, repair: Replace},
	ReasonRemapPending: {name: "ROW_REMAP_PENDING", text: "row remap pending", state: Degraded, checks: 2, clears: level, clearsText: "a reset after which the driver no longer reports it", action: "reset the GPU when idle", repair: Reset},
	ReasonRetirement:   {name: "PAGE_RETIREMENT_PENDING", text: "page retirement pending", state: Degraded, checks: 2, clears: level, clearsText: "a reset after which the driver no longer reports it", action: "reset the GPU when idle", repair: Reset},
	ReasonRepair:       {name: "REPAIR_PENDING", text: "channel or TPC repair pending", state: Degraded, checks: 2, clears: level, clearsText: "a reset after which the driver no longer reports it", action: "reset the GPU when idle", repair: Reset},
	ReasonInfoROM:      {name: "INFOROM_CORRUPT", text: "InfoROM is corrupt", state: Degraded, clears: level, clearsText: "a valid InfoROM", action: "run field diagnostics", repair: Replace},
	ReasonECC:          {name: "ECC_UNCORRECTABLE", text: "uncorrectable ECC errors", state: Degraded, clears: xid.NoRecoveryAction | xid.ResetSeen | xid.Reboot | xid.Quiet, action: "drain and reset the GPU if they recur"},
	ReasonOperational: {name: "OPERATIONAL_EVENT", text: "fatal operational event", state: Degraded, clears: level,
		clearsText: "checks without an error", action: "see the driver's log, reset the GPU if it recurs"},
	ReasonFabricWait:   {name: "FABRIC_STARTING", text: "waiting for the NVLink fabric", state: Unknown, clears: level, clearsText: "the end of the GPU's registration with the fabric", action: "check the fabric manager"},
	ReasonFabric:       {name: "FABRIC_UNHEALTHY", text: "NVLink fabric unhealthy", state: Unhealthy, checks: 3, clears: level, clearsText: "a healthy fabric", action: "check the fabric manager", severe: true},
	ReasonFabricLimits: {name: "FABRIC_LIMITED", text: "NVLink fabric limited", state: Degraded, checks: 3, clears: level, clearsText: "a fabric at full capacity", action: "check the fabric manager"},
	ReasonNVLinksDown:  {name: "NVLINK_DOWN", text: "NVLinks down", state: Degraded, checks: 3, clears: level, clearsText: "links that are up", action: "reset the GPU when idle, check the links", repair: Reset},
	ReasonThermal:      {name: "SLOWDOWN_THERMAL", text: "throttled for heat most of the time", state: Degraded, clears: level, clearsText: "ten minutes with less throttling", action: "check cooling"},
	ReasonPowerBrake:   {name: "SLOWDOWN_POWER", text: "power brake on most of the time", state: Degraded, clears: level, clearsText: "ten minutes with less braking", action: "check the power supply"},
	ReasonReplays:      {name: "PCIE_REPLAYS", text: "PCIe link replays packets", state: Degraded, clears: level, clearsText: "ten minutes with fewer replays", action: "check slot, riser and cable"},
	ReasonPCIeWidth:    {name: "PCIE_WIDTH", text: "PCIe link narrow under load", state: Degraded, checks: 3, clears: level, clearsText: "full width under load", action: "check slot, riser and cable"},
	ReasonWorkloads:    {name: "WORKLOADS_FAILING", text: "possible hardware fault", state: Degraded, clears: xid.Quiet | xid.Reboot, clearsText: "an hour without such failures", action: "check the workloads, then run diagnostics"},
	ReasonNeedsService: {name: "NEEDS_SERVICE", text: "needs service", state: Unhealthy, action: service, repair: Replace},
	ReasonProofFailed:  {name: "PROOF_FAILED", text: "proof failed", state: Unhealthy, clears: xid.LevelClear, clearsText: "a proof that passes, or the command clear", action: "reset and prove the GPU", repair: Reset},
	ReasonNoMPS:        {name: "MPS_DAEMON_DOWN", text: "MPS control daemon does not answer", state: Unhealthy, clearsText: "an answer from the daemon", action: "start the pool's MPS control daemon"},
	ReasonOverlap:      {name: "OVERLAP", text: "offered by another agent", state: Unhealthy, clearsText: "the end of the other agent's offer", action: "give the agents different GPUs, or see the warnings"},
	ReasonHeld:         {name: "HELD", text: "held", state: Unhealthy, clearsText: "the end of the workload", action: "end the workload, or wait for its end"},
	ReasonNoIMEX:       {name: "IMEX_CHANNEL_MISSING", text: "a required IMEX channel is missing", state: Unhealthy, clearsText: "the channel's device node", action: "load the kernel module nvidia with NVreg_CreateImexChannel0=1"},
	ReasonNoCDI:        {name: "CDI_UNDEFINED", text: "no CDI definition", state: Unhealthy, clearsText: "its CDI definition", action: "run doctor"},
	ReasonOccupied:     {name: "OCCUPIED", text: "in use by processes without a reservation", state: Unhealthy, clearsText: "the end of the processes", action: "end the processes, or reserve the GPU for them"},
	ReasonMoving:       {name: "MOVING", text: "moves", state: Unhealthy, clearsText: "the end of the move"},
	ReasonProving:      {name: "PROVING", text: "withheld for a proof for a short time", state: Unknown, clearsText: "the end of the proof"},
	ReasonResetting:    {name: "RESETTING", text: "withheld for the reset of a GPU for a short time", state: Unknown, clearsText: "the end of the reset"},
	ReasonNoLimit: {name: "LIMIT_UNSUPPORTED", text: "no limit of memory", state: Unhealthy, clearsText: "support for the limit",
		action: "run doctor"},
	ReasonNoController: {name: "LIMIT_CONTROLLER_OFF", text: "no limit of memory", state: Unhealthy, clearsText: "an enabled controller",
		action: "run doctor"},
	ReasonWithdrawn: {name: "WITHDRAWN", text: "no longer offered", state: Unhealthy},
	ReasonFaultUnknown: {
		name: "FAULTS_UNKNOWN", text: "earlier faults are not known", state: Unknown,
		clears: xid.NoRecoveryAction | xid.ResetSeen | xid.Reboot, repair: Reset,
		action: "reset or prove the GPU, or run clear",
	},
}

// Reasons returns all reasons except ReasonNone.
func Reasons() []Reason {
	all := make([]Reason, 0, len(meanings))
	for r := range meanings[1:] {
		all = append(all, Reason(r+1)) //nolint:gosec // an index of meanings, which a Reason is
	}
	return all
}

func (r Reason) meaning() meaning { return meanings[r] }

// isUnresponsive reports whether the reason is that the GPU or instance does not respond.
func (r Reason) isUnresponsive() bool {
	return r == ReasonLost || r == ReasonProbe || r == ReasonUnresponsive || r == ReasonUnchecked
}

// String returns the name of the reason for programs: "XID", "ROW_REMAP_PENDING"; "" for ReasonNone.
func (r Reason) String() string { return meanings[r].name }

// MarshalText returns the name of the reason.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText parses the output of MarshalText.
func (r *Reason) UnmarshalText(text []byte) error {
	names := make([]string, len(meanings))
	for i, m := range meanings {
		names[i] = m.name
	}
	return gpu.UnmarshalName(r, names, string(text), "reason")
}
