package use

import (
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Occupied returns the exclusive devices that take no new work because unreserved processes have used them for more than 5 s. A shared
// device is in use by several works anyway, and is never among them. The text does not change while the processes are the same.
func (t Table) Occupied(inv *inventory.Allocatable) []inventory.Occupied {
	var occupied []inventory.Occupied
	for u := range inv.Devices() {
		d, ok := t.Device(u.Device.ID)
		if !ok || u.Sharing.Mode != inventory.Exclusive {
			continue
		}
		var texts []string
		for _, p := range d.Unreserved() {
			if t.At.Sub(p.Since) >= withholdAfter {
				texts = append(texts, p.Text())
			}
		}
		if texts != nil {
			occupied = append(occupied, inventory.Occupied{Device: d.ID, Detail: inventory.ProcessList(texts)})
		}
	}
	return occupied
}

// Text names the process: "pid 2114 (python)".
func (p Process) Text() string {
	if p.Name == "" {
		return fmt.Sprintf("pid %d", p.PID)
	}
	return fmt.Sprintf("pid %d (%s)", p.PID, p.Name)
}
