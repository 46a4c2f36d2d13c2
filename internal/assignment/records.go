package assignment

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// inner returns which API of this agent has, or had, a GPU; false while that can't be known.
func (n *next) inner(id gpu.DeviceID) (inventory.API, bool) {
	if a := n.file.Inner[n.Agent][id]; a != "" {
		return a, true
	}
	if len(n.APIs) < 2 {
		return n.Default, true
	}
	for _, a := range n.APIs {
		if book := n.Books[a]; book != nil && len(book(id).By) > 0 {
			return a, true
		}
	}
	if n.Past(id) { // and did not record the API: it had one
		return inventory.DevicePlugin, true
	}
	if book := n.Books[inventory.DevicePlugin]; n.Default != inventory.DevicePlugin && book != nil {
		h := book(id)
		return n.Default, h.Known || h.First || n.Now-n.is.started >= initialWait
	}
	return n.Default, true
}

// named returns the holders of a GPU through the APIs of this agent.
func (n *next) named(id gpu.DeviceID) (by []string) {
	for _, a := range APIs() {
		if book := n.Books[a]; book != nil {
			by = append(by, book(id).By...)
		}
	}
	return by
}
