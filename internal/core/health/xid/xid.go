// Package xid is a table of the faults that NVIDIA's driver reports: XIDs and NVML events. For each code it has
// the effect on the GPU's health, the evidence that clears the fault, and what an operator should do. Package
// health applies the table.
//
// Codes, mnemonics and NVIDIA's recommendations are those of NVIDIA's XID catalogue (Ampere and newer) and of
// nverror.h in NVIDIA's open kernel modules. docs/faults.md is generated from this table.
package xid

import "time"

// Class is what a fault affects, and thereby what clears it.
type Class uint8

// The classes.
const (
	Application Class = iota + 1 // a program made an error; the GPU is healthy
	Contained                    // one context or resource is affected; the rest of the GPU works
	Reset                        // the GPU can't be used until it is reset
	Node                         // a reset is not enough: power, seating or a reboot
	Fabric                       // a link to another GPU, a switch or the CPU
	Info                         // recorded only
	Suspect                      // unknown, or NVIDIA's own sources contradict each other
	Trigger                      // not a fault: the driver's recovery action for the GPU changed
)

// Effect is what a fault does to the health of what it affects. A greater effect is worse.
type Effect uint8

// The effects. The zero value is None.
const (
	None      Effect = iota
	Degrades         // new work may still be placed
	Withdraws        // unhealthy: no new work
	Loses            // lost: the GPU can't be reached
)

// Evidence is a set of signs, each of which alone shows that a fault is over. An operator can clear every fault; a
// fault with the empty set can be cleared by an operator only.
type Evidence uint8

// The signs.
const (
	NoRecoveryAction Evidence = 1 << iota // the driver's recovery action (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) is None
	ResetSeen                             // the GPU was reset after the fault
	Reboot                                // the node was rebooted after the fault
	LevelClear                            // the state in Rule.Level is gone
	Quiet                                 // the fault was not repeated for a time
)

// Level is a persistent state that can be read at any time, unlike an event.
type Level uint8

// The levels. The zero value is none.
const (
	LevelNone           Level = iota
	LevelMemoryRepair         // a row remap or a page retirement is pending
	LevelResourceRepair       // a channel or TPC repair is pending
	LevelLinks                // an NVLink that was active is down
)

// Rule is the treatment of one code. It is a plain value; changing it does not change the table.
type Rule struct {
	Code    uint64 // XID, or NVML event type
	Name    string // NVIDIA's mnemonic; "" if there is none
	Meaning string // one line for operators
	Class   Class

	// Effect counts immediately. SettledEffect counts from the end of the settle window (health.Policy.SettleTime) if
	// the driver does not report recovery actions by then, or its branch does not cover this code (RecoveryActionSince). The two are equal where waiting gives no information.
	Effect, SettledEffect Effect

	// NVLinkOnly limits SettledEffect to GPUs with NVLinks. Other GPUs are at most degraded.
	NVLinkOnly bool

	// RecoveryActionSince is the first driver branch (565 is R565) whose recovery action covers this code, by the
	// catalogue. From that branch on, the recovery action overrides Effect in both directions. 1 is every branch
	// that has the code, 0 none.
	RecoveryActionSince int

	Clears Evidence
	Level  Level // the state that LevelClear refers to

	// A repeat within RepeatWindow (0 = no such rule) has RepeatEffect, unless the recovery action covers the code.
	RepeatWindow time.Duration
	RepeatEffect Effect

	Action string // what an operator should do; "" if nothing

	// NVIDIA's resolution buckets in the catalogue: immediate and investigatory action. "" if the catalogue has
	// none.
	Immediate, Investigatory string
}

// IsNote reports whether the fault has no effect, not even if it is repeated.
func (r Rule) IsNote() bool {
	return r.Effect == None && r.SettledEffect == None && r.RepeatWindow == 0
}

// RecoveryActionChanged is the XID of a changed recovery action, which the kernel log names.
const RecoveryActionChanged = 154

// WholeGPU reports whether the fault affects the whole GPU even if the driver reports it for a MIG instance: an
// instance can't be reset alone, and has no link of its own.
func (r Rule) WholeGPU() bool {
	return r.Class == Reset || r.Class == Node || r.Class == Fabric
}
