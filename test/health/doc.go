// Package health tests health from a libnvidia-ml.so.1 to the allocatable: a simulated machine has a fault, and the inventory shows
// it. What follows from an observation is tested in internal/core; here is what depends on the driver.
//
// In most tests one goroutine does the work of the monitor with a clock of its own (type agent), so that an hour passes
// immediately. Tests of hanging calls and of real time run the monitor with short durations (type monitored).
package health
