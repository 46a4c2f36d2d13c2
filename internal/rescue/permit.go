package rescue

import (
	"fmt"
	"slices"
	"time"
)

// verdict is what holds for an act now. The zero value permits it.
type verdict struct {
	reason  Reason
	text    string
	until   time.Time
	refused bool // it is not a matter of time
}

func (v verdict) ok() bool { return v.reason == "" }

func waits(why Reason, format string, args ...any) verdict {
	return verdict{reason: why, text: fmt.Sprintf(format, args...)}
}

func refuses(why Reason, text string) verdict {
	return verdict{reason: why, text: text, refused: true}
}

func (v verdict) before(t time.Time) verdict { v.until = t; return v }

// permitGPU decides whether work of a faulty GPU may be moved at all now.
func (d *decision) permitGPU(g *faulty) verdict {
	node := &g.c.Nodes[g.node]
	begins := g.since.Add(d.Delay)
	switch {
	case d.now.Before(begins):
		return waits(ReasonDelay, "the fault must last for %v, for it may be one of many nodes", d.Delay).before(begins)
	case !node.Ready:
		return waits(ReasonNode, "node %s is not ready: what runs there is not known", node.Name)
	case node.Draining:
		return waits(ReasonNode, "node %s is being drained: its orchestrator moves the work", node.Name)
	case !d.reported(g.c, node):
		return waits(ReasonSilent, "no report of the agent of node %s was seen within %v", node.Name, reportFor)
	}
	return d.permitRecords(g)
}

// permitRecords decides whether the records of which work has a GPU agree. Work that a record lacks, because of a missing right or a late one, would make
// the GPU look free, or the work of another GPU look like that of this one.
func (d *decision) permitRecords(g *faulty) verdict {
	node := &g.c.Nodes[g.node]
	for _, i := range g.c.onNode[g.node] {
		w := &g.c.Work[i]
		for _, h := range w.Holds {
			if _, ok := node.at(h.Device); !ok {
				return waits(ReasonHolders, "%s holds device %s, which node %s does not list", w.name(), h.Device, node.Name)
			}
		}
	}
	for _, f := range g.faults {
		if !f.HoldersKnown {
			if g.c.AgentReports {
				return waits(ReasonHolders, "the agent of node %s has no complete record of who has the GPU", node.Name)
			}
			continue
		}
		for _, id := range f.Holders {
			if w, ok := g.c.workAt[id]; !ok {
				if d.hasEnded(g, id) {
					continue // the agent looks every few seconds
				}
				return waits(ReasonHolders, "work %s has the GPU by the agent of node %s, and the servers do not show it: it has just ended, or a right is missing", id, node.Name)
			} else if one := &g.c.Work[w]; one.Phase != Ended && !g.holds(one) {
				return waits(ReasonHolders, "%s has the GPU by the agent of node %s, and not by the servers' record", one.name(), node.Name)
			}
		}
	}
	return verdict{}
}

// hasEnded reports whether the ledger knows of work that it has ended. No other work gets its ID.
func (d *decision) hasEnded(g *faulty, id string) bool {
	return slices.ContainsFunc(d.ledger.Rescues, func(r Rescue) bool {
		return r.key() == g.key() && slices.ContainsFunc(r.Moves, func(m Move) bool {
			gone := !m.Gone.IsZero() || m.Outcome == Moved || m.Outcome == NotReplaced || m.Outcome == EndedItself
			return gone && slices.ContainsFunc(m.Work, func(t Target) bool { return t.ID == id })
		})
	})
}

// holds reports whether work has hardware that a fault of the GPU covers.
func (g *faulty) holds(w *Work) bool {
	return slices.ContainsFunc(w.Holds, g.covers)
}

// covers reports whether a device that work on the node holds is faulty.
func (g *faulty) covers(h Hold) bool {
	at, ok := g.c.Nodes[g.node].at(h.Device)
	return ok && slices.ContainsFunc(g.faults, func(f *Fault) bool { return f.At.Overlaps(at) })
}

// holders returns the work that has hardware of a faulty GPU, by its orchestrator's record.
func (g *faulty) holders() (all []*Work) {
	for _, i := range g.c.onNode[g.node] {
		if w := &g.c.Work[i]; g.holds(w) {
			all = append(all, w)
		}
	}
	return all
}

