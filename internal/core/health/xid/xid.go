// Package xid says what the faults mean that NVIDIA's driver reports: XIDs and NVML events. It is data
// and no more: what a fault does to a GPU, what is evidence that it is over, and what an operator should
// do. Remembering faults and weighing evidence is the ledger's work.
//
// Codes, mnemonics and NVIDIA's own advice are those of NVIDIA's XID catalogue (Ampere and newer) and of
// nverror.h in NVIDIA's open kernel modules. docs/faults.md is made from this table.
package xid

import "time"

// Class says what a fault concerns, and so what it takes to be rid of it.
type Class uint8

// The classes.
const (
	Application Class = iota + 1 // a program did something wrong; the GPU is well
	Contained                    // one context or resource is hit; the rest of the GPU works
	Reset                        // the GPU is of no use until it is reset
	Node                         // the machine needs a hand: power, seating, a reboot
	Fabric                       // a link to another GPU, a switch or the CPU
	Info                         // worth a line in a log
	Suspect                      // unknown, or NVIDIA's own sources contradict each other
	Trigger                      // no fault: the driver's verdict about the GPU has changed
)

// Effect is what a fault does to the health of what it hits. Effects are ordered: the greater is worse.
type Effect uint8

// The effects. The zero value is None.
const (
	None      Effect = iota
	Degrades         // new work may still be placed
	Withdraws        // unhealthy: no new work
	Loses            // lost: the GPU can't be reached
)

// Evidence is a set of signs, each of which alone shows that a fault is over. An operator can always say
// so; the empty set means that nobody else can.
type Evidence uint8

// The signs.
const (
	NoRecoveryAction Evidence = 1 << iota // the driver's recovery action (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) is None
	ResetSeen                             // the GPU was re-initialised after the fault
	Reboot                                // the machine was
	LevelClear                            // the reading that Rule.Level names says that the condition is gone
	Quiet                                 // the fault was not repeated for a while
)

// Level is a standing condition that can be read at any time, unlike an event.
type Level uint8

// The levels. The zero value is none.
const (
	LevelNone           Level = iota
	LevelMemoryRepair         // a row remap or a page retirement is pending
	LevelResourceRepair       // a channel or TPC repair is pending
	LevelLinks                // an NVLink that was up is down
)

// Rule is what one code means. It is a plain value; the table can't be changed through it.
type Rule struct {
	Code    uint64 // XID, or NVML event type
	Name    string // NVIDIA's mnemonic; "" for a code without one
	Meaning string // in an operator's words, for one line
	Class   Class

	// Effect counts at once. Settled counts from the end of the settle window on if the driver has given no
	// verdict until then; it is the same as Effect where waiting tells nothing.
	Effect, SettledEffect Effect

	// NVLinkOnly says that Settled is meant for a GPU with NVLinks; another only degrades.
	NVLinkOnly bool

	// RecoveryActionSince is the first driver branch (565 is R565) whose recovery action covers this code, by the
	// catalogue: from there on the verdict overrides this rule, in both directions. 1 is every branch that
	// knows the code, 0 none.
	RecoveryActionSince int

	Clears Evidence
	Level  Level // what LevelClear means for this code

	// A second one within Again (0 = no such rule) has AgainEffect, unless the driver gives a verdict that
	// covers the code.
	RepeatWindow time.Duration
	RepeatEffect Effect

	Action string // what an operator should do; "" if there is nothing to do

	// NVIDIA's resolution buckets: what the catalogue says to do at once, and to find out. "" if it is silent.
	Immediate, Investigatory string
}

// WholeGPU reports whether the fault concerns the whole GPU even where the driver names a MIG instance: no
// instance can be reset, or has a link, of its own.
func (r Rule) WholeGPU() bool {
	return r.Class == Reset || r.Class == Node || r.Class == Fabric
}
