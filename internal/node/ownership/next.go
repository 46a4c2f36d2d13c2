package ownership

import (
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Claim is a claim of another agent on a GPU or on an instance of it.
type Claim struct {
	Agent   string
	Running bool // the agent runs
	Older   bool // it is older than that of this agent, or this agent has none
	Unread  bool // the agent may have one: what it claims is not known
}

// Input is what the next assignments follow from.
type Input struct {
	Now      time.Duration // since any time; never goes back
	Agent    string
	APIs     []inventory.API // that this process serves
	Default  inventory.API   // that has a GPU without an entry
	GPUs     []gpu.DeviceID  // that the agent can offer
	File     File
	ReadOnly bool // File can't be changed: nothing changes its side

	Running  func(agent string) bool                           // another agent runs
	Claims   func(gpu.DeviceID) []Claim                        // of other agents
	Claimed  func(gpu.DeviceID) bool                           // this agent has a claim on the GPU, perhaps of an earlier boot
	Past     func(gpu.DeviceID) bool                           // an earlier process of this agent offered the GPU
	Applied  func(gpu.DeviceID) (inventory.Assignment, bool)   // what the published inventory has
	Records  Records                                           // of the APIs of this agent; one that is missing is not known
	Reserved func(gpu.DeviceID) (at time.Duration, known bool) // when the agent gave the GPU out last, in this process
}

// State is what an agent remembers from one Next to the next. It is immutable; the zero value is that of a new process.
type State struct {
	started time.Duration
	running bool
	empty   map[gpu.DeviceID]time.Duration // since when a GPU has been withheld and without holders
	absent  map[gpu.DeviceID]absence
	shown   map[gpu.DeviceID]kindShown
	seen    map[inventory.API]seen
}

// Status is the assignment of a GPU, and what its move waits for.
type Status struct {
	inventory.Assignment
	Target inventory.API
	Entry  bool          // Target is that of the file; else that of the settings
	Waits  string        // for which the move waits: holders, a record, an agent; "" = it does not, or only for Left
	Left   time.Duration // until the side changes if nothing holds the GPU
}

// initialWait is for how long a process waits for the record of the device plugin to decide which API has a GPU of which nothing is
// on disk. The kubelet answers within a second of its start.
const initialWait = 10 * time.Second

// Next returns the assignments that follow, and the file if that changes: then it must be on disk before the assignments are applied.
//
//   - A GPU with an entry is offered only by the agent of its side, only if no other agent claims it. That agent withholds it while the
//     target is another API, and changes the side when its records have shown no holder for the settle time.
//   - An agent that is not that of the side and has a claim (it offered the GPU before there was an entry) withholds the GPU until its own
//     records show no holder; then the GPU leaves its inventory, and with it the claim.
//   - A GPU without an entry belongs to the default API of each agent that offers it. If another API of the same agent has it, it moves
//     in the same way.
func Next(s State, in Input) (State, File, []Status) {
	n := &next{Input: in, file: in.File, was: s, is: State{
		started: s.started, running: true, empty: map[gpu.DeviceID]time.Duration{}, absent: map[gpu.DeviceID]absence{},
		shown: map[gpu.DeviceID]kindShown{}, seen: maps.Clone(s.seen),
	}}
	if n.is.seen == nil {
		n.is.seen = map[inventory.API]seen{}
	}
	n.Records = Records{}
	for api, record := range in.Records {
		n.Records[api] = n.remembering(api, record)
	}
	if !s.running {
		n.is.started = in.Now
	}
	ids := append(slices.Collect(maps.Keys(in.File.GPUs)), in.GPUs...)
	slices.Sort(ids)
	var all []Status
	for _, id := range slices.Compact(ids) {
		e, explicit := n.file.GPUs[id]
		switch {
		case explicit:
			st := n.explicit(id, e)
			st.Entry = true
			n.noteAbsence(id)
			all = append(all, st)
		case len(in.APIs) > 1 || in.File.Inner[in.Agent][id] != "":
			all = append(all, n.implicit(id))
		}
	}
	return n.is, n.file, all
}

type next struct {
	Input
	was, is State
	file    File // as it is to be; a copy once it differs from Input.File
	copied  bool
}

// change returns the file to be changed.
func (n *next) change() *File {
	if !n.copied {
		n.file, n.copied = n.file.clone(), true
	}
	return &n.file
}

func (n *next) setInner(id gpu.DeviceID, a inventory.API) {
	f := n.change()
	if f.Inner[n.Agent] == nil {
		f.Inner[n.Agent] = map[gpu.DeviceID]inventory.API{}
	}
	f.Inner[n.Agent][id] = a
}

// explicit decides about a GPU with an entry.
func (n *next) explicit(id gpu.DeviceID, e Entry) Status {
	e = n.endForce(id, e)
	if e.Side == "" || n.takesOver(id, e) {
		if e = n.recordSide(id, e); e.Side == "" {
			return n.withoutSide(id, e)
		}
	}
	if AgentOf(e.Side) != n.Agent {
		return n.elsewhere(id, e)
	}
	if e.Target != e.Side && (AgentOf(e.Target) != n.Agent || slices.Contains(n.APIs, e.Target)) {
		left, waits := n.leaving(id, e.Side, e)
		if waits.text != "" || left > 0 || n.ReadOnly {
			return n.withheld(id, e, e.Target, waits, left).leaving(n.blocked(id, e).text == "")
		}
		e.Side, e.Turn = e.Target, e.Turn+1
		n.change().GPUs[id] = e
		if AgentOf(e.Side) != n.Agent {
			return n.elsewhere(id, e)
		}
	}
	if len(n.APIs) > 1 && !n.ReadOnly && n.file.Inner[n.Agent][id] != e.Side { // which of its APIs may have work on it, if it gives the GPU up
		n.setInner(id, e.Side)
	}
	if waits := n.blocked(id, e); waits.text != "" {
		return n.withheld(id, e, e.Side, waits, 0)
	}
	st := Status{Assignment: inventory.Assignment{GPU: id, API: e.Side, Here: true}, Target: e.Target}
	if e.Target != e.Side {
		st.Waits = n.Agent + " to serve " + string(e.Target) + ": restart it, with the rights that this needs"
	}
	return st
}

// withheld is the status of a GPU that this agent has and that takes no new work until it has come to an API.
func (n *next) withheld(id gpu.DeviceID, e Entry, to inventory.API, waits wait, left time.Duration) Status {
	return Status{
		Assignment: inventory.Assignment{GPU: id, API: e.Side, Here: true, Moving: n.health(id, to, waits)},
		Target:     e.Target, Waits: waits.text, Left: left,
	}
}

// leaving returns a status with whether what was placed on the GPU before is still given out: not if others may have it.
func (st Status) leaving(alone bool) Status {
	st.Leaving = alone
	return st
}

// recordSide records that this agent has a GPU of which no agent has recorded that, or which it takes by force.
func (n *next) recordSide(id gpu.DeviceID, e Entry) Entry {
	claims := slices.DeleteFunc(n.Claims(id), func(c Claim) bool { return n.without(id, e, c.Agent) })
	forced := e.Side != ""
	older := slices.ContainsFunc(claims, func(c Claim) bool { return c.Older })
	alone := len(claims) == 0 && (AgentOf(e.Target) != n.Agent || n.Now-n.is.started >= DefaultSettle)
	if n.ReadOnly || !slices.Contains(n.GPUs, id) || !forced && (older || !n.Claimed(id) && !alone) {
		return e
	}
	a, ok := n.inner(id)
	if !ok {
		return e
	}
	if forced {
		a = e.Target
	}
	e.Side, e.Turn = a, e.Turn+1
	n.change().GPUs[id] = e
	return e
}

// withoutSide decides about a GPU whose side no agent has recorded: no agent gives it out until then.
func (n *next) withoutSide(id gpu.DeviceID, e Entry) Status {
	waits := "the agent that offers it to record that"
	if !n.Claimed(id) {
		return Status{Assignment: inventory.Assignment{GPU: id, Moving: "to " + string(e.Target)}, Target: e.Target, Waits: waits}
	}
	e.Side, _ = n.inner(id)
	return n.withheld(id, e, e.Target, wait{text: waits}, 0)
}

// elsewhere decides about a GPU that another agent has.
func (n *next) elsewhere(id gpu.DeviceID, e Entry) Status {
	away := Status{Assignment: inventory.Assignment{GPU: id, API: e.Side}, Target: e.Target}
	if AgentOf(e.Target) == n.Agent {
		away.Waits = AgentOf(e.Side) + " to give it up"
		if e.Force && !n.Running(AgentOf(e.Side)) {
			away.Waits = AgentOf(e.Side) + ", which does not run, to stay away for the settle time"
		}
	}
	applied, offered := n.Applied(id) // the claim may have been removed with its folder
	if !n.Claimed(id) && (!offered || !applied.Here) && len(n.Records.HoldersOf(id)) == 0 {
		return away
	}
	own := e
	own.Side, _ = n.inner(id)
	left, waits := n.leaving(id, own.Side, e)
	if left == 0 && waits.text == "" {
		return away
	}
	return n.withheld(id, own, e.Side, waits, left)
}

// implicit decides about a GPU without an entry.
func (n *next) implicit(id gpu.DeviceID) Status {
	side, known := n.inner(id)
	e := Entry{Target: n.Default, Side: side}
	if !known {
		e.Side = n.Default
		const record = "the record of device-plugin"
		return n.withheld(id, e, n.Default, wait{text: record, kind: kindRecord}, 0)
	}
	if side != n.Default {
		left, waits := n.leaving(id, side, e)
		if waits.text != "" || left > 0 || n.ReadOnly {
			return n.withheld(id, e, n.Default, waits, left).leaving(n.heldThrough(id, side).text == "")
		}
		e.Side = n.Default
	}
	if n.file.Inner[n.Agent][id] != e.Side && !n.ReadOnly {
		n.setInner(id, e.Side)
	}
	if waits := n.heldThrough(id, e.Side); waits.text != "" {
		return n.withheld(id, e, e.Side, waits, 0)
	}
	return Status{Assignment: inventory.Assignment{GPU: id, API: e.Side, Here: true}, Target: e.Target}
}
