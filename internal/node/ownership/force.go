package ownership

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// A forced move ends like another one, and with it the force: an entry whose GPU has come to its target must not make the agents
// disregard a record or an overlap of later work. Force also ends when an agent finds work that has the GPU through another API: an operator
// forces what can't be known, and an agent that knew of work may be restarted at any time.

// clearForce returns the entry without its force if that has had its effect, or must not have one, and without the absence of an agent that
// runs again.
func (n *next) clearForce(id gpu.DeviceID, e Entry) Entry {
	if !e.Force || n.ReadOnly {
		return e
	}
	arrived := e.Owner == e.Target && AgentOf(e.Owner) == n.Agent && len(n.Overlaps(id)) == 0
	switch {
	case arrived || n.heldThrough(id, e.Target).text != "":
		e.Force, e.AgentGone = false, ""
	case e.AgentGone != "" && n.Running(e.AgentGone):
		e.AgentGone = ""
	default:
		return e
	}
	n.change().GPUs[id] = e
	return e
}

// absence is that of an agent from which a GPU is taken by force.
type absence struct {
	agent string
	since time.Duration
	over  bool // it has lasted for the settle time: force does without the agent
}

// agentGone reports whether force does without another agent, whatever it offers: if that has not run for the settle time, as far as this
// process knows. An agent that is restarted counts as running.
func (n *next) agentGone(id gpu.DeviceID, e Entry, agent string) bool {
	if !e.Force || n.Running(agent) {
		return false
	}
	was, counting := n.was.absent[id]
	if !counting || was.agent != agent {
		was.since = n.Now
	}
	is := absence{agent: agent, since: was.since, over: e.AgentGone == agent || n.Now-was.since >= e.settle()}
	n.is.absent[id] = is
	return is.over
}

// recordAgentGone records in an entry that force does without an agent, so that a restart of this one does not begin the settle time anew
// while the file of that agent remains.
func (n *next) recordAgentGone(id gpu.DeviceID) {
	e, a := n.file.GPUs[id], n.is.absent[id]
	if n.ReadOnly || !e.Force || !a.over || e.AgentGone == a.agent || AgentOf(e.Target) != n.Agent {
		return
	}
	e.AgentGone = a.agent
	n.change().GPUs[id] = e
}

// AgentGone reports whether what another agent offers of a GPU does not count, because the GPU was taken from it by force.
func (s State) AgentGone(agent string, id gpu.DeviceID) bool {
	a := s.absent[id]
	return a.over && a.agent == agent
}

func (e Entry) settle() time.Duration {
	if e.Settle == 0 {
		return DefaultSettle
	}
	return e.Settle
}

// takeOwnership reports whether this agent takes a GPU by force from one that does not run.
func (n *next) takeOwnership(id gpu.DeviceID, e Entry) bool {
	if AgentOf(e.Target) != n.Agent || AgentOf(e.Owner) == n.Agent || !slices.Contains(n.GPUs, id) {
		return false
	}
	return n.agentGone(id, e, AgentOf(e.Owner))
}
