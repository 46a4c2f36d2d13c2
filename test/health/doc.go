// Package health holds the whole chain of health, from a libnvidia-ml.so.1 to what an orchestrator is told,
// against scripted machines: one test a case, in the order of the table below.
//
// Most cases are driven by hand: a real session of the simulated driver is asked at the pace of the policy
// and folded into a state whose clock belongs to the test, so an hour passes in a moment and no test waits.
// Cases about goroutines, hangs and promises in real time run the monitor with short durations.
package health
