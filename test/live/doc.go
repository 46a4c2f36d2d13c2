// Package live changes machines while both orchestrators use them: MIG layouts, GPUs that are added, removed and moved,
// policies, and drivers that are installed, unloaded and upgraded. At the end of each test invariants of everything that
// either orchestrator received are checked (invariants_test.go).
//
// Most tests run both adapters in one process over one monitor, with a session of the real driver package on a simulated
// machine. If a process may have to end, the built agents run as processes. The tests print how long a change takes to
// reach each orchestrator.
package live
