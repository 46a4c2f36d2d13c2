package use

import (
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Origin is where a process comes from.
type Origin struct {
	Started uint64       // gpu.Process.Started
	Name    string       // as procfs shows it (comm); "" = unknown
	Owner   holders.Work // of its control group; the zero value = none
	Group   string       // see Process.Group
	Unknown bool         // its control group could not be read
}

// Input is what the next table is made from.
type Input struct {
	At           time.Time
	Orchestrator string                 // of the agent: Kubernetes, Nomad
	Allocatable  *inventory.Allocatable // what is offered
	Usage        []gpu.Usage            // by device; a device may be missing
	Record       *holders.Record        // of the orchestrator; nil = it could not be read, or is not read
	Origins      map[int]Origin         // by PID: of the processes of Usage and of the table before that run now
	Problems     []problem.Problem
}

const (
	// recordKept is how long holders of the latest complete record are shown while there is none: an orchestrator's agent restarts within
	// seconds.
	recordKept = time.Minute

	// workGrace is for how long a process of work must have been seen on a device that its work does not hold by the record, before it is
	// unreserved. The record and the processes are read one after the other, and a record may be behind:
	//
	//	orchestrator  gives the GPU to work . starts it . . . . . . . . . lists it .
	//	process       . . . . . . . . . . . . . uses the GPU . . . . . . . . . . .
	//	table         . . . . . . . . . . . . . . . . ^ not listed yet . . . . ^ listed
	workGrace = 30 * time.Second

	// withholdAfter is for how long a device must have had an unreserved process before it is withheld: more than one reading, so
	// that a short command does not withdraw it.
	withholdAfter = 5 * time.Second
)

// Next returns the table that follows t. It is pure.
//
// A device is held by the work to which the orchestrator's record gives it or, as a GPU or a MIG instance, hardware that it shares. While
// the record is unknown, and for work that it does not show (of another orchestrator, or that the token may not read), the control group of
// a process is the evidence: its work holds the device, unless it is the MPS server of the device. The holders of the
// latest record are kept for a minute while it can't be read.
//
// A process is unreserved on a device if
//   - it belongs to no work of an orchestrator; or
//   - the complete record lists its work without the device, or, if it lists all work, does not list it, and that for 30 s; a process of
//     another orchestrator's work is never unreserved, because that record is not read.
//
// A process whose control group could not be read is not unreserved. Neither is the MPS server on a device that is shared by MPS, nor one on a
// GPU that the agent has taken for itself: that is the agent's own, and makes no holder.
// Missing information makes a process unreserved nowhere.
func (t Table) Next(in Input) Table {
	placements := map[gpu.DeviceID]gpu.Placement{} // of the offered devices
	for u := range in.Allocatable.Devices() {
		placements[u.Device.ID] = u.Device.At
	}
	record := in.recordAfter(t)
	n := next{Input: in, was: t, held: holders.NewSet(record.Locate(placements).Holders)}
	known := in.Record != nil && in.Record.Complete
	out := Table{At: in.At, HoldersKnown: known, RecordAt: t.RecordAt, Recorded: record.Holders, Problems: in.Problems}
	switch {
	case known:
		out.RecordAt = in.At
	case in.Record != nil:
		out.Unknown = Unknown{in.Record.Missing, in.Record.Remedy}
	}
	for u := range in.Allocatable.Devices() {
		out.Devices = append(out.Devices, n.device(u))
	}
	return out
}

// next is one transition.
type next struct {
	Input
	was  Table
	held holders.Set // by the record
}

// recordAfter is the record, with the holders that were seen before while there is no complete one, for a while.
func (in Input) recordAfter(was Table) holders.Record {
	var r holders.Record
	if in.Record != nil {
		r = *in.Record
	}
	if in.At.Sub(was.RecordAt) < recordKept {
		r = r.Since(was.Recorded)
	}
	return r
}

func (n next) device(u inventory.Unit) Device {
	was, _ := n.was.Device(u.Device.ID)
	d := Device{ID: u.Device.ID, Usage: gpu.Usage{Device: u.Device.ID}}
	if i := slices.IndexFunc(n.Usage, func(one gpu.Usage) bool { return one.Device == d.ID }); i >= 0 {
		d.Usage = n.Usage[i]
	}
	d.Holders = slices.Collect(n.held.On(u.Device.At))
	found, known := n.running(d, was)
	for _, p := range found {
		d.Processes = append(d.Processes, n.process(p, u, d.Holders))
	}
	if known && d.Processes == nil {
		d.Processes = []Process{}
	}
	if owner, _ := n.Allocatable.Owner(u.Device.At.GPU); owner.Taken != "" {
		for i := range d.Processes {
			d.Processes[i].Since = time.Time{}
		}
		return d
	}
	d.Holders = n.addObserved(d)
	d.HeldSince = n.heldSince(was, d)
	d.IdleSince = n.idleSince(was, d)
	n.countUnreserved(was, d.Processes)
	return d
}

// running are the processes of a device that run now. If the driver does not report them this time, they are those of the table before.
func (n next) running(d, was Device) (found []gpu.Process, known bool) {
	switch {
	case d.Usage.Processes != nil:
		found, known = slices.Clone(*d.Usage.Processes), true
	case d.Usage.At.IsZero() && was.Processes != nil:
		known = true
		for _, p := range was.Processes {
			found = append(found, p.Process)
		}
	}
	return slices.DeleteFunc(found, func(p gpu.Process) bool {
		o, ok := n.Origins[p.PID]
		return !ok || o.Started != p.Started
	}), known
}

// process is a process of a device with these holders by the record. Since is the time of this table if it is suspected to be unreserved.
func (n next) process(p gpu.Process, u inventory.Unit, held []holders.Holder) Process {
	o := n.Origins[p.PID]
	one := Process{Process: p, Name: o.Name, Owner: n.named(o.Owner), Group: o.Group}
	one.MPSServer = u.Sharing.Mode == inventory.MPS && IsMPS(o.Name)
	if !o.Unknown && !one.MPSServer && n.withoutHolder(one.Owner, held) {
		one.Since = n.At
	}
	return one
}

// named is an owner with the names that the record has for it.
func (n next) named(o holders.Work) holders.Work {
	if n.Record == nil || o.ID == "" || o.Orchestrator != n.Orchestrator {
		return o
	}
	if recorded, ok := n.Record.Work[o.ID]; ok {
		o.Namespace, o.Name = recorded.Namespace, recorded.Name
	}
	return o
}

// withoutHolder reports whether it is known that a process of this owner has no right to a device with these holders.
func (n next) withoutHolder(o holders.Work, held []holders.Holder) bool {
	switch {
	case o == holders.Work{}:
		return true
	case slices.ContainsFunc(held, func(h holders.Holder) bool { return runs(o, h) }):
		return false
	}
	return n.recorded(o)
}

// recorded reports whether a complete record shows what this work holds: it lists the work, or all work.
func (n next) recorded(o holders.Work) bool {
	if o.Orchestrator != n.Orchestrator || n.Record == nil || !n.Record.Complete {
		return false
	}
	_, listed := n.Record.Work[o.ID]
	return listed || n.Record.AllWork
}

// runs reports whether a process of o may be of the work of a holder: the record of a pod may have no UID, as the kubelet's has none, and
// a kubelet may give pods no control groups.
func runs(o holders.Work, h holders.Holder) bool {
	return o.Orchestrator == h.Work.Orchestrator && (o.ID == h.Work.ID || h.Work.ID == "" || o.ID == "")
}

// mpsName is the name of NVIDIA's MPS server and control daemon as procfs shows it, which is cut after 15 bytes
// (TASK_COMM_LEN).
const mpsName = "nvidia-cuda-mps"

// IsMPS reports whether a process is an MPS server or a control daemon by its name (comm). A server runs beside the
// control daemon, and not in the control group of a client. A process can take the name.
func IsMPS(name string) bool { return strings.HasPrefix(name, mpsName) }

// addObserved adds to the holders the work of processes about which no record is known, in the place of work whose name is not known. It returns
// all holders, in order and distinct.
func (n next) addObserved(d Device) []holders.Holder {
	observed := slices.DeleteFunc(slices.Clone(d.Processes), func(p Process) bool {
		return p.Owner == (holders.Work{}) || n.recorded(p.Owner) || p.MPSServer
	})
	held := slices.DeleteFunc(slices.Clone(d.Holders), func(h holders.Holder) bool {
		unnamed := holders.Work{Orchestrator: h.Work.Orchestrator}
		return h.Work == unnamed && slices.ContainsFunc(observed, func(p Process) bool { return p.Owner.ID != "" && p.Owner.Orchestrator == unnamed.Orchestrator })
	})
	recorded := len(held)
	for _, p := range observed {
		if !slices.ContainsFunc(held[:recorded], func(h holders.Holder) bool { return runs(p.Owner, h) }) {
			held = append(held, holders.Holder{Work: p.Owner, Device: d.ID, Observed: true})
		}
	}
	slices.SortFunc(held, holders.Holder.Compare)
	return slices.Compact(held)
}

// heldSince continues while an owner remains. What the orchestrator or an earlier process of the agent recorded of the present owners may be from before.
func (n next) heldSince(was, is Device) time.Time {
	if len(is.Holders) == 0 {
		return time.Time{}
	}
	since := n.At
	if ownerRemains(was, is) {
		since = was.HeldSince
	}
	if n.Record != nil {
		if at, ok := n.Record.HeldSince[is.ID]; ok && at.Before(since) { // not if it is of a clock that is ahead
			since = at
		}
	}
	return since
}

func ownerRemains(was, is Device) bool {
	before := was.Owners()
	return slices.ContainsFunc(is.Owners(), func(o holders.Work) bool { return slices.Contains(before, o) })
}

// idleSince continues while an owner remains, also over a reading that failed. A device whose utilisation is not reported is not idle.
func (n next) idleSince(was, is Device) time.Time {
	u := is.Usage
	busy := func(v gpu.OptionalUint64) bool { return v.OK && v.Value > 0 }
	switch {
	case is.HeldSince.IsZero():
		return time.Time{}
	case u.At.IsZero() && ownerRemains(was, is):
		return was.IdleSince
	case !u.GPU.OK || busy(u.GPU) || busy(u.Memory) || busy(u.Encoder) || busy(u.Decoder):
		return time.Time{}
	case was.IdleSince.IsZero() || !ownerRemains(was, is):
		return n.At
	}
	return was.IdleSince
}

// countUnreserved continues Since of the processes that were suspected before, and decides which are unreserved.
func (n next) countUnreserved(was Device, processes []Process) {
	for i := range processes {
		p := &processes[i]
		if p.Since.IsZero() {
			continue
		}
		j := slices.IndexFunc(was.Processes, func(q Process) bool { return q.PID == p.PID && q.Started == p.Started && q.At == p.At })
		if j >= 0 && !was.Processes[j].Since.IsZero() {
			p.Since = was.Processes[j].Since
		}
		p.Unreserved = p.Owner == (holders.Work{}) || n.At.Sub(p.Since) >= workGrace
	}
}
