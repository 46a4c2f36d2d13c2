package reset

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
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

// follow ends a reset that was interrupted, or that lasts too long.
func (d *decision) follow() {
	for i := range d.state.Records {
		r := &d.state.Records[i]
		if r.Running == nil {
			continue
		}
		ends := r.Running.Began.Add(AtMost)
		end := End{Outcome: Interrupted, Took: d.now.Sub(r.Running.Began)}
		switch {
		case !d.state.started:
			end.Text = "the agent or the node ended during the reset"
		case !d.now.Before(ends):
			end.Text = fmt.Sprintf("it had not ended after %v", AtMost)
		default:
			d.out.wake(ends)
			continue
		}
		r.end(end, d.now)
	}
	d.state.started = true
}

// forget has the faults end that are over, and removes records that say nothing, or, while there are too many, those of GPUs that are not there, the
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
	s.Records = slices.DeleteFunc(s.Records, func(r Record) bool { return r == Record{GPU: r.GPU} })
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
		b := Begin{GPU: g.ID, Cause: g.cause(), With: g.with(need == grouped)}
		if w, waits := d.waits(g, &r, need, b); waits {
			d.out.wait(w)
			continue
		}
		if d.Mode == Act {
			b.Number = d.state.begin(b, false, d.now)
			d.out.wake(d.now.Add(AtMost))
		}
		d.out.Begin = append(d.out.Begin, b)
	}
}

// waits returns what a GPU waits for: first what a person has to do, then a time, then what changes by itself.
func (d *decision) waits(g *GPU, r *Record, need repair, b Begin) (Wait, bool) {
	all := slices.Concat(d.personsTurn(g, r, need), d.cannot(&d.node, g), d.notYet(r), d.node.busy(g, b.With))
	turn := ""
	if running, runs := d.state.Running(); runs {
		turn = string(running.GPU)
	} else if len(d.out.Begin) > 0 {
		turn = string(d.out.Begin[0].GPU)
	}
	if turn != "" {
		all = append(all, Wait{Code: WaitTurn, Text: turn + " is reset"})
	}
	if len(all) == 0 {
		return Wait{}, false
	}
	all[0].GPU = g.ID
	return all[0], true
}

// personsTurn is why a GPU is not reset for its fault any more, or at all.
func (p Policy) personsTurn(g *GPU, r *Record, need repair) []Wait {
	alert := func(code Code, text string) []Wait { return []Wait{{Code: code, Text: text, Alert: true}} }
	switch {
	case need == service:
		return alert(WaitService, "it needs service: a reset does not repair it")
	case need == handOver && g.Action == health.RecoveryUnknown:
		return alert(WaitHandedOver, "the driver reports no recovery action, so a person decides what is done about "+g.cause())
	case need == handOver:
		return alert(WaitHandedOver, "the driver asks for another repair than a reset: "+actionOf(g).String())
	case r.Attempts > 0 && r.Last.Outcome == Refused:
		return alert(WaitRefused, "nvidia-smi does not reset it: "+r.Last.Text)
	case need == proved && r.Attempts > 0 && r.Last.Outcome == Done:
		return []Wait{{Code: WaitProof, Text: "it was reset because it failed its proof, and is proved next"}}
	case r.Attempts >= p.attempts(g):
		return alert(WaitAttempts, fmt.Sprintf("%s is still there after %d of %d resets; the last one: %s", g.cause(), r.Attempts, p.attempts(g), r.Last))
	}
	return nil
}

// cannot is what a person has to do before this agent can reset a GPU, for a person, too.
func (p Policy) cannot(n *Node, g *GPU) (all []Wait) {
	if n.Cannot != "" {
		all = append(all, Wait{Code: WaitCannot, Text: n.Cannot, Alert: true})
	}
	if g.MIG && !p.LoseMIG {
		all = append(all, Wait{Code: WaitMIG, Text: "a reset removes its MIG instances", Alert: true})
	}
	return all
}

// notYet is what a GPU waits for after a reset or a refusal.
func (d *decision) notYet(r *Record) []Wait {
	back := []Wait{{Code: WaitBackOff, Until: r.Retry}}
	switch {
	case !d.now.Before(r.Retry):
		return nil
	case r.NotBegun != "":
		back[0].Text = "its reset did not begin: " + r.NotBegun
	case r.Last != nil && r.Last.Outcome == InUse:
		back[0].Text, back[0].Alert = r.Last.String(), r.Refusals >= alertAfter
	default:
		back[0].Text = "the driver reports its recovery action again after a reset"
	}
	return back
}