// permitWork decides whether a workload of a faulty GPU may be moved now, of a kind that may.
func (d *decision) permitWork(g *faulty, w *Work) verdict {
	if w.Node != g.c.Nodes[g.node].Name || !w.running() {
		return waits(ReasonNotRunning, "%s is %s", w.name(), phaseNames[w.Phase])
	}
	if g.c.AgentReports && !slices.ContainsFunc(g.faults, func(f *Fault) bool { return slices.Contains(f.Holders, w.ID) }) {
		return waits(ReasonHolders, "the agent of node %s does not name %s as a holder of the GPU", w.Node, w.name())
	}
	return d.permitShown(g, w)
}

// permitKind decides whether work of this kind may be moved.
func (d *decision) permitKind(w *Work) verdict {
	switch {
	case w.Controller != Service && w.Controller != Batch:
		return refuses(ReasonController, fmt.Sprintf("nothing would start %s on another node: its controller is %q", w.name(), w.Controller))
	case w.LosesAttempt:
		return refuses(ReasonAttempt, fmt.Sprintf("the controller of %s would count the act as a failure of the work", w.name()))
	case w.Preempts && !d.Preempt:
		return refuses(ReasonPreempts, fmt.Sprintf("the replacement of %s may end other work: the setting preempt allows it", w.name()))
	}
	return verdict{}
}

// permitShown decides whether the servers know of the fault. Until they do, the replacement may get the same GPU.
func (d *decision) permitShown(g *faulty, w *Work) verdict {
	node := &g.c.Nodes[g.node]
	shown := false
	for _, h := range w.Holds {
		if !g.covers(h) {
			continue
		}
		switch h.Shown {
		case ShownUnhealthy:
			shown = true
		case ShownHealthy:
			return waits(ReasonNotShown, "the servers show device %s as healthy", h.Device)
		case NotShown:
			if !g.c.AgentReports {
				return waits(ReasonNotShown, "the servers do not show device %s", h.Device)
			}
			if first, ok := d.state.named[namedKey{g.key(), w.ID}]; !ok || node.ReportedAt.Sub(first) < namedTwice {
				return waits(ReasonNotShown, "the servers do not show the health of device %s: a second report of the agent is awaited", h.Device)
			}
			shown = true
		}
	}
	if !shown {
		return waits(ReasonHolders, "%s does not hold the GPU", w.name())
	}
	return verdict{}
}

// permitMove decides whether an act may be made now, but for budgets and places.
func (d *decision) permitMove(g *faulty, work []*Work) verdict {
	for _, w := range work {
		if v := d.permitKind(w); !v.ok() {
			return v
		}
	}
	if s := d.ledger.Stop; s != nil {
		return waits(ReasonStopped, "all acts are stopped by %s: %s", s.By, s.Text)
	}
	if v := d.permitGPU(g); !v.ok() {
		return v
	}
	for _, w := range work {
		if v := d.permitWork(g, w); !v.ok() {
			return v
		}
	}
	return verdict{}
}

// Still reports whether an act holds for the objects as they are read right before its call; else why not. The fleet needs no more than the cluster with the
// node and its work. Places and budgets are not looked at again: the act is reserved.
func (p Policy) Still(s State, a Act, f Fleet, now time.Time) (bool, string) {
	if s.Term == 0 || s.Term != s.Ledger.Term || a.Term != s.Term {
		return false, "another process leads"
	}
	d := p.decision(s, f, now)
	d.see()
	g := d.gpu(gpuKey{a.Cluster, a.Node, a.GPU})
	if g == nil || g.c.Mode != ModeAct {
		return false, "the fault has ended, or the cluster can't be read, or its mode is not act"
	}
	var work []*Work
	for _, t := range a.Work {
		w := g.c.work(t.ID)
		if w == nil {
			return false, "the work has ended"
		}
		work = append(work, w)
	}
	v := d.permitMove(g, work)
	return v.ok(), v.text
}

// gpu returns a GPU with faults that count; nil = there is none of that name.
func (d *decision) gpu(k gpuKey) *faulty {
	if i, ok := d.at[k]; ok {
		return &d.faulty[i]
	}
	return nil
}

func (w *Work) name() string { return w.Namespace + "/" + w.Name }

func (w *Work) target() Target {
	return Target{ID: w.ID, Namespace: w.Namespace, Name: w.Name, Needs: w.Needs, EndsWithin: w.EndsWithin}
}
