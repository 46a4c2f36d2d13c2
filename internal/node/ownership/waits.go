package ownership

import (
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// wait is what a move waits for; the zero value is nothing, or only time.
type wait struct {
	text string // with names, for operators of this node
	kind string // one of those below, or an agent
}

// Kinds of waits.
const (
	kindWork   = "the end of running work"
	kindRecord = "a record of running work"
)

// kindTime is for how long another kind of wait must have lasted to be shown.
const kindTime = 10 * time.Second

// kindShown is the kind of wait in the health of a GPU.
type kindShown struct {
	kind  string
	next  string // that has been found since; not shown so far
	since time.Duration
}

// health returns why a GPU takes no new work, as it is in the health of its devices. Each change of that text is an update of the node for the
// orchestrators, so it has the kind of wait instead of names, and another one only if that lasts.
func (n *next) health(id gpu.DeviceID, to inventory.API, w wait) string {
	is, shown := n.was.shown[id]
	switch {
	case !shown:
		is.kind, is.next = w.kind, w.kind
	case w.kind != is.next:
		is.next, is.since = w.kind, n.Now
	case n.Now-is.since >= kindTime:
		is.kind = w.kind
	}
	n.is.shown[id] = is
	if is.kind == "" {
		return "to " + string(to)
	}
	return "to " + string(to) + ": waits for " + is.kind
}

// blocked returns for what a GPU of this agent that is not given out waits; nothing = it may be given out.
func (n *next) blocked(id gpu.DeviceID, e Entry) wait {
	for _, c := range n.Overlaps(id) {
		switch {
		case c.Unread && !n.agentGone(id, e, c.Agent):
			return wait{text: "the file of " + c.Agent + ", which can't be read: see the warnings", kind: c.Agent}
		case c.Running:
			return wait{text: c.Agent + ", which offers it, to give it up", kind: c.Agent}
		case e.Force && !n.agentGone(id, e, c.Agent):
			return wait{text: c.Agent + ", which offers it and does not run, to stay away for the settle time", kind: c.Agent}
		case !e.Force:
			return wait{text: c.Agent + ", which offers it and does not run: start it; if it was removed, delete its file in agents/", kind: c.Agent}
		}
	}
	return n.heldThrough(id, e.Owner)
}

// on returns the work that has a GPU through an API of this agent, unless nothing can show whether that has ended.
func (n *next) on(a inventory.API, id gpu.DeviceID) []string {
	if n.Records[a] == nil || n.Records[a]().MayHaveEnded {
		return nil
	}
	return n.Records[a]().On(id)
}

// heldThrough returns the end of the work that has a GPU through other APIs of this agent than the given one.
func (n *next) heldThrough(id gpu.DeviceID, owner inventory.API) wait {
	for _, a := range APIs() {
		if by := n.on(a, id); a != owner && len(by) > 0 {
			return wait{text: strings.Join(by, ", ") + ", which has it through " + string(a), kind: kindWork}
		}
	}
	return wait{}
}

// draining returns for how long a cordoned GPU must still have no holder before its owner changes, or what that waits for.
func (n *next) draining(id gpu.DeviceID, owner inventory.API, e Entry) (left time.Duration, waits wait) {
	settle := e.settle()
	if p := n.holds(id); p != "" {
		end := "the end of its " + string(p)
		return settle, wait{text: end, kind: end}
	}
	if by := n.Records.HoldersOf(id); len(by) > 0 {
		return settle, wait{text: "the end of " + strings.Join(by, ", "), kind: kindWork}
	}
	h := holders.Record{Missing: "the record of " + string(owner) + ", which this process does not serve"}
	if record := n.Records[owner]; record != nil {
		h = record()
	}
	reserved, known := n.Reserved(id)
	if older := known && n.readAt(h, n.Now) < reserved; (!h.Complete || older) && !e.Force {
		if h.Missing == "" {
			return settle, wait{}
		}
		return settle, wait{text: h.Missing, kind: kindRecord}
	}
	if applied, ok := n.Applied(id); ok && applied.Local && applied.Pending == "" || !ok && slices.Contains(n.GPUs, id) {
		return settle, wait{} // it is still offered: the time begins when it is not
	}
	since, counting := n.was.empty[id]
	if !counting {
		since = n.Now
	}
	if known {
		since = max(since, reserved)
	}
	n.is.empty[id] = since
	return max(settle-(n.Now-since), 0), wait{}
}
