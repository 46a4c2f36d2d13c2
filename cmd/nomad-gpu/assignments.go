package main

import (
	"context"
	"slices"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

// book is the record of the allocations that have a GPU, for the moves of GPUs between APIs. current is the latest inventory.
func book(client *agentapi.Client, current func() *inventory.Inventory) assignment.Book {
	if client == nil {
		return func(gpu.DeviceID) assignment.Holders {
			return assignment.Holders{Never: true, Why: "the allocations of the Nomad agent, which are not read: set nomad_address, and occupancy to report or withhold; or drain the node and use --force"}
		}
	}
	return func(id gpu.DeviceID) assignment.Holders {
		inv := current()
		record, err := client.Read(context.Background(), inv) // makes no call
		if err != nil {
			return assignment.Holders{Why: "the allocations of the Nomad agent: " + err.Error()}
		}
		h := assignment.Holders{Known: record.Complete, Why: "all allocations of the Nomad agent"}
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
}
