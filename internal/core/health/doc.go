// Package health decides which devices are healthy.
//
//	Observation   something that happened: an XID, a failed call, a health check with its Sample
//	Ledger        the conditions that follow from observations; Apply returns a new Ledger with observations applied
//	Condition     one cause against one placement, since when, and how far recovery is
//	Health        the worst condition of a device, with action and what clears it
//	Policy        what observations mean; Command is an operator's request
//
// Recovery needs evidence (docs/adr/0007-recovery-by-evidence.md). The package is pure: the caller passes the time, and nothing
// here does I/O. The meaning of each XID is in the sub-package xid.
package health
