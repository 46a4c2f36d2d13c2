// Package live changes machines while both orchestrators use them: MIG layouts, GPUs that are added, removed and moved, and policies. Both
// adapters run in one process over one monitor, with a session of the real driver package on a simulated machine. At the end of each test
// invariants of everything that either orchestrator received are checked (invariants_test.go). The tests print how long a change takes to
// reach each orchestrator.
//
// Drivers that come, go and are replaced: test/agents, test/conformance/nomad and test/e2e.
package live
