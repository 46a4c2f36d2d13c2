package ownership

import (
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Overlap is a GPU, or an instance of it, that another agent offers, too.
type Overlap struct {
	Agent   string
	Running bool // the agent runs
	Earlier bool // it was recorded before that of this agent, or this agent has none
	Unread  bool // the agent may have one: what it offers is not known
}

// Input is what the next decision follows from.
type Input struct {
	Clock
	Now      time.Duration // since the clock began; never goes back
	Agent    string
	APIs     []inventory.API // that this process serves
	Default  inventory.API   // that has a GPU without an entry
	GPUs     []gpu.DeviceID  // that the agent can offer
	File     File
	ReadOnly bool // File can't be changed: no owner changes
	Follows  bool // another process of this agent changes it

	Takes    map[gpu.DeviceID]Want // GPUs that this process wants, or has, for itself
	NoDriver string                // why nothing can use a GPU now: the driver is released or lost; "" = it is ready

	// ResetRuns reports whether an nvidia-smi may still reset a GPU, also one whose agent was killed. With an error it is not known. nil = it never is.
	ResetRuns func() (bool, error)

	Running       func(agent string) bool                           // another agent runs
	Overlaps      func(gpu.DeviceID) []Overlap                      // of other agents
	Recorded      func(gpu.DeviceID) bool                           // this agent has recorded the GPU, perhaps in an earlier boot
	OfferedBefore func(gpu.DeviceID) bool                           // an earlier process of this agent offered the GPU
	Applied       func(gpu.DeviceID) (inventory.GPUOwner, bool)     // what the published inventory has
	Records       Records                                           // of the APIs of this agent; one that is missing is not known
	Reserved      func(gpu.DeviceID) (at time.Duration, known bool) // when the agent gave the GPU out last, in this process
}

// State is what an agent remembers from one Next to the next. It is immutable; the zero value is that of a new process.
type State struct {
	started time.Duration
	running bool
	empty   map[gpu.DeviceID]time.Duration // since when a GPU has been cordoned and without holders
	absent  map[gpu.DeviceID]absence
	shown   map[gpu.DeviceID]kindShown
	seen    map[inventory.API]seen
	takes   map[gpu.DeviceID]Take
	orphans map[gpu.DeviceID]orphan // marks without a taker

	released gpu.DeviceID                   // for whose reset the driver is released; "" = it is not
	releases map[gpu.DeviceID]time.Duration // since when another process has it released
	resets   map[gpu.DeviceID]time.Duration // since when another agent has a mark for a reset
}

// DriverReleased returns the GPU for whose reset the driver is released; "" = it is not.
func (s State) DriverReleased() gpu.DeviceID { return s.released }

// Take returns what was decided about a GPU that the process wants for itself.
func (s State) Take(id gpu.DeviceID) Take { return s.takes[id] }

// Status is which API has a GPU, and what its move waits for.
type Status struct {
	inventory.GPUOwner
	Target inventory.API
	Entry  bool          // Target is that of the file; else that of the settings
	Waits  string        // for which the move waits: holders, a record, an agent; "" = it does not, or only for Left
	Left   time.Duration // until the owner changes if nothing holds the GPU
}

// initialWait is for how long a process waits for the record of the device plugin to decide which API has a GPU of which nothing is
// on disk. The kubelet answers within a second of its start.
const initialWait = 10 * time.Second

// Next returns which API has each GPU, and the file, which must be on disk before that is applied if it differs.
//
//   - A GPU with an entry is offered only by the agent of its owner, only if no other agent offers it. That agent cordons it while the
//     target is another API, and changes the owner when its records have shown no holder for the settle time.
//   - An agent that is not that of the owner and has recorded the GPU (it offered it before there was an entry) cordons the GPU until its own
//     records show no holder; then the GPU leaves its inventory, and with it its file.
//   - A GPU without an entry belongs to the default API of each agent that offers it. If another API of the same agent has it, it moves
//     in the same way.
func Next(s State, in Input) (State, File, []Status) {
	n := &next{Input: in, file: in.File, was: s, is: State{
		started: s.started, running: true, empty: map[gpu.DeviceID]time.Duration{}, absent: map[gpu.DeviceID]absence{},
		shown: map[gpu.DeviceID]kindShown{}, seen: maps.Clone(s.seen), takes: map[gpu.DeviceID]Take{}, orphans: map[gpu.DeviceID]orphan{},
		releases: map[gpu.DeviceID]time.Duration{}, resets: map[gpu.DeviceID]time.Duration{},
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
	n.findOther()
	ids := append(slices.Collect(maps.Keys(in.File.GPUs)), in.GPUs...)
	ids = slices.AppendSeq(slices.AppendSeq(ids, maps.Keys(in.File.Taken)), maps.Keys(in.Takes))
	slices.Sort(ids)
	var all []Status
	for _, id := range slices.Compact(ids) {
		st, listed := n.decide(id)
		if st = n.taking(id, st); listed || st.Taken != "" {
			all = append(all, st)
		}
	}
	n.is.released = n.driverReleased()
	return n.is, n.file, all
}

// decide decides which API has a GPU. It returns false if that is the one of the settings in any case.
func (n *next) decide(id gpu.DeviceID) (Status, bool) {
	e, targeted := n.file.GPUs[id]
	switch {
	case targeted:
		st := n.decideTargeted(id, e)
		st.Entry = true
		n.recordAgentGone(id)
		return st, true
	case !slices.Contains(n.GPUs, id): // it is only taken
	case len(n.APIs) > 1 || n.File.LocalAPIs[n.Agent][id] != "":
		return n.decideDefault(id), true
	}
	return Status{GPUOwner: inventory.GPUOwner{GPU: id, API: n.Default, Local: slices.Contains(n.GPUs, id) || n.holds(id) != ""}, Target: n.Default}, false
}

type next struct {
	Input
	was, is State
	file    File // as it is to be; a copy once it differs from Input.File
	copied  bool
	other   string // the other agent that resets a GPU, and which; "" = none
}

// change returns the file to be changed.
func (n *next) change() *File {
	if !n.copied {
		n.file, n.copied = n.file.clone(), true
	}
	return &n.file
}

func (n *next) setLocalAPI(id gpu.DeviceID, a inventory.API) {
	f := n.change()
	if f.LocalAPIs[n.Agent] == nil {
		f.LocalAPIs[n.Agent] = map[gpu.DeviceID]inventory.API{}
	}
	f.LocalAPIs[n.Agent][id] = a
}

// decideTargeted decides about a GPU with an entry.
func (n *next) decideTargeted(id gpu.DeviceID, e Entry) Status {
	e = n.clearForce(id, e)
	if e.Owner == "" || n.takeOwnership(id, e) {
		if e = n.recordOwner(id, e); e.Owner == "" {
			return n.decideUnowned(id, e)
		}
	}
	if AgentOf(e.Owner) != n.Agent {
		return n.decideRemote(id, e)
	}
	if e.Target != e.Owner && (AgentOf(e.Target) != n.Agent || slices.Contains(n.APIs, e.Target)) {
		left, waits := n.draining(id, e.Owner, e)
		if waits.text != "" || left > 0 || n.ReadOnly {
			return n.cordoned(id, e, e.Target, waits, left).drainingIf(n.blocked(id, e).text == "")
		}
		e.Owner, e.Epoch = e.Target, e.Epoch+1
		n.change().GPUs[id] = e
		if AgentOf(e.Owner) != n.Agent {
			return n.decideRemote(id, e)
		}
	}
	if len(n.APIs) > 1 && !n.ReadOnly && n.file.LocalAPIs[n.Agent][id] != e.Owner { // which of its APIs may have work on it, if it gives the GPU up
		n.setLocalAPI(id, e.Owner)
	}
	if waits := n.blocked(id, e); waits.text != "" {
		return n.cordoned(id, e, e.Owner, waits, 0)
	}
	st := Status{GPUOwner: inventory.GPUOwner{GPU: id, API: e.Owner, Local: true}, Target: e.Target}
	if e.Target != e.Owner {
		st.Waits = n.Agent + " to serve " + string(e.Target) + ": restart it, with the rights that this needs"
	}
	return st
}

// cordoned is the status of a GPU that this agent has and that takes no new work until it has come to an API.
func (n *next) cordoned(id gpu.DeviceID, e Entry, to inventory.API, waits wait, left time.Duration) Status {
	return Status{
		GPUOwner: inventory.GPUOwner{GPU: id, API: e.Owner, Local: true, Pending: n.health(id, to, waits)},
		Target:   e.Target, Waits: waits.text, Left: left,
	}
}

// drainingIf returns a status with whether what was placed on the GPU before is still given out: not if others may have it.
func (st Status) drainingIf(alone bool) Status {
	st.Draining = alone
	return st
}

// recordOwner records that this agent has a GPU that has no owner, or that it takes by force.
func (n *next) recordOwner(id gpu.DeviceID, e Entry) Entry {
	overlaps := slices.DeleteFunc(n.Overlaps(id), func(c Overlap) bool { return n.agentGone(id, e, c.Agent) })
	forced := e.Owner != ""
	older := slices.ContainsFunc(overlaps, func(c Overlap) bool { return c.Earlier })
	alone := len(overlaps) == 0 && (AgentOf(e.Target) != n.Agent || n.Now-n.is.started >= DefaultSettle)
	if n.ReadOnly || !slices.Contains(n.GPUs, id) || !forced && (older || !n.Recorded(id) && !alone) {
		return e
	}
	a, ok := n.localAPI(id)
	if !ok {
		return e
	}
	if forced {
		a = e.Target
	}
	e.Owner, e.Epoch = a, e.Epoch+1
	n.change().GPUs[id] = e
	return e
}

// decideUnowned decides about a GPU without an owner: no agent gives it out until then.
func (n *next) decideUnowned(id gpu.DeviceID, e Entry) Status {
	waits := "the agent that offers it to record that"
	if !n.Recorded(id) {
		return Status{GPUOwner: inventory.GPUOwner{GPU: id, Pending: "to " + string(e.Target)}, Target: e.Target, Waits: waits}
	}
	e.Owner, _ = n.localAPI(id)
	return n.cordoned(id, e, e.Target, wait{text: waits}, 0)
}

// decideRemote decides about a GPU that another agent has.
func (n *next) decideRemote(id gpu.DeviceID, e Entry) Status {
	away := Status{GPUOwner: inventory.GPUOwner{GPU: id, API: e.Owner}, Target: e.Target}
	if AgentOf(e.Target) == n.Agent {
		away.Waits = AgentOf(e.Owner) + " to give it up"
		if e.Force && !n.Running(AgentOf(e.Owner)) {
			away.Waits = AgentOf(e.Owner) + ", which does not run, to stay away for the settle time"
		}
	}
	applied, offered := n.Applied(id) // the file of the agent may have been removed with its folder
	if !n.Recorded(id) && (!offered || !applied.Local) && len(n.Records.HoldersOf(id)) == 0 {
		return away
	}
	own := e
	own.Owner, _ = n.localAPI(id)
	left, waits := n.draining(id, own.Owner, e)
	if left == 0 && waits.text == "" {
		return away
	}
	return n.cordoned(id, own, e.Owner, waits, left)
}

// decideDefault decides about a GPU without an entry.
func (n *next) decideDefault(id gpu.DeviceID) Status {
	owner, known := n.localAPI(id)
	e := Entry{Target: n.Default, Owner: owner}
	if !known {
		e.Owner = n.Default
		const record = "the record of device-plugin"
		return n.cordoned(id, e, n.Default, wait{text: record, kind: kindRecord}, 0)
	}
	if owner != n.Default {
		left, waits := n.draining(id, owner, e)
		if waits.text != "" || left > 0 || n.ReadOnly {
			return n.cordoned(id, e, n.Default, waits, left).drainingIf(n.heldThrough(id, owner).text == "")
		}
		e.Owner = n.Default
	}
	if n.file.LocalAPIs[n.Agent][id] != e.Owner && !n.ReadOnly {
		n.setLocalAPI(id, e.Owner)
	}
	if waits := n.heldThrough(id, e.Owner); waits.text != "" {
		return n.cordoned(id, e, e.Owner, waits, 0)
	}
	return Status{GPUOwner: inventory.GPUOwner{GPU: id, API: e.Owner, Local: true}, Target: e.Target}
}
