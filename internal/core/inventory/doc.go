// Package inventory decides which devices are offered as which units.
//
//	Config, Policy   what is offered, under which names, and how it is shared
//	Binding          which devices the positions in a policy (index, number, common MIG profile) mean
//	Host             what is known of the host apart from the driver: MPS daemons, claims of other agents
//	Inventory        units with their health; made by Build, never changed
//	Plan             what a container gets: Inventory.Reserve; Inventory.Prefer chooses among units
//
// The package is pure: the caller passes the time, and nothing here does I/O.
package inventory
