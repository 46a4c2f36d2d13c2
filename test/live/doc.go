// Package live changes machines under both orchestrators while they work: MIG layouts, GPUs that come, go and
// change places, drivers that come late and go. What must hold whatever happens is checked at the end of each
// scene (see keep_test.go), over everything that either orchestrator was told.
//
// Most scenes run both adapters in one process over one monitor, with the real driver session on a simulated
// machine. Where a process may have to end, the built agents run as processes. How long a change takes to be
// seen is printed; LIVE_LONG=1 also measures what takes a minute with the default settings.
package live
