package agentapi

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Seen returns the work that was seen to have devices, or got them from this agent, and of which no answer has shown since that it has ended.
// It outlives failures of the API: a token that expires is no sign that a job has ended. Its record is never complete.
func (c *Client) Seen() holders.Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.withReserved(holders.Record{Holders: c.seen, Work: map[string]holders.Work{}})
}

// see adds an answer to what was seen. Work has ended if the answer has it without devices, or if it is not in the leader's answer, which is
// complete: another server may lag behind, and the servers remove what has ended long ago. c.mu is locked.
func (c *Client) see(r holders.Record, byLeader bool) {
	next := slices.Clone(r.Holders)
	for _, h := range c.seen {
		if _, answered := r.Work[h.Work.ID]; !answered && (!byLeader || !r.Complete) {
			next = append(next, h)
		}
	}
	c.seen = next
}
