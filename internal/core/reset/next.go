package reset

import (
	"cmp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// decision is one step. It changes only its own copy of the state.
type decision struct {
	Policy
	node  Node
	now   time.Time // UTC
	state State
	out   Result
}

// Next decides. It is pure, and gives the same result for the same values. now and Node.BootTime are read together.
func (p Policy) Next(s State, n Node, now time.Time) Result {
	d := &decision{Policy: p, node: n, now: durable.Clock(now), state: s.clone()}
	d.setClock()
	d.follow()
	d.forget()
	d.limit()
	d.restore()
	if p.On() {
		d.begin()
	}
	if len(d.state.Records) == 0 { // nothing is remembered whose times would need them
		d.state.Boot, d.state.BootTime = "", time.Time{}
	}
	d.out.State = d.state
	return d.out
}

// setClock has the times follow the wall clock.
func (d *decision) setClock() {
	s := &d.state
	if s.Boot != "" && d.node.Boot != "" && s.Boot != d.node.Boot {
		for i := range s.Records {
			s.Records[i].Persistence = false
		}
	}
	durable.SetClock(times{s}, d.node.Boot, d.node.BootTime, d.now)
	for i := range s.Records {
		// A step of the clock that neither the boot time nor a time in the future shows.
		if r := &s.Records[i]; r.Retry.After(d.now.Add(longestRetry)) {
			r.Retry = d.now.Add(longestRetry)
		}
	}
}

// follow ends a reset of an earlier process. One of this process runs until State.Ended, however long that takes: another one must not begin beside it.
func (d *decision) follow() {
	for i := range d.state.Records {
		if r := &d.state.Records[i]; r.Running != nil && !d.state.started {
			r.end(End{Outcome: Interrupted, Took: d.now.Sub(r.Running.Began), Text: "the agent or the node ended during the reset"}, d.now)
		}
	}
	d.state.started = true
}

// forget has the faults end that are over, and removes records that are empty, or, while there are too many, those of GPUs that are not there, the
// oldest first.
func (d *decision) forget() {
	s := &d.state
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		at, known := s.find(g.ID)
		if !known || s.Records[at].Running != nil || !g.TakesWork || g.repair().resets() {
			continue
		}
		s.Records[at].over()
	}
	s.Records = slices.DeleteFunc(s.Records, func(r Record) bool { return r.isEmpty() })
	for len(s.Records) > maxRecords {
		oldest := -1
		for i := range s.Records {
			r := &s.Records[i]
			if d.node.gpuOf(r.GPU) == nil && r.Running == nil && (oldest < 0 || r.ended().Before(s.Records[oldest].ended())) {
				oldest = i
			}
		}
		if oldest < 0 {
			return
		}
		s.Records = slices.Delete(s.Records, oldest, oldest+1)
	}
}

// limit leaves a fault to a person when there were mostInDay attempts in the day before: the GPU fails again and again.
func (d *decision) limit() {
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		at, known := d.state.find(g.ID)
		if !known {
			continue
		}
		r := &d.state.Records[at]
		if !r.Often {
			r.old(d.now)
			r.Often = len(r.Day) == mostInDay && r.Running == nil && g.repair().resets()
		}
	}
}

// ended is when the latest attempt or refusal ended.
func (r *Record) ended() time.Time {
	if r.Last == nil {
		return time.Time{}
	}
	return r.Last.At
}

// restore lists the GPUs whose persistence mode is to be restored. One that is not there is not: nvidia-smi does not find it.
func (d *decision) restore() {
	for i := range d.state.Records {
		if r := &d.state.Records[i]; r.Persistence && r.Running == nil && d.node.gpuOf(r.GPU) != nil {
			d.out.Restore = append(d.out.Restore, r.GPU)
		}
	}
}

// begin begins the reset of the first GPU that waits for nothing.
func (d *decision) begin() {
	for i := range d.node.GPUs {
		g := &d.node.GPUs[i]
		r, _ := d.state.Of(g.ID)
		need := g.repair()
		if need == nothing || r.Running != nil {
			continue
		}
		b := Begin{GPU: g.ID, Cause: g.cause(), With: g.with(false)}
		if w, waits := d.waits(g, &r, need, b); waits {
			d.out.wait(w)
			continue
		}
		if d.Mode == Act {
			b.Number = d.state.begin(b, false, d.now)
		}
		d.out.Begin = append(d.out.Begin, b)
	}
}

// Still reports whether a reset that was begun may call nvidia-smi: else why it is cancelled. It is asked after its GPUs were taken, with what the node
// shows then; Node.Paused must not be because of this reset itself.
func (p Policy) Still(s State, n Node, id gpu.DeviceID) (why string, ok bool) {
	r, _ := s.Of(id)
	if r.Running == nil {
		return "it has not begun", false
	}
	g := n.gpuOf(id)
	if g == nil {
		return "the GPU is not this agent's any more", false
	}
	switch {
	case r.Running.ByPerson:
	case p.Mode != Act:
		return "GPUs are not reset any more", false
	case !g.repair().resets():
		return "the driver does not ask for a reset any more", false
	}
	if all := slices.Concat(p.cannot(&n, g), n.busy(g, g.with(r.Running.ByPerson))); len(all) > 0 {
		return all[0].Text, false
	}
	return "", true
}

// ByPerson returns the reset of a GPU that a person asks for, and all that keeps it from beginning now. A fault is not needed, attempts do not count, and
// it does not wait for holders: what is not free is returned.
func (p Policy) ByPerson(s State, n Node, id gpu.DeviceID) (Begin, []Wait) {
	b := Begin{GPU: id, Cause: byPerson}
	g := n.gpuOf(id)
	if g == nil {
		return b, []Wait{{GPU: id, Code: WaitUnknown, Text: "this agent does not have it", Alert: true}}
	}
	b.Cause, b.With = cmp.Or(g.cause(), byPerson), g.with(true)
	all := append(p.cannot(&n, g), n.busy(g, b.With)...)
	if r, runs := s.Running(); runs {
		all = append(all, Wait{Code: WaitTurn, Text: string(r.GPU) + " is reset"})
	}
	for i := range all {
		all[i].GPU = id
	}
	return b, all
}

// byPerson is the cause of a reset of a GPU without a fault.
const byPerson = "by a person"

// gpuOf returns a GPU of a node; nil if it is not there.
func (n *Node) gpuOf(id gpu.DeviceID) *GPU {
	for i := range n.GPUs {
		if n.GPUs[i].ID == id {
			return &n.GPUs[i]
		}
	}
	return nil
}
