package nomadadapter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
)

// kind is what devices of one group have in common beside their order: Nomad gives a task devices of
// one group only, and takes them for interchangeable.
type kind struct {
	model   string
	memory  uint64       // MiB; 0 = not known (yet)
	compute core.Compute // zero = not known (yet)
}

func kindOf(d core.Device) kind {
	model := d.Model
	if model == "" {
		model = "N/A" // as nomad-device-nvidia has it; an empty name would be invalid
	}
	return kind{model, d.Memory >> 20, d.Compute}
}

// complete reports whether the driver has told all that tells kinds apart.
func (k kind) complete() bool { return k.memory != 0 && k.compute != core.Compute{} }

// compareKinds is the order in which kinds that are seen at once get their names: what is known before what
// is not, the smaller before the larger. It knows no index: slots and reboots change those, and two nodes
// with the same GPUs have the same names.
func compareKinds(a, b kind) int {
	known := func(k kind) int {
		if k.complete() {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(a.model, b.model),
		cmp.Compare(known(a), known(b)),
		cmp.Compare(a.memory, b.memory),
		cmp.Compare(a.compute.Major, b.compute.Major),
		cmp.Compare(a.compute.Minor, b.compute.Minor),
	)
}

// name is the group's name on a node where first has the model's. Different kinds have different names.
func (k kind) name(first kind) string {
	var differs []string
	switch k.memory {
	case first.memory:
	case 0:
		differs = append(differs, "memory unknown")
	default:
		differs = append(differs, fmt.Sprintf("%d MiB", k.memory))
	}
	switch k.compute {
	case first.compute:
	case core.Compute{}:
		differs = append(differs, "compute unknown")
	default:
		differs = append(differs, "compute "+k.compute.String())
	}
	if differs == nil {
		return k.model
	}
	return k.model + " (" + strings.Join(differs, ", ") + ")"
}

// names are the group names given so far, by kind. It is immutable; nil is a node that has seen no device.
//
// A group's name is an identity to Nomad's scheduler: allocations are booked under it, and one whose group
// has another name holds nothing any more. So a name, once given, is neither changed nor given to another
// kind, also while no device of its kind is there.
type names map[kind]string

// with names the kinds of inv that have none yet. The first of a model has the model's name, as every job
// that asks for one expects; a further one is told apart by what differs.
//
//	reading 1   H100, 80 GB                  "H100"
//	reading 2   H100, 94 GB at index 0       "H100 (95830 MiB)"
//	            H100, 80 GB at index 1       "H100", as its allocations have it
func (n names) with(inv *core.Inventory) names {
	present := map[kind]bool{}
	for u := range inv.Units() {
		present[kindOf(u.Device)] = true
	}
	for _, k := range slices.SortedFunc(maps.Keys(present), compareKinds) {
		if n[k] == "" {
			n = n.add(k)
		}
	}
	return n
}

// add is n with a name for k. Of a model, kinds of which not everything is known come last, because their
// names are for the time being: the next that is known is most likely what they turn out to be, and takes
// the model's name over from them.
func (n names) add(k kind) names {
	next, first := names{}, k
	maps.Copy(next, n)
	for other, name := range n {
		if name == k.model {
			first = other
		}
	}
	if k.complete() && !first.complete() {
		maps.DeleteFunc(next, func(o kind, _ string) bool { return o.model == k.model && !o.complete() })
		first = k
	}
	next[k] = k.name(first)
	return next
}

// register gives every reader of inventories the same names, for as long as the process lives. The zero
// value has given none.
type register struct {
	mu    sync.Mutex
	given names
}

// of are the names for inv.
func (r *register) of(inv *core.Inventory) names {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.given = r.given.with(inv)
	return r.given
}
