package rescue

import (
	"slices"
	"time"
)

// follow records what has become of the moves that are open, and which faults have ended.
func (d *decision) follow() {
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		c := d.fleet.cluster(r.Cluster)
		if !d.current(c) {
			continue
		}
		over := d.over(c, r)
		if over && r.Over.IsZero() {
			r.Over = d.now
		}
		for j := range r.Moves {
			if m := &r.Moves[j]; m.Outcome == Open {
				d.followMove(c, r, m, over)
			}
		}
	}
}

// over reports whether a fault has ended. That a report is missing does not end it.
func (d *decision) over(c *cluster, r *Rescue) bool {
	if d.gpu(r.key()) != nil {
		return false
	}
	n := c.node(r.Node)
	return n == nil || d.reported(c, n)
}

func (d *decision) followMove(c *cluster, r *Rescue, m *Move, over bool) {
	there, ending := m.there(c)
	underWay := d.mayBeUnderWay(m)
	if m.Accepted.IsZero() && !m.Sent.IsZero() && (there == 0 || ending) && !r.Listed && !underWay {
		m.Accepted = m.Sent // the answer is lost
	}
	switch {
	case r.Listed && !m.Sent.IsZero():
		d.followListed(r, m, there)
	case !m.Accepted.IsZero() && there > 0:
		d.followEnd(r, m)
	case !m.Accepted.IsZero():
		d.followReplacement(c, r, m)
	case underWay: // the answer shows whether the work ends by it
	case there == 0:
		m.end(EndedItself, d.now)
	case over:
		m.end(Cancelled, d.now)
	case d.Deadline > 0 && d.now.Sub(r.Reserved) >= d.Deadline:
		m.end(GivenUp, d.now)
	}
}

// there is how much work of the move has not ended, and whether all of that is ending.
func (m *Move) there(c *cluster) (n int, ending bool) {
	ending = true
	for _, t := range m.Work {
		if w := c.work(t.ID); w != nil {
			n++
			ending = ending && w.Phase == Ending
		}
	}
	return n, ending && n > 0
}

// mayBeUnderWay reports whether the call of a move that has no answer yet may still be made.
func (d *decision) mayBeUnderWay(m *Move) bool {
	return !m.Sent.IsZero() && d.now.Sub(m.Sent) < answerIn
}

// followEnd is for work that was stopped and is still there. It is not stopped again: it ends, or a person is needed.
func (d *decision) followEnd(r *Rescue, m *Move) {
	ends := m.Accepted.Add(m.endsWithin() + stuckAfter)
	if d.now.Before(ends) {
		d.out.wait(m.subject(r), ReasonEnding, "it was stopped, and ends", ends)
		return
	}
	d.out.alert(m.subject(r), ReasonStuck, "it was stopped at "+m.Accepted.Format(time.RFC3339)+" and has not ended: a process can't be ended on node "+
		r.Node+", reboot the node")
}

// followReplacement is for work that has ended after it was stopped.
func (d *decision) followReplacement(c *cluster, r *Rescue, m *Move) {
	if m.Gone.IsZero() {
		m.Gone = d.now
	}
	until := m.Gone.Add(replacedIn)
	switch {
	case !c.Replacements || m.replaced(c):
		m.end(Moved, d.now)
	case !d.now.Before(until):
		m.end(NotReplaced, d.now)
	default:
		d.out.wait(m.subject(r), ReasonReplacement, "it has ended, and its replacement does not run yet", until)
	}
}

// replaced reports whether each workload of the move has a replacement that runs, or ran.
func (m *Move) replaced(c *cluster) bool {
	for _, t := range m.Work {
		if !slices.ContainsFunc(c.after[t.ID], func(i int) bool { p := c.Work[i].Phase; return p == Running || p == Ended }) {
			return false
		}
	}
	return true
}

// followListed ends a move of the mode report when its work has ended, or after the time that the move would have taken.
func (d *decision) followListed(r *Rescue, m *Move, there int) {
	ends := m.Sent.Add(m.endsWithin() + stuckAfter)
	if there == 0 {
		ends = d.now
	}
	if !d.now.Before(ends) {
		m.end(Listed, ends)
		return
	}
	d.out.wait(m.subject(r), ReasonEnding, "in mode act it would have been stopped at "+m.Sent.Format(time.RFC3339), ends)
}

func (m *Move) subject(r *Rescue) Subject {
	return Subject{Cluster: r.Cluster, Node: r.Node, GPU: r.GPU, Cause: r.Cause, Work: m.Work[0].ID, Name: m.Work[0].Namespace + "/" + m.Work[0].Name}
}
