package ownership

import (
	"cmp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Facts are what a running agent reads of the ownership of its GPUs.
type Facts struct {
	Agent string          `json:"agent"`
	APIs  []inventory.API `json:"apis"` // that it serves, that of its settings first
	GPUs  []GPUFacts      `json:"gpus"` // that it can offer, or that have a target

	// Unread is why GPUs can't leave an API: by its settings the agent reads no record of the work that has them.
	Unread map[inventory.API]string `json:"unread,omitempty"`
}

// GPUFacts are those of a GPU.
type GPUFacts struct {
	GPU       gpu.DeviceID  `json:"gpu"`
	PCI       string        `json:"pci"`
	Index     int           `json:"index"`
	Product   string        `json:"product"`
	Offerable bool          `json:"offerable"` // the agent can offer it by its configuration
	Local     bool          `json:"local"`     // it offers it, or cordons it because its work may still have it
	API       inventory.API `json:"api"`       // that has it, as far as this agent reads
	Target    inventory.API `json:"target"`    // as this agent has read it; "" = none
	Pending   string        `json:"pending"`   // why it takes no new work; "" = it does
	Waits     string        `json:"waits"`
	Holders   []string      `json:"holders"` // through the APIs of this agent
}

// Row is what an operator sees of a GPU.
type Row struct {
	GPU     gpu.DeviceID  `json:"gpu"`
	PCI     string        `json:"pci"`
	Index   int           `json:"index"`
	Product string        `json:"product"`
	API     string        `json:"api"`     // that has it now; several, separated by commas, if agents offer it beside each other; "" = none
	Target  inventory.API `json:"target"`  // "" = none: it belongs to the settings of the agents
	Pending bool          `json:"pending"` // it takes no new work
	Waits   string        `json:"waits"`   // for which the move waits; "" = it does not, or only for time
	Holders []string      `json:"holders"`
}

// Done reports whether the GPU takes work through its target.
func (r Row) Done() bool { return !r.Pending && r.API == string(r.Target) }

// Rows returns a row for each GPU of which a file or an agent has something, by GPU.
func Rows(f File, all []Facts) []Row {
	rows := map[gpu.DeviceID]*Row{}
	waits := map[gpu.DeviceID]*waiting{}
	for _, facts := range all {
		for _, g := range facts.GPUs {
			r, e := rows[g.GPU], f.GPUs[g.GPU]
			if r == nil {
				r = &Row{GPU: g.GPU, PCI: g.PCI, Index: g.Index, Product: g.Product, Target: e.Target, Holders: []string{}}
				rows[g.GPU], waits[g.GPU] = r, &waiting{}
			}
			r.add(facts.Agent, g, e)
			waits[g.GPU].add(facts.Agent, g, e)
		}
	}
	var sorted []Row
	for id, r := range rows {
		r.Waits = waits[id].String()
		sorted = append(sorted, *r)
	}
	slices.SortFunc(sorted, func(a, b Row) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.GPU, b.GPU)) })
	return sorted
}

// add adds what an agent has of the GPU.
func (r *Row) add(agent string, g GPUFacts, e Entry) {
	r.Holders = append(r.Holders, g.Holders...)
	r.Target = cmp.Or(r.Target, g.Target) // the file was removed, and the agent has not written it again so far
	if g.Local && (e.Owner == "" || AgentOf(e.Owner) == agent) {
		r.API = strings.Trim(r.API+","+string(g.API), ",")
	}
	if g.Local && g.Pending != "" {
		r.Pending = true
	}
}

// waiting is what agents wait for with a GPU.
type waiting struct {
	local   bool     // an agent has it, or may still have work on it
	reasons []string // of those agents, first of that of the owner
	remote  []string // of others, which wait for those
}

func (w *waiting) add(agent string, g GPUFacts, e Entry) {
	w.local = w.local || g.Local
	switch {
	case g.Waits == "":
	case !g.Local:
		w.remote = append(w.remote, g.Waits)
	case slices.Contains(w.reasons, g.Waits):
	case AgentOf(e.Owner) == agent:
		w.reasons = slices.Insert(w.reasons, 0, g.Waits)
	default:
		w.reasons = append(w.reasons, g.Waits)
	}
}

func (w *waiting) String() string {
	if w.local {
		return strings.Join(w.reasons, "; ")
	}
	return strings.Join(w.remote, "; ")
}
