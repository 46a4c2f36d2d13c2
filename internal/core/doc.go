// Package core computes which devices a node offers and in which health. It is pure: no goroutine, no clock, no
// I/O, no log; and it depends neither on NVML nor on Nomad or Kubernetes.
//
// The values, in the order in which data flows through them:
//
//	gpu.Device             one GPU or MIG instance, as the driver reports it
//	gpu.Snapshot           one complete reading of the node
//	health.Ledger          the conditions (faults) of each GPU, with the evidence that clears them
//	inventory.Inventory    what the configuration makes of the devices: units, with their health
//	inventory.Allocatable  what of it takes work on this node now
//	inventory.Plan         what one container needs to use its devices
//
// State combines them. The monitor holds one State and replaces it with each snapshot, observation and command;
// the adapters read its Allocatable. What limits that (CDI specifications, ownership, MPS daemons, use) follows the State and sets its Host.
//
// Every value is immutable once built. Every function is pure: equal arguments give equal results, arguments are
// never changed, and slices are returned in a defined order. All of it is safe for concurrent use.
package core
