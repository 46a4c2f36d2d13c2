package ownership

import (
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// ReadOnce reads the node for a process that is not the agent, and records, locks and changes nothing. The state is that of
// an agent that would start now; what has its GPUs is not known.
func ReadOnce(o Options, state core.State) inventory.Host {
	o.Log = slog.New(slog.DiscardHandler)
	w := New(o)
	var h inventory.Host
	if w.store != nil {
		w.store.readOnce(&h, o.Config.API, state)
	}
	return h
}

// readOnce adds what the files of the agents and of the node mean for an agent with an API in its settings. Whether another agent runs can't
// be found out without opening its lock, which would be held for an agent that starts just then.
func (s *store) readOnce(h *inventory.Host, configured inventory.API, state core.State) {
	r, err := s.read(func(string) bool { return false })
	if err == nil {
		r.mine.devices = nextDevices(r.mine, r.others, localDevicesOf(state), s.refuse, time.Now())
		h.Peers, h.Recorded = overlapsOf(r.mine, r.others, localDevicesOf(state)), s.own(r, nil)
		h.Recorded.Pending = false // nothing is written
		h.Numbering = numberingOf(append(slices.Clone(r.others), r.mine))
	} else {
		h.Recorded, _ = s.ownUnread(err)
	}
	h.Ownership = s.readOwnership(configured, state.Allocatable, r)
}

// readOwnership returns what follows from the file of the node for an agent with an API in its settings. It changes no owner, and a
// GPU that is to leave this agent stays.
func (s *store) readOwnership(configured inventory.API, inv *inventory.Allocatable, r reading) inventory.Ownership {
	stateDir := filepath.Dir(s.folder)
	file, err := Read(stateDir)
	apis := servedBy(s.agent, configured, stateDir)
	switch {
	case err != nil && (s.refuse || errors.Is(err, ErrFormat)):
		return inventory.Ownership{Required: true}
	case err != nil || file.Empty() || len(apis) == 0:
		return inventory.Ownership{}
	}
	s.notePrevious(r)
	// An agent that starts gives back what was taken before.
	file.Taken = nil
	running := func(string) bool { return true } // which changes nothing in the first decision of a process
	c := hostRecords{mine: r.mine, now: r.mine, others: r.others, running: running, previous: s.previous, refuse: s.refuse}
	unread := Records{}
	for _, a := range apis {
		unread[a] = func() holders.Record { return holders.Record{First: true} }
	}
	_, _, status := Next(State{}, Input{
		Agent: s.agent, APIs: apis, Default: apis[0], GPUs: inv.GPUs(), File: file, ReadOnly: true,
		Running: c.running, Overlaps: c.of, Recorded: c.recorded, OfferedBefore: func(id gpu.DeviceID) bool { return c.previous[id] }, Records: unread, Applied: inv.Owner,
		Reserved: func(gpu.DeviceID) (time.Duration, bool) { return 0, false },
	})
	return ownershipFrom(status, len(apis) > 1)
}
