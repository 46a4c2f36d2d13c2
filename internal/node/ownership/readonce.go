package ownership

import (
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// ReadOnce reads the host for a process that is not the agent, and claims, locks and changes nothing. The inventory is that of
// an agent that would start now; what has its GPUs is not known.
func ReadOnce(o Options, inv *inventory.Inventory) inventory.Host {
	o.Log = slog.New(slog.DiscardHandler)
	w := New(o)
	var h inventory.Host
	if w.claims != nil {
		w.claims.readOnce(&h, o.Config.API, inv)
	}
	return h
}

// readOnce adds what the claims and the file of assignments mean for an agent with an API in its settings. Whether another agent runs can't
// be found out without opening its lock, which would be held for an agent that starts just then.
func (s *claimStore) readOnce(h *inventory.Host, configured inventory.API, inv *inventory.Inventory) {
	r, err := s.read(func(string) bool { return false })
	if err == nil {
		r.mine.claims = nextClaims(r.mine, r.others, offerOf(inv), s.refuse, time.Now())
		h.Claims, h.Own = coreClaims(r.mine, r.others, offerOf(inv)), s.own(r, nil)
		h.Own.Pending = false // nothing is written
		h.Numbering = numberingOf(append(slices.Clone(r.others), r.mine))
	} else {
		h.Own = s.ownUnread(err)
	}
	h.Assignments = s.readAssignments(configured, inv, r)
}

// readAssignments returns what follows from the file of assignments for an agent with an API in its settings. It changes no side, and a
// GPU that is to leave this agent stays.
func (s *claimStore) readAssignments(configured inventory.API, inv *inventory.Inventory, r reading) inventory.Assignments {
	stateDir := filepath.Dir(s.folder)
	file, err := Read(stateDir)
	switch {
	case err != nil && (s.refuse || errors.Is(err, ErrFormat)):
		return inventory.Assignments{Required: true}
	case err != nil || file.Empty():
		return inventory.Assignments{}
	}
	s.notePast(r)
	running := func(string) bool { return true } // which changes nothing in the first decision of a process
	c := hostClaims{mine: r.mine, now: r.mine, others: r.others, running: running, past: s.past, refuse: s.refuse}
	apis := apisOf(s.agent, configured, stateDir)
	unread := Records{}
	for _, a := range apis {
		unread[a] = func() holders.Record { return holders.Record{First: true} }
	}
	_, _, status := Next(State{}, Input{
		Agent: s.agent, APIs: apis, Default: apis[0], GPUs: inv.Assignable(), File: file, ReadOnly: true,
		Running: c.running, Claims: c.of, Claimed: c.claimed, Past: func(id gpu.DeviceID) bool { return c.past[id] }, Records: unread, Applied: inv.Assignment,
		Reserved: func(gpu.DeviceID) (time.Duration, bool) { return 0, false },
	})
	return assignmentsOf(status, len(apis) > 1)
}

// apisOf are the APIs that a process of an agent would serve, that of its settings first.
func apisOf(agent string, configured inventory.API, stateDir string) []inventory.API {
	switch {
	case agent == NomadAgent:
		return []inventory.API{inventory.Nomad}
	case configured == inventory.DRA:
		return []inventory.API{inventory.DRA, inventory.DevicePlugin}
	case Needs(stateDir, inventory.DRA):
		return []inventory.API{inventory.DevicePlugin, inventory.DRA}
	}
	return []inventory.API{inventory.DevicePlugin}
}
