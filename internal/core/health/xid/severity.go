package xid

import (
	"strconv"
	"strings"
)

// Severity is how bad a fault of NVLink 5 is, by the driver's line in the kernel log. One XID has faults of every
// severity, and NVML reports the XID only. "" is unknown: no line names it.
type Severity string

// The severities, by NVIDIA's table for XIDs 144 to 150.
const (
	Nonfatal      Severity = "nonfatal"        // NVIDIA: ignore, or do what the recovery action requires
	LinkTakenDown Severity = "link-taken-down" // NVIDIA: ignore, and find out who took the link down
	Fatal         Severity = "fatal"           // NVIDIA: reset the GPU
)

// The XIDs of NVLink 5, whose lines in the kernel log name a severity.
const (
	firstNVLink5 = 144
	lastNVLink5  = 150
)

// HasSeverity reports whether the kernel log names the severity of an XID.
func HasSeverity(code uint64) bool { return code >= firstNVLink5 && code <= lastNVLink5 }

// Worse returns the worse of two severities. An unknown one is worse than all but Fatal: it may be fatal.
func (s Severity) Worse(o Severity) Severity {
	if o.rank() > s.rank() {
		return o
	}
	return s
}

func (s Severity) rank() int {
	switch s {
	case Nonfatal:
		return 0
	case LinkTakenDown:
		return 1
	case Fatal:
		return 3
	default:
		return 2
	}
}

// SeverityOf returns the severity that a line of the kernel log names for an XID; "" if the text has another form:
//
//	NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001 0x00000000 0x00000000)
//
// The words are the unit, the severity, cross containment, injection, the link, and in parentheses the information
// about the interrupt, the error status and the driver's debug data.
func SeverityOf(code uint64, text string) Severity {
	words := strings.Fields(text)
	if !HasSeverity(code) || len(words) < 7 || words[4] != "Link" {
		return ""
	}
	first, ok := strings.CutPrefix(words[6], "(0x")
	if !ok {
		return ""
	}
	interrupt, err := strconv.ParseUint(strings.TrimSuffix(first, ")"), 16, 32)
	if err != nil {
		return ""
	}
	switch unit := words[0]; words[1] {
	case "Nonfatal":
		if unit == "RLW_RXPIPE" && promoted(interrupt) {
			return Fatal
		}
		return Nonfatal
	case "Fatal":
		if unit == "NETIR_LINK_EVT" || unit == "NETIR_LINK_DOWN" {
			// The sub-codes of a link that went down for which NVIDIA's table says IGNORE.
			if reason := interrupt >> 20 & 0x3f; reason == 0b100110 || reason == 0b101000 {
				return LinkTakenDown
			}
		}
		return Fatal
	default:
		return ""
	}
}

// promoted reports whether an error of the unit RLW_RXPIPE is fatal although it may be nonfatal: "action 2" of
// NVIDIA's table. Drivers before R575 have the unit in bits 5 to 9 and the XID in those below, later ones have the
// unit in bits 0 to 6.
func promoted(interrupt uint64) bool {
	const before575 = 0b00110_00010
	if interrupt&0x3ff == before575 {
		return interrupt&(1<<10) != 0
	}
	return interrupt&(1<<7) != 0
}

// Named returns the rule for an XID of a severity that the kernel log names.
func Named(code uint64, s Severity) Rule {
	r := XID(code)
	if !HasSeverity(code) {
		return r
	}
	switch s {
	case Nonfatal:
		r.Class, r.Effect, r.SettledEffect, r.Clears, r.Action = Info, None, None, 0, ""
	case LinkTakenDown:
		like := XID(softwareLinkDown)
		r.Class, r.Effect, r.SettledEffect = like.Class, like.Effect, like.SettledEffect
		r.Clears, r.Level, r.Action = like.Clears, like.Level, like.Action
	case Fatal:
		r.Class, r.Effect, r.SettledEffect = Fabric, Withdraws, Withdraws
		r.Clears, r.Action = NoRecoveryAction|ResetSeen|Reboot, XID(firstNVLink5).Action
	}
	return r
}

// softwareLinkDown is the XID of a link that software took down.
const softwareLinkDown = 155
