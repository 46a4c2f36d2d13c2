package nomad

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

const (
	// answerAge is that of the latest confirmation at most, for the holders of a GPU to be known. A confirmation is as old as its query took
	// (10 s at most) when it comes, the next one is requested then at the latest, and takes as long.
	answerAge  = 25 * time.Second
	requestAge = 3 * time.Second // of the latest confirmation, for another one
)

// newAllocations returns what asks the Nomad agent which allocations have devices; nil without its address.
func newAllocations(s config.Nomad, log *slog.Logger) *agentapi.Client {
	if s.Operations.NomadAddress == "" || s.Core.Occupancy == inventory.OccupancyOff {
		return nil
	}
	return agentapi.New(agentapi.Options{
		Address: s.Operations.NomadAddress, TokenFile: s.Operations.NomadTokenFile, Log: log, LookupEnv: os.LookupEnv,
	})
}

// allocationReader reads the allocations that have a GPU, for the moves of GPUs between APIs.
type allocationReader struct {
	client  *agentapi.Client // nil = they are not read
	current func() *inventory.Inventory
	moves   func() []assignment.Status // the latest decisions
}

// read reads the allocations. That nothing has a GPU counts only if the servers confirmed that after the agent gave it out last, and just now.
// They are asked while the GPU moves, or is not offered any more, and no work is known.
func (a allocationReader) read() assignment.Record {
	if a.client == nil {
		return assignment.NewRecord(assignment.Holders{Never: true, Why: "the allocations of the Nomad agent, which are not read: set nomad_address, and occupancy to report or withhold; or drain the node and use --force"}, nil)
	}
	inv, moves := a.current(), a.moves()
	record, err := a.client.Read(context.Background(), inv) // makes no call
	latest, seen := holders(record, inv, 0), holders(a.client.Seen(), inv, 0)
	confirmed := a.client.Confirmed()
	age := time.Since(confirmed.At)
	answer := assignment.NewRecord(assignment.Holders{}, nil)
	if err = cmp.Or(confirmed.Err, err); err != nil {
		answer = assignment.NewRecord(assignment.Holders{Why: "the allocations of the Nomad agent: " + err.Error()}, nil)
	} else if age <= answerAge {
		answer = holders(confirmed.Record, inv, age)
	}
	return func(id gpu.DeviceID) assignment.Holders {
		if h := latest(id); len(h.By) > 0 {
			return h
		}
		moving := slices.ContainsFunc(moves, func(st assignment.Status) bool { return st.GPU == id && st.Here && st.Moving != "" })
		if age > requestAge && (moving || !slices.Contains(inv.Assignable(), id)) {
			a.client.Confirm()
		}
		h := answer(id)
		if by := seen(id).By; len(h.By) == 0 && len(by) > 0 { // which no answer has shown to have ended
			h.By, h.Known = by, false
		}
		return h
	}
}

// holders are the allocations of a record of some age that have GPUs. It is not known which do while one has a device that is not.
func holders(record use.Record, inv *inventory.Inventory, age time.Duration) assignment.Record {
	h, by := assignment.Holders{Known: record.Complete, Age: age}, map[gpu.DeviceID][]string{}
	if record.Missing != "" {
		h.Why = "the allocations of the Nomad agent: " + record.Missing
	}
	for _, hold := range record.Holds {
		name := "job " + hold.Owner.Name + " (allocation " + hold.Owner.ID + ")"
		if hold.Owner.ID == "" {
			name = "an allocation that the Nomad agent's API does not show, to which this agent has given it"
		}
		if of, ok := inv.PhysicalGPU(hold.Device); ok {
			by[of] = append(by[of], name)
		} else {
			h.Known, h.Why = false, "the end of "+name+", whose device "+string(hold.Device)+" is not known to the driver"
		}
	}
	return assignment.NewRecord(h, by)
}
