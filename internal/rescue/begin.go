package rescue

import (
	"slices"
	"time"
)

// repeat makes the acts of open rescues that are due: those that wait, and those without an answer.
func (d *decision) repeat() {
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		c := d.fleet.cluster(r.Cluster)
		if !d.current(c) {
			continue
		}
		for j := range r.Moves {
			if m := &r.Moves[j]; m.Outcome == Open && m.Accepted.IsZero() && (!r.Listed || m.Sent.IsZero()) {
				d.try(c, r, m)
			}
		}
	}
}

// try makes the act of a move if it is due and permitted, and else lists what it waits for.
func (d *decision) try(c *cluster, r *Rescue, m *Move) {
	s := m.subject(r)
	if d.now.Before(m.Retry) {
		d.waitForAnswer(s, m)
		return
	}
	g := d.gpu(r.key())
	if g == nil {
		d.out.wait(s, ReasonSilent, "it is not known whether the fault lasts", d.now.Add(answerIn))
		return
	}
	var work []*Work
	for _, t := range m.Work {
		if w := c.work(t.ID); w != nil {
			work = append(work, w)
		}
	}
	victims, v := 0, d.permitMove(g, work)
	if v.ok() {
		v = d.permitNode(r)
	}
	if v.ok() {
		victims, v = d.roomsOf(g.c).takeAgain(m, work, d.Preempt)
	}
	if !v.ok() {
		d.listVerdict(s, v)
		return
	}
	d.send(c, r, m, victims)
}

// waitForAnswer lists what an open move waits for whose next call is not due. A budget that will not let it through without a person is an alert.
func (d *decision) waitForAnswer(s Subject, m *Move) {
	w := Wait{Subject: s, Reason: ReasonBlocked, Text: m.Answer, Until: m.Retry, Alert: m.Remedy != ""}
	if !m.Sent.IsZero() {
		w.Reason, w.Text = ReasonSent, "the call has no answer yet"
	}
	if w.Alert {
		w.Text += ": " + m.Remedy
	}
	d.out.Waits = append(d.out.Waits, w)
	d.out.wake(m.Retry)
}

// listVerdict lists why an act is not made.
func (d *decision) listVerdict(s Subject, v verdict) {
	if v.refused {
		d.out.refuse(s, v.reason, v.text)
		return
	}
	d.out.wait(s, v.reason, v.text, v.until)
}

// send makes the act of a move. In mode report the same is listed.
func (d *decision) send(c *cluster, r *Rescue, m *Move, victims int) {
	listed, try := c.Mode != ModeAct, m.Tries+1
	if !listed || r.Listed {
		m.Sent = d.now
		m.Tries++
	} else {
		d.wouldBe = append(d.wouldBe, r.Hardware) // the act is one of before the mode was report
	}
	m.Retry = d.now.Add(answerIn)
	m.Answer, m.Remedy = "", ""
	d.out.Acts = append(d.out.Acts, Act{
		Subject: m.subject(r), Work: m.Work, Device: m.Device, Try: try, Term: d.ledger.Term, Victims: victims, Listed: listed,
	})
	d.out.wake(m.Retry)
}

// begin reserves attempts for faulty GPUs whose work can be moved now, the fault that was first seen first.
func (d *decision) begin() {
	d.out.Waits = slices.Grow(d.out.Waits, len(d.faulty))
	for i := range d.faulty {
		g := &d.faulty[i]
		if holders := g.holders(); len(holders) > 0 {
			d.beginGPU(g, holders)
		} else {
			d.free(g)
		}
	}
}

// free lists a faulty GPU that no work holds. By records that are not complete, any GPU may look like that.
func (d *decision) free(g *faulty) {
	for _, i := range d.byGPU[g.gpu] {
		if len(d.faulty[i].holders()) > 0 {
			return // of the other orchestrator of the node
		}
	}
	v := d.permitRecords(g)
	if node := &g.c.Nodes[g.node]; v.ok() && !d.reported(g.c, node) {
		v = waits(ReasonSilent, "whether work has the GPU is not known: node %s does not report", node.Name)
	}
	if !v.ok() {
		d.listVerdict(g.subject(), v)
		return
	}
	d.out.Free = append(d.out.Free, g.subject())
}

