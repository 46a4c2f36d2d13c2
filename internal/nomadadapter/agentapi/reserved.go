package agentapi

import (
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// reservation is a unit that this agent gave to an allocation. Nomad names units in Reserve and not the allocation, and there is no release.
type reservation struct {
	at     time.Time
	device gpu.DeviceID
}

// Reserved records that this agent gives units to an allocation. A unit has one at a time, so an earlier one has ended.
func (c *Client) Reserved(units []inventory.Unit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range units {
		c.reserved[units[i].ID] = reservation{time.Now(), units[i].Device.ID}
	}
}

// endReservations forgets those of which an answer shows that their allocation has ended: a task with the unit has ended since, or no
// allocation has the unit by the leader, who was asked at a later time (zero = the answer is of another server) and hides none. c.mu is locked.
func (c *Client) endReservations(a answer) {
	maps.DeleteFunc(c.reserved, func(id inventory.UnitID, r reservation) bool {
		held := slices.ContainsFunc(a.record.Holders, func(h holders.Holder) bool { return h.Unit == id })
		return a.record.Complete && !held && a.asked.After(r.at) || slices.ContainsFunc(a.allocations, func(one allocation) bool { return one.endedWith(id, r.at) })
	})
}

// endedWith reports whether a task with a unit has ended after a time, by the clock of this node.
func (a *allocation) endedWith(id inventory.UnitID, after time.Time) bool {
	if a.live() {
		return false
	}
	for task, r := range a.AllocatedResources.Tasks {
		with := slices.ContainsFunc(r.Devices, func(d device) bool { return slices.Contains(d.DeviceIDs, string(id)) })
		if with && a.TaskStates[task].FinishedAt.After(after) {
			return true
		}
	}
	return false
}

// withReserved is a record with the reservations that it does not show, unless it is complete: their holders have no names. c.mu is locked.
func (c *Client) withReserved(r holders.Record) holders.Record {
	if r.Complete {
		return r
	}
	holds := slices.Clone(r.Holders)
	for _, id := range slices.Sorted(maps.Keys(c.reserved)) {
		if !slices.ContainsFunc(r.Holders, func(h holders.Holder) bool { return h.Unit == id }) {
			holds = append(holds, holders.Holder{Work: holders.Work{Orchestrator: holders.Nomad}, API: inventory.Nomad, Unit: id, Device: c.reserved[id].device})
		}
	}
	r.Holders = holds
	return r
}
