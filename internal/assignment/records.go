package assignment

import (
	"slices"
	"strings"
	"time"

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

// leaving returns for how long a GPU that is withheld must still have no holder before its side changes, or what that waits for.
func (n *next) leaving(id gpu.DeviceID, side inventory.API, e Entry) (left time.Duration, waits string) {
	settle := e.settle()
	if by := n.named(id); len(by) > 0 {
		return settle, "the end of " + strings.Join(by, ", ")
	}
	h := Holders{Why: "the record of " + string(side) + ", which this process does not serve"}
	if book := n.Books[side]; book != nil {
		h = book(id)
	}
	reserved, known := n.Reserved(id)
	if older := known && n.Now-h.Age < reserved; (!h.Known || older) && !e.Force {
		return settle, h.Why
	}
	if applied, ok := n.Applied(id); ok && applied.Here && applied.Moving == "" || !ok && slices.Contains(n.GPUs, id) {
		return settle, "" // it is still offered: the time begins when it is not
	}
	since, counting := n.was.empty[id]
	if !counting {
		since = n.Now
	}
	if known {
		since = max(since, reserved)
	}
	n.is.empty[id] = since
	return max(settle-(n.Now-since), 0), ""
}