// candidate is an act that no rescue has yet.
type candidate struct {
	move    Move
	victims int
	verdict
}

// beginGPU reserves one attempt for the work of a GPU if an act can be made now. What has to wait is a part of the attempt.
func (d *decision) beginGPU(g *faulty, holders []*Work) {
	r := Rescue{
		Cluster: g.c.Name, Node: g.c.Nodes[g.node].Name, GPU: g.gpu, Hardware: g.c.hardware(&g.c.Nodes[g.node]), Cause: g.faults[0].Cause, Began: g.since, Reserved: d.now, Listed: g.c.Mode == ModeReport,
	}
	budget := permitNames(&r)
	if budget.ok() {
		budget = d.permitBudget(&r, len(holders))
	}
	var all []candidate
	due := false
	for _, work := range groups(holders) {
		if d.known(&r, work) {
			continue
		}
		one := d.candidate(g, work, budget)
		due = due || one.ok()
		if !one.ok() {
			d.listVerdict(one.move.subject(&r), one.verdict)
		}
		if !one.refused {
			all = append(all, one)
		}
	}
	if due {
		d.reserve(g, r, all)
	}
}

func (d *decision) candidate(g *faulty, work []*Work, budget verdict) candidate {
	one := candidate{move: newMove(g, work)}
	if one.verdict = d.permitMove(g, work); !one.ok() {
		return one
	}
	if one.verdict = budget; one.ok() {
		one.victims, one.verdict = d.roomsOf(g.c).takeAgain(&one.move, work, d.Preempt)
	}
	return one
}

func newMove(g *faulty, work []*Work) (m Move) {
	for _, w := range work {
		m.Work = append(m.Work, w.target())
	}
	if work[0].ByDevice {
		m.Device = g.gpu
	}
	return m
}

// reserve adds a rescue to the ledger, if that has place for it, and makes the acts that are due.
func (d *decision) reserve(g *faulty, r Rescue, all []candidate) {
	for i := range all {
		r.Moves = append(r.Moves, all[i].move)
	}
	if v := d.permitBytes(&r); !v.ok() {
		d.listVerdict(g.subject(), v)
		return
	}
	d.size += encoded(r) + len(r.Moves)*moveGrows
	d.ledger.Rescues = append(d.ledger.Rescues, r)
	kept := &d.ledger.Rescues[len(d.ledger.Rescues)-1]
	for i := range all {
		if all[i].ok() {
			d.send(g.c, kept, &kept.Moves[i], all[i].victims)
		}
	}
}

// known reports whether a rescue has work already: in an open move, or with an outcome that holds as long as the fault.
func (d *decision) known(next *Rescue, work []*Work) bool {
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		if r.Cluster != next.Cluster || !d.counted(r, next.Listed) {
			continue
		}
		for j := range r.Moves {
			m := &r.Moves[j]
			if !slices.ContainsFunc(work, func(w *Work) bool { return m.has(w.ID) }) {
				continue
			}
			if m.Outcome == Open {
				return true
			}
			if m.holds() && r.GPU == next.GPU && r.Over.IsZero() {
				d.listOutcome(r, m)
				return true
			}
		}
	}
	return false
}

// listOutcome lists why work is not acted on again while the fault lasts.
func (d *decision) listOutcome(r *Rescue, m *Move) {
	s := m.subject(r)
	switch m.Outcome {
	case Refused:
		d.out.refuse(s, ReasonRefused, "the orchestrator refused: "+m.Answer)
	case GivenUp:
		d.out.refuse(s, ReasonDeadline, "it could not be moved within "+d.Deadline.String())
	default:
		d.out.refuse(s, ReasonListed, "in mode act it would have been stopped at "+r.Reserved.Format(time.RFC3339))
	}
}

// groups divides the holders of a GPU into acts: one for each workload, or one for all work of which the orchestrator moves all at once.
func groups(holders []*Work) (all [][]*Work) {
	var device []*Work
	for _, w := range holders {
		if w.ByDevice {
			device = append(device, w)
			continue
		}
		all = append(all, []*Work{w})
	}
	if device != nil {
		all = append(all, device)
	}
	return all
}
