package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

const (
	// answerAge is that of the latest confirmation at most, for the holders of a GPU to be known. A confirmation is as old as its query took
	// (10 s at most) when it comes, the next one is requested then at the latest, and takes as long.
	answerAge  = 25 * time.Second
	requestAge = 3 * time.Second // of the latest confirmation, for another one
)

// books has the allocations that have a GPU, for the moves of GPUs between APIs.
type books struct {
	client  *agentapi.Client // nil = they are not read
	current func() *inventory.Inventory
	moves   func() []assignment.Status // the latest decisions
}

// of is the record of a GPU. That nothing has it counts only if the servers confirmed that after the agent gave it out last, and just now. They are
// asked while the GPU moves and no work is known.
func (b books) of(id gpu.DeviceID) assignment.Holders {
	if b.client == nil {
		return assignment.Holders{Never: true, Why: "the allocations of the Nomad agent, which are not read: set nomad_address, and occupancy to report or withhold; or drain the node and use --force"}
	}
	inv := b.current()
	record, err := b.client.Read(context.Background(), inv) // makes no call
	if h := holders(record, inv, id); len(h.By) > 0 {
		return h
	}
	confirmed := b.client.Confirmed()
	age := time.Since(confirmed.At)
	if age > requestAge && slices.ContainsFunc(b.moves(), func(st assignment.Status) bool { return st.GPU == id && st.Here && st.Moving != "" }) {
		b.client.Confirm()
	}
	switch err = cmp.Or(confirmed.Err, err); {
	case err != nil:
		return assignment.Holders{Why: "the allocations of the Nomad agent: " + err.Error()}
	case age > answerAge:
		return assignment.Holders{}
	}
	h := holders(confirmed.Record, inv, id)
	h.Age = age
	return h
}

// holders are the allocations of a record that have a GPU. It is not known which do while one has a device that is not.
func holders(record use.Record, inv *inventory.Inventory, id gpu.DeviceID) assignment.Holders {
	h := assignment.Holders{Known: record.Complete}
	for _, hold := range record.Holds {
		name := "job " + hold.Owner.Name + " (allocation " + hold.Owner.ID + ")"
		switch of, ok := inv.PhysicalGPU(hold.Device); {
		case !ok:
			h.Known, h.Why = false, "the end of "+name+", whose device "+string(hold.Device)+" is not known to the driver"
		case of == id && !slices.Contains(h.By, name):
			h.By = append(h.By, name)
		}
	}
	slices.Sort(h.By)
	return h
}
