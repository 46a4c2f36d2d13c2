package use

import (
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// maxListed is the number of processes in the text of a device that is withheld.
const maxListed = 8

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
		if more := len(texts) - maxListed; more > 0 {
			texts = append(texts[:maxListed], fmt.Sprintf("%d more", more))
		}
		if texts != nil {
			occupied = append(occupied, inventory.Occupied{Device: d.ID, Detail: strings.Join(texts, ", ")})
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
