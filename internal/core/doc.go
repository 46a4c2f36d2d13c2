// Package core is the vocabulary and the arithmetic of Tandem: what a GPU is, whether it is well, and
// what a container needs to use it. It knows neither Nomad nor Kubernetes, neither NVML nor the clock.
//
// Five nouns, in the order data flows through them:
//
//	Device     one GPU or MIG instance, as the driver names it
//	Snapshot   one complete reading of the machine
//	Ledger     what is known to be wrong, and since when
//	Inventory  what is offered now: units with their health
//	Plan       what one container needs, in no orchestrator's words
//
// Every value is immutable once built and every function is pure: equal arguments give equal results,
// arguments are never changed, and order is part of the value. All of it is safe for concurrent use.
package core