// busy is what changes by itself, and keeps any reset of a GPU from beginning.
func (n *Node) busy(g *GPU, with []gpu.DeviceID) (all []Wait) {
	if n.Paused != "" {
		all = append(all, Wait{Code: WaitPaused, Text: n.Paused})
	}
	all = append(all, g.busy()...)
	for _, id := range with {
		other := n.gpuOf(id)
		if other == nil {
			all = append(all, Wait{Code: WaitGroup, Text: string(id) + " of its P2P group is not this agent's"})
			continue
		}
		for _, w := range other.busy() {
			all = append(all, Wait{Code: WaitGroup, Text: string(id) + " of its P2P group: " + w.Text, Alert: w.Alert})
		}
	}
	return all
}

// busy is what has a GPU, or may have it.
func (g *GPU) busy() (all []Wait) {
	if g.Moving != "" {
		all = append(all, Wait{Code: WaitMoving, Text: g.Moving})
	}
	if g.Unread != "" {
		all = append(all, Wait{Code: WaitUnread, Text: "who has it is not known: " + g.Unread, Alert: g.Never})
	}
	if len(g.Holders) > 0 {
		all = append(all, Wait{Code: WaitHeld, Text: oneline.Few(g.Holders) + " has it"})
	}
	if len(g.Processes) > 0 {
		all = append(all, Wait{Code: WaitProcesses, Text: "in use by " + oneline.Few(g.Processes)})
	}
	return all
}

// Still reports whether a reset that was begun may call nvidia-smi: else why it is cancelled. It is asked after its GPUs were taken, with what the node
// shows then; Node.Paused must not be because of this reset itself.
func (p Policy) Still(s State, n Node, id gpu.DeviceID) (why string, ok bool) {
	r, _ := s.Of(id)
	if r.Running == nil {
		return "it has not begun, or has lasted for too long", false
	}
	g := n.gpuOf(id)
	if g == nil {
		return "the GPU is not this agent's any more", false
	}
	need := g.repair()
	switch {
	case r.Running.ByPerson:
	case p.Mode != Act:
		return "GPUs are not reset any more", false
	case !need.resets():
		return "the driver does not ask for a reset any more", false
	}
	if all := slices.Concat(p.cannot(&n, g), n.busy(g, g.with(g.grouped(r.Running.ByPerson)))); len(all) > 0 {
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
	b.Cause, b.With = cmp.Or(g.cause(), byPerson), g.with(g.grouped(true))
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

// grouped reports whether a reset needs the P2P group of a GPU to be free. A person may reset also what has to end its P2P work.
func (g *GPU) grouped(byPerson bool) bool {
	return g.Action == health.RecoveryDrainAndReset || byPerson && g.Action == health.RecoveryDrainP2P
}

// with is the P2P group of a GPU, if its reset needs it.
func (g *GPU) with(grouped bool) []gpu.DeviceID {
	if !grouped {
		return nil
	}
	return slices.Clone(g.Group)
}

// cause is the fault of a GPU; "" = none is known.
func (g *GPU) cause() string {
	switch {
	case g.Cause != "":
		return g.Cause
	case g.Action > health.RecoveryNone:
		return health.Condition{Reason: health.ReasonRecoveryAction, Code: uint64(g.Action)}.Cause()
	case g.ProofFailed:
		return health.ReasonProofFailed.String()
	}
	return ""
}

// actionOf is the recovery action of a GPU. One that this version does not know is another.
func actionOf(g *GPU) health.RecoveryAction { return min(g.Action, health.RecoveryOther) }

// String is the end of a reset in one line.
func (e *End) String() string {
	if e.Text == "" {
		return e.Outcome.String()
	}
	return e.Outcome.String() + ": " + e.Text
}

// gpuOf returns a GPU of a node; nil if it is not there.
func (n *Node) gpuOf(id gpu.DeviceID) *GPU {
	for i := range n.GPUs {
		if n.GPUs[i].ID == id {
			return &n.GPUs[i]
		}
	}
	return nil
}
