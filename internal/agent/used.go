package agent

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// uses is what uses a GPU, and an instance of it.
type uses struct {
	pools              []string // of its units
	holders, processes []string
	unread             string // why these are not known completely; "" = they are
	never              bool   // of unread: they will never be
}

// usedBy returns what uses a GPU. The processes on one that the agent has taken are those of its proof, but for an MPS
// server: the daemon of its pool was not ended for the proof.
func usedBy(id gpu.DeviceID, inv *inventory.Allocatable, table use.Table, taken bool) (g uses) {
	switch {
	case table.At.IsZero():
		g.unread = "it is not read yet"
	case !table.HoldersKnown:
		g.unread, g.never = cmp.Or(table.Unknown.Reason, "the orchestrator's record of running work is not complete"), table.Unknown.Remedy != ""
		if g.never {
			g.unread += ": " + table.Unknown.Remedy
		}
	}
	for u := range inv.Devices() {
		if u.Device.At.GPU != id {
			continue
		}
		if !slices.Contains(g.pools, u.Pool) {
			g.pools = append(g.pools, u.Pool)
		}
		d, ok := table.Device(u.Device.ID)
		if !taken && (!ok || d.Processes == nil) && g.unread == "" {
			g.unread = "the processes on it are not known"
		}
		for _, h := range d.Holders {
			g.holders = append(g.holders, h.Work.String())
		}
		for i := range d.Processes {
			if !taken || d.Processes[i].MPSServer {
				g.processes = append(g.processes, useBy(&d.Processes[i], u.Pool, inv, table)...)
			}
		}
	}
	return g
}

// useBy returns the use of a GPU by a process on it: none by the MPS server of a pool that no work has. Such a server
// ends when an agent has taken the GPU (Agent.Take).
func useBy(p *use.Process, pool string, inv *inventory.Allocatable, table use.Table) []string {
	if !p.MPSServer {
		return []string{p.String()}
	}
	if id, work := poolWork(pool, inv, table); work != "" {
		return []string{fmt.Sprintf("%s, the MPS server of pool %s, whose %s %s has", p, pool, id, work)}
	}
	return nil
}

// poolWork returns work that has a device of a pool; "" = there is none.
func poolWork(pool string, inv *inventory.Allocatable, table use.Table) (id gpu.DeviceID, work string) {
	for u := range inv.Devices() {
		if d, _ := table.Device(u.Device.ID); u.Pool == pool && len(d.Holders) > 0 {
			return d.ID, d.Holders[0].Work.String()
		}
	}
	return "", ""
}

// mpsPools returns the pools by which a GPU is shared by MPS.
func mpsPools(id gpu.DeviceID, inv *inventory.Allocatable) (pools []string) {
	for u := range inv.Devices() {
		if u.Device.At.GPU == id && u.Sharing.Mode == inventory.MPS {
			pools = append(pools, u.Pool)
		}
	}
	return pools
}

// takeSettings has a problem of a code for each setting because of which an agent can't take a GPU to do something with it: "proved".
func takeSettings(o Options, code problem.Code, does string) (all []problem.Problem) {
	add := func(text, remedy string) {
		all = append(all, problem.Problem{Code: code, Object: o.Name, Text: text, Remedy: remedy})
	}
	if o.Health.StateDir == "" {
		add("without a state directory no other agent of the node knows that a GPU is "+does, "set the state directory")
	}
	if !seesProcesses(o.Core) {
		add("processes outside of the agent's PID namespace are not seen, so a GPU may be in use", "set hostPID: true in its pod")
	}
	return append(all, recordSettings(o, code)...)
}

// recordSettings has a problem of a code for each setting because of which it is not known which processes or which work use a GPU.
func recordSettings(o Options, code problem.Code) (all []problem.Problem) {
	add := func(text, remedy string) {
		all = append(all, problem.Problem{Code: code, Object: o.Name, Text: text, Remedy: remedy})
	}
	if o.Core.Occupancy == inventory.OccupancyOff {
		add("with occupancy = off the processes on a GPU are not read", "set occupancy to report or withhold")
	}
	if u := o.NoRecord; u != nil {
		add("it is not known which work has a GPU: "+cmp.Or(u.Reason, "the record of the orchestrator is not read"), u.Remedy)
	}
	return all
}
