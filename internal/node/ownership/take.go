package ownership

import (
	"cmp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// An agent may take a GPU that it offers away from its API for a purpose of its own. The owner in the file stays; beside it is a Mark, with
// which no API gives the GPU out. Without the mark the owner has the GPU again, so nothing has to be restored, and an agent that does not
// know marks drops them.
//
//	wanted     no holder by any record . . . settle time | mark . . published . . confirmTime | granted . . . . . released | no mark
//	its API    offers                                    | refuses                                                         | offers
//	a holder   it begins again                           | mark removed, it begins again      | wanted back
//
// The GPU takes work until the mark, so that waiting for it costs nothing: what gets it in that time is its holder.

// Mark is what the file has of a GPU that an agent has taken.
type Mark struct {
	Agent   string
	Purpose inventory.Purpose

	// DriverReleased means that no agent of the node is to have the driver open, because this GPU is reset: see driverReleased. An agent of an earlier version
	// does not know it. It keeps the driver open, so that nvidia-smi refuses the reset, and drops it if it writes the file; the agent that resets the GPU
	// writes it again.
	DriverReleased bool
}

const (
	// confirmTime is for how long a GPU is published as taken before it is granted: what was given out by an earlier inventory, also by
	// another process of this agent, is in the records by then.
	confirmTime = 2 * time.Second

	// orphanTime is for how long the mark of a process that has ended stays: what it ran on the GPU ends with it, but not at once.
	orphanTime = 2 * time.Second

	// orphanTimeOfReset is for how long after the start of a process the mark of an earlier one for a reset stays at most: nvidia-smi, or the component that
	// runs it, goes on without the agent (gpureset.AtMost).
	orphanTimeOfReset = 5 * time.Minute

	// releasedAtMost is for how long an agent keeps the driver closed for the reset that another one makes. A reset takes five minutes at most (gpureset.AtMost).
	releasedAtMost = 6 * time.Minute
)

// Want is that this process wants a GPU, or has it, for itself.
type Want struct {
	Purpose       inventory.Purpose
	Number        uint64 // another one each time that the GPU is wanted
	ReleaseDriver bool   // it is reset, and the driver is to be released for that
}

// Take is how far a GPU that this process wants for itself has come.
type Take struct {
	Number  uint64 // of the Want; 0 = it can't be taken so far
	Granted bool
	Waits   string // for what, before that; "" = only for time
	Back    string // why the GPU is wanted back, after that; "" = it is not. It stays

	counting  bool          // nothing has had the GPU since free
	free      time.Duration // or since this agent gave it out last
	marked    bool
	published bool // the inventory has the mark, since
	since     time.Duration

	released bool // the driver was released for a reset since it was granted: it need not be ready
}

// taking returns the status of a GPU with whether an agent has taken it.
func (n *next) taking(id gpu.DeviceID, st Status) Status {
	mark, marked := n.file.Taken[id]
	want, wanted := n.Takes[id]
	foreign := marked && mark.Agent != n.Agent
	switch {
	case wanted && n.was.takes[id].marked && n.was.takes[id].Number == want.Number: // also if the file has another mark by now: an older one was put back
		return n.take(id, st, want)
	case foreign && !st.Local: // the agent that has the GPU decides
		return n.wait(id, st, mark.Agent+", which has taken it")
	case foreign && n.Running(mark.Agent), marked && n.Follows:
		st.Taken = mark.Purpose
		return n.wait(id, st, "another process, which has taken it")
	case marked:
		return n.wait(id, n.giveBack(id, st, mark), "the end of what had taken it before")
	case wanted:
		return n.take(id, st, want)
	}
	return st
}

// wait sets what the take of a GPU waits for, if there is one.
func (n *next) wait(id gpu.DeviceID, st Status, what string) Status {
	if _, wanted := n.Takes[id]; wanted {
		n.is.takes[id] = Take{Waits: what}
	}
	return st
}

// orphan is a mark whose taker has gone.
type orphan struct{ least, most time.Duration } // until when it stays

// giveBack removes the mark of a process that has given the GPU back, or has ended: for a reset, when its nvidia-smi has ended, too.
func (n *next) giveBack(id gpu.DeviceID, st Status, mark Mark) Status {
	one, seen := n.was.orphans[id]
	switch {
	case n.was.takes[id].marked: // of this process: its taker has gone
		one = orphan{n.Now, n.Now}
	case seen:
	case mark.Purpose == inventory.Reset:
		one = orphan{n.Now + orphanTime, max(n.Now+orphanTime, n.is.started+orphanTimeOfReset)}
	default:
		one = orphan{n.Now + orphanTime, n.Now + orphanTime}
	}
	n.is.orphans[id] = one // while the file can't be written, too
	runs, known := n.resetRuns()
	stays := n.Now < one.least || n.Now < one.most && (runs || !known)
	if stays {
		st.Taken = mark.Purpose
	}
	switch {
	case n.ReadOnly:
	case !stays:
		delete(n.change().Taken, id)
	case mark.DriverReleased && !runs: // for the other agents: this one has it open
		mark.DriverReleased = false
		n.change().Taken[id] = mark
	}
	return st
}

// take decides about a GPU that this process wants.
func (n *next) take(id gpu.DeviceID, st Status, want Want) Status {
	is := n.was.takes[id]
	if is.Number != want.Number {
		is = Take{}
	}
	is.released = is.released || is.Granted && n.releasing()
	unfit := cmp.Or(n.unfit(id, st), n.driverAway(is, want.Purpose))
	switch {
	case is.Granted:
		is.Back = cmp.Or(is.Back, unfit, n.held(id))
	case is.marked:
		is = n.confirm(id, is, cmp.Or(unfit, n.turn(want.Purpose), n.notFree(id)))
	default:
		is = n.settle(id, is, cmp.Or(unfit, n.turn(want.Purpose), n.notFree(id)))
	}
	is.Number = want.Number
	n.is.takes[id] = is
	if is.marked {
		st.Taken = want.Purpose
	}
	releases := is.Granted && want.ReleaseDriver && want.Purpose == inventory.Reset
	switch mark := (Mark{n.Agent, want.Purpose, releases}); {
	case n.ReadOnly:
	case is.marked && n.file.Taken[id] != mark: // it is new, or the file was lost
		n.change().Taken[id] = mark
	case !is.marked && n.was.takes[id].marked:
		delete(n.change().Taken, id)
	}
	return st
}

// settle counts for how long nothing has had a GPU, and marks it then.
func (n *next) settle(id gpu.DeviceID, is Take, why string) Take {
	if why != "" {
		return Take{Waits: why}
	}
	if !is.counting {
		is = Take{counting: true, free: n.Now}
	}
	if reserved, known := n.Reserved(id); known {
		is.free = max(is.free, reserved)
	}
	switch {
	case n.Now-is.free < DefaultSettle:
	case n.ReadOnly:
		is.Waits = "the file of the node, which can't be written"
	default:
		is.marked, is.Waits = true, ""
	}
	return is
}

// confirm looks once more whether nothing has got a GPU in between.
func (n *next) confirm(id gpu.DeviceID, is Take, why string) Take {
	if reserved, known := n.Reserved(id); known && reserved > is.free {
		why = cmp.Or(why, givenOut.Text)
	}
	if why != "" {
		return Take{Waits: why}
	}
	if applied, ok := n.Applied(id); !is.published && ok && applied.Taken != "" {
		is.published, is.since = true, n.Now
	}
	is.Granted = is.published && n.Now-is.since >= confirmTime
	return is
}

// unfit returns why a GPU can't be taken, or be kept; "" = it can.
func (n *next) unfit(id gpu.DeviceID, st Status) string {
	switch {
	case !st.Local:
		return "another agent to give it up"
	case !slices.Contains(n.GPUs, id):
		return "this agent to offer it"
	case st.Pending != "":
		return "the end of its move " + st.Pending
	}
	for _, o := range n.Overlaps(id) { // also of an agent that does not run: its work may
		return o.Agent + ", which offers it, too"
	}
	return ""
}

// held returns the work that has a GPU; "" = none is known.
func (n *next) held(id gpu.DeviceID) string {
	if by := n.Records.HoldersOf(id); len(by) > 0 {
		return "the end of " + by[0]
	}
	return ""
}

// notFree returns the work that has a GPU, or the record that does not show whether work has it; "" = it is known that none has.
func (n *next) notFree(id gpu.DeviceID) string {
	for _, a := range n.APIs {
		if n.Records[a] == nil {
			return "the record of " + string(a) + ", which is not read"
		}
	}
	return n.Records.Wait(id, n.Clock, n.Now, n.Reserved).Text
}

// holds returns what this agent keeps a GPU for, by what was decided last; "" if it does not.
func (n *next) holds(id gpu.DeviceID) inventory.Purpose {
	if _, wanted := n.Takes[id]; wanted && n.was.takes[id].marked {
		return n.Takes[id].Purpose
	}
	if m := n.file.Taken[id]; m.Agent == n.Agent {
		return m.Purpose
	}
	return ""
}
