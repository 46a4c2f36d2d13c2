package rescue

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Budget is what of the budgets of a policy is in use, for people and metrics. Of a list only what is in use is in it.
type Budget struct {
	Nodes    Used        // on which acts are under way, or were until now
	GPUs     []NodeUsed  // of a node, within the last hour
	Attempts []GPUUsed   // of a GPU, within the last day
	Quorum   []CauseUsed // nodes with a fault of one cause, within Policy.QuorumTime
	Rescues  Used        // that the ledger keeps
	Moves    Used        // that the ledger keeps
}

// Used is how much of a limit is in use.
type Used struct {
	Used   int
	Listed int // more than Used, had the acts that were only listed in mode report been made
	Limit  int
}

// NodeUsed is a Used of a node.
type NodeUsed struct {
	Hardware string // the node, in all clusters that have it
	Used
}

// GPUUsed is a Used of a GPU.
type GPUUsed struct {
	GPU gpu.DeviceID
	Used
}

// CauseUsed is a Used of a cause. One more than the limit stops all acts.
type CauseUsed struct {
	Cause string
	Used
}

// Budget returns what of the budgets is in use. Like Next it is pure.
func (p Policy) Budget(s State, f Fleet, now time.Time) Budget {
	d := p.decision(s, f, now)
	b := Budget{
		Nodes:   Used{Limit: d.maxNodes()},
		Rescues: Used{Used: len(d.ledger.Rescues), Limit: maxRescues}, Moves: Used{Used: d.moves(), Limit: maxMoves},
	}
	busy, gpus, attempts := counter[string]{}, counter[string]{}, counter[gpu.DeviceID]{}
	for i := range d.ledger.Rescues {
		r := &d.ledger.Rescues[i]
		for j := range r.Moves {
			if d.busy(&r.Moves[j]) {
				busy.add("", r.Hardware, r.Listed)
			}
		}
		if d.now.Sub(r.Reserved) < hour {
			gpus.add(r.Hardware, string(r.GPU), r.Listed)
		}
		if d.now.Sub(r.Reserved) < day {
			attempts.add(r.GPU, r.Reserved.String(), r.Listed)
		}
	}
	b.Nodes.Used, b.Nodes.Listed = busy.of("")
	for _, node := range keys(gpus) {
		n, listed := gpus.of(node)
		b.GPUs = append(b.GPUs, NodeUsed{node, Used{n, listed, p.MaxGPUs}})
	}
	for _, id := range keys(attempts) {
		n, listed := attempts.of(id)
		b.Attempts = append(b.Attempts, GPUUsed{id, Used{n, listed, p.Attempts}})
	}
	nodes := d.nodesByCause()
	for _, cause := range keys(nodes) {
		b.Quorum = append(b.Quorum, CauseUsed{cause, Used{Used: len(nodes[cause]), Limit: p.QuorumNodes}})
	}
	return b
}

// counter has the things that count for each key, and whether only a listed act does.
type counter[K comparable] map[K]map[string]bool

func (c counter[K]) add(of K, thing string, listed bool) {
	if c[of] == nil {
		c[of] = map[string]bool{}
	}
	only, seen := c[of][thing]
	c[of][thing] = listed && (only || !seen)
}

func (c counter[K]) of(k K) (used, listed int) {
	for _, only := range c[k] {
		if only {
			listed++
		} else {
			used++
		}
	}
	return used, listed
}
