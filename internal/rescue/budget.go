package rescue

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// counted reports whether a rescue counts for a budget: those that were only listed count for what is only listed.
func (d *decision) counted(r *Rescue, listed bool) bool { return !r.Listed || listed }

// permitBudget decides whether another rescue may be reserved, of a GPU with that many holders.
func (d *decision) permitBudget(next *Rescue, holders int) verdict {
	if len(d.ledger.Rescues) >= maxRescues {
		return waits(ReasonLedger, "the ledger has %d rescues of the last day, and keeps no more", maxRescues).before(d.oldest().Add(day))
	}
	if len(d.ledger.Rescues) > 0 && d.moves()+holders > maxMoves {
		return waits(ReasonLedger, "the ledger has %d moves, and keeps %d at most", d.moves(), maxMoves)
	}
	var attempts []time.Time
	gpus := map[gpu.DeviceID]time.Time{} // of the node: the latest rescue
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		if !d.counted(r, next.Listed) {
			continue
		}
		if r.GPU == next.GPU && d.now.Sub(r.Reserved) < day {
			attempts = append(attempts, r.Reserved)
		}
		if r.sameNode(next) && r.GPU != next.GPU && d.now.Sub(r.Reserved) < hour && r.Reserved.After(gpus[r.GPU]) {
			gpus[r.GPU] = r.Reserved
		}
	}
	if len(attempts) >= d.Attempts {
		return waits(ReasonAttempts, "%d attempts within a day were made for this GPU: repair it", len(attempts)).before(whenFewer(attempts, d.Attempts, day))
	}
	if len(gpus) >= d.MaxGPUs {
		var times []time.Time
		for _, id := range keys(gpus) {
			times = append(times, gpus[id])
		}
		return waits(ReasonGPUs, "work of %d other GPUs of this node was moved within an hour", len(gpus)).before(whenFewer(times, d.MaxGPUs, hour))
	}
	return d.permitNode(next)
}

// sameNode reports whether two rescues are of one node, also if its hostname is not its alone any more.
func (r *Rescue) sameNode(o *Rescue) bool {
	return r.Hardware == o.Hardware || r.Cluster == o.Cluster && r.Node == o.Node
}

// permitBytes decides whether the ledger has place for another rescue with its moves.
func (d *decision) permitBytes(next *Rescue) verdict {
	size := encoded(next) + len(next.Moves)*moveGrows
	if now := d.bytes(); now+size > mostBytes {
		return waits(ReasonLedger, "the ledger has %d bytes, and keeps no more than %d", now, mostBytes).before(d.oldest().Add(day))
	}
	return verdict{}
}

// permitNames refuses a rescue with names that are longer than those of any node, GPU or cause: it would take the place of others.
func permitNames(next *Rescue) verdict {
	if n := encoded(next); n < 0 || n > maxHead {
		return refuses(ReasonLedger, fmt.Sprintf("the ledger keeps no names as long as those of the node, its GPU and the cause: %d bytes of %d", n, maxHead))
	}
	return verdict{}
}

// bytes is how long the ledger is, and may get by the answers to its open moves.
func (d *decision) bytes() int {
	if d.size == 0 {
		d.size = encoded(d.ledger)
		for i := range d.ledger.Rescues {
			for j := range d.ledger.Rescues[i].Moves {
				if d.ledger.Rescues[i].Moves[j].Outcome == Open {
					d.size += moveGrows
				}
			}
		}
	}
	return d.size
}

// oldest is the time of the oldest rescue; now, if there is none.
func (d *decision) oldest() time.Time {
	if len(d.ledger.Rescues) == 0 {
		return d.now
	}
	return slices.MinFunc(d.ledger.Rescues, func(a, b Rescue) int { return a.Reserved.Compare(b.Reserved) }).Reserved
}

// whenFewer is when fewer times than most are within a window.
func whenFewer(times []time.Time, most int, window time.Duration) time.Time {
	slices.SortFunc(times, time.Time.Compare)
	return times[len(times)-most].Add(window)
}

// permitNode decides whether an act may be made on the node of a rescue while those on other nodes are under way.
func (d *decision) permitNode(next *Rescue) verdict {
	busy := map[string]bool{}
	var until time.Time
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		for j := range r.Moves {
			m := &r.Moves[j]
			if !d.counted(r, next.Listed) || !d.busy(m) {
				continue
			}
			busy[r.Hardware] = true
			if ends := m.Ended.Add(d.CoolDown); m.Outcome != Open && (until.IsZero() || ends.Before(until)) {
				until = ends
			}
		}
	}
	for _, node := range d.wouldBe {
		busy[node] = true
	}
	if d.most == 0 {
		d.most = d.maxNodes()
	}
	if !busy[next.Hardware] && len(busy) >= d.most {
		return waits(ReasonNodes, "acts are under way on %d nodes, or were until now; %d are allowed at a time", len(busy), d.most).before(until)
	}
	return verdict{}
}

// busy reports whether a move is under way, or was done so recently that its node still counts.
func (d *decision) busy(m *Move) bool {
	switch m.Outcome {
	case Open:
		return m.underWay()
	case Moved, NotReplaced, Listed:
		return d.now.Sub(m.Ended) < d.CoolDown
	default:
		return false
	}
}

// maxNodes is on how many nodes acts may be under way at a time.
func (d *decision) maxNodes() int {
	nodes := map[string]bool{}
	for i := range d.fleet.clusters {
		c := &d.fleet.clusters[i]
		if !d.current(c) {
			continue
		}
		for n := range c.Nodes {
			if len(c.Nodes[n].Devices) > 0 {
				nodes[c.hardware(&c.Nodes[n])] = true
			}
		}
	}
	return max(d.MaxNodes, len(nodes)*d.MaxPercent/100)
}
