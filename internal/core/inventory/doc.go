// Package inventory decides which devices are offered as which units.
//
//	Config, Policy   what is offered, under which names, and how it is shared
//	Binding          which devices the positions in a policy (index, number, common MIG profile) mean
//	Host             what is known of the node apart from the driver: MPS daemons, what other agents offer
//	Inventory        what the configuration makes of the devices: units with their health; made by Build, never changed
//	Allocatable      what of it takes work on this node now: Inventory.WithHost
//	Plan             what a container gets: Allocatable.Reserve; Allocatable.Prefer chooses among units
//
// The package is pure: the caller passes the time, and nothing here does I/O.
package inventory
