package rescue

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Mark is a change of a node that is due, until the node shows it. The caller makes a node ineligible after its mark is set, and eligible before the
// mark is removed: the mark shows whose it is.
type Mark struct {
	Cluster, Node string
	Repair        health.Repair // to mark it for; health.NoRepair = the mark is removed
	Eligible      Change        // of its eligibility
	Listed        bool          // the mode is report: nothing is to be called
}

// Change is what becomes of a node's eligibility.
type Change uint8

// Changes.
const (
	Unchanged Change = iota
	MakeIneligible
	MakeEligible
)

var changeNames = [...]string{"unchanged", "ineligible", "eligible"}

// String returns the name of what the node becomes.
func (c Change) String() string { return changeNames[c] }

// mark marks the nodes of which a GPU needs repair, for people and for the constraints of jobs. A mark of another program or person stays.
func (d *decision) mark() {
	if d.ledger.Stop != nil {
		return
	}
	repairs := d.repairs()
	for i := range d.fleet.clusters {
		c := &d.fleet.clusters[i]
		if !c.Marks || !d.current(c) {
			continue
		}
		for n := range c.Nodes {
			node := &c.Nodes[n]
			r := repairs[[2]string{c.Name, node.Name}]
			if !d.reported(c, node) {
				continue
			}
			m := Mark{Cluster: c.Name, Node: node.Name, Repair: r.worst, Listed: c.Mode != ModeAct, Eligible: d.eligible(c, node, r)}
			marked := node.Mark == r.worst || node.Mark != health.NoRepair && !node.MarkIsOurs
			if marked {
				m.Repair = node.Mark
			}
			if !marked || m.Eligible != Unchanged {
				d.out.Marks = append(d.out.Marks, m)
			}
		}
	}
}

// repair is what the GPUs of a node need.
type repair struct {
	worst  health.Repair
	gpus   int  // that need it for as long as the policy asks
	delays bool // another has not needed it for so long
}

func (d *decision) repairs() map[[2]string]repair {
	all := map[[2]string]repair{}
	for i := range d.faulty {
		g := &d.faulty[i]
		k := [2]string{g.c.Name, g.c.Nodes[g.node].Name}
		r := all[k]
		if d.now.Before(g.since.Add(d.Delay)) {
			r.delays = true
			if r.gpus == 0 {
				r.worst = g.c.Nodes[g.node].Mark // as it is, until it is known
			}
			d.out.wake(g.since.Add(d.Delay))
		} else {
			if r.gpus == 0 {
				r.worst = health.NoRepair
			}
			r.gpus++
			r.worst = max(r.worst, g.faults[0].Repair)
		}
		all[k] = r
	}
	return all
}

// eligible returns what becomes of a node's eligibility: ineligible if all its GPUs need repair, and eligible again only if nothing else has changed
// anything since this program made it ineligible.
func (d *decision) eligible(c *cluster, node *Node, r repair) Change {
	i := slices.IndexFunc(d.ledger.Ineligible, func(w Withdrawn) bool { return w.Cluster == c.Name && w.Node == node.Name })
	switch {
	case i < 0:
		if d.Ineligible && node.Schedulable && r.gpus > 0 && r.gpus >= gpusOf(node) {
			return d.withdraw(c, node)
		}
		return Unchanged
	case node.Schedulable && d.ledger.Ineligible[i].Index == 0 && r.gpus > 0:
		return MakeIneligible // the call was not made, or its answer is lost
	case node.Schedulable:
		if w := d.ledger.Ineligible[i]; w.Index == 0 || node.ChangedIndex > w.Index { // else this is from before the call
			d.ledger.Ineligible = slices.Delete(d.ledger.Ineligible, i, i+1) // it was made eligible by others, or it never was ineligible
		}
		return Unchanged
	case r.gpus > 0 || r.delays:
		return Unchanged
	case d.ledger.Ineligible[i].Index == 0 || node.ChangedIndex > d.ledger.Ineligible[i].Index || !node.MarkIsOurs:
		d.out.alert(Subject{Cluster: c.Name, Node: node.Name}, ReasonNotOurs,
			"the GPUs of node "+node.Name+" need no repair any more, and another program or person may have made it ineligible since: it stays so")
		return Unchanged
	}
	return MakeEligible
}

// withdraw makes a node ineligible, if the ledger has place for that.
func (d *decision) withdraw(c *cluster, node *Node) Change {
	next := Withdrawn{Cluster: c.Name, Node: node.Name, Index: ^uint64(0)} // the longest
	size := encoded(next)
	if len(d.ledger.Ineligible) >= maxWithdrawn || size > maxHead || d.bytes()+size > mostBytes {
		return Unchanged
	}
	if c.Mode == ModeAct {
		next.Index = 0
		d.ledger.Ineligible, d.size = append(d.ledger.Ineligible, next), d.size+size
	}
	return MakeIneligible
}

func gpusOf(node *Node) int {
	all := map[string]bool{}
	for i := range node.Devices {
		all[string(node.Devices[i].At.GPU)] = true
	}
	return len(all)
}

// Marked returns the state after the answer to a change of a node's eligibility, with the index of the change.
func (s State) Marked(m Mark, index uint64) State {
	s = s.clone()
	l := &s.Ledger
	i := slices.IndexFunc(l.Ineligible, func(w Withdrawn) bool { return w.Cluster == m.Cluster && w.Node == m.Node })
	if i < 0 {
		return s
	}
	switch m.Eligible {
	case MakeIneligible:
		l.Ineligible[i].Index = index
	case MakeEligible:
		l.Ineligible = slices.Delete(l.Ineligible, i, i+1)
	case Unchanged:
	}
	return s
}
