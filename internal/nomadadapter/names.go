package nomadadapter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// The types of groups. A request names a type or begins with one, so none for a GPU of one's own gets a share.
const (
	typeExclusive   = "gpu"
	typeTimeSlicing = "gpu-shared"
	typeMPS         = "gpu-mps"
)

// groupKey is what devices of one group have in common beside their order: Nomad gives a task devices of
// one group only, and takes them for interchangeable.
type groupKey struct {
	groupType string
	pool      string
	place     place

	// What tells devices of a pool apart to which the policy gave no name. One with a name is one kind.
	model   string
	memory  uint64       // MiB; 0 = not known (yet)
	compute core.Compute // zero = not known (yet)
}

func (p places) kindOf(u core.Unit, by GroupBy) groupKey {
	k := groupKey{groupType: typeOf(u.Sharing.Mode), pool: u.Pool, place: p[seat{by, u.Device.At.GPU}]}
	if named(u) {
		return k
	}
	if k.model = u.Device.Model; k.model == "" {
		k.model = "N/A" // as nomad-device-nvidia has it; an empty name would be invalid
	}
	k.memory, k.compute = u.Device.Memory>>20, u.Device.Compute
	return k
}

func typeOf(m core.SharingMode) string {
	switch m {
	case core.TimeSlicing:
		return typeTimeSlicing
	case core.MPS:
		return typeMPS
	default:
		return typeExclusive
	}
}

// named reports whether a unit's pool has its name from the policy.
func named(u core.Unit) bool {
	pool := strings.TrimSuffix(strings.TrimSuffix(u.Pool, core.TimeSlicing.Suffix()), core.MPS.Suffix())
	return pool != core.DefaultPool && (u.Device.Profile == "" || pool != core.MIGPool(u.Device.Profile))
}

// complete reports whether the driver has told all that tells kinds apart.
func (k groupKey) complete() bool {
	return k.model == "" || k.memory != 0 && k.compute != core.Compute{}
}

// plain is the name of the kind's group if no other kind has it.
func (k groupKey) plain() string { return k.at(cmp.Or(k.model, k.pool)) }

// at is a name with the place at its end.
func (k groupKey) at(name string) string { return strings.TrimSuffix(name+" "+string(k.place), " ") }

// conflicts reports whether only one of two kinds can have the plain name.
func (k groupKey) conflicts(o groupKey) bool { return k.groupType == o.groupType && k.plain() == o.plain() }

// compareKinds is the order in which kinds that are seen at once get their names: what is known before what
// is not, the smaller before the larger. It knows no index: slots and reboots change those, and two nodes
// with the same GPUs have the same names.
func compareKinds(a, b groupKey) int {
	known := func(k groupKey) int {
		if k.complete() {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(a.groupType, b.groupType),
		cmp.Compare(a.plain(), b.plain()),
		cmp.Compare(known(a), known(b)),
		cmp.Compare(a.pool, b.pool),
		cmp.Compare(a.memory, b.memory),
		cmp.Compare(a.compute.Major, b.compute.Major),
		cmp.Compare(a.compute.Minor, b.compute.Minor),
		cmp.Compare(a.place, b.place),
	)
}

// name is the group's name on a node where first has the plain one. Different kinds have different names.
func (k groupKey) name(first groupKey) string {
	var differs []string
	if k.pool != first.pool {
		differs = append(differs, k.pool)
	}
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
		return k.plain()
	}
	return k.at(cmp.Or(k.model, k.pool) + " (" + strings.Join(differs, ", ") + ")")
}

// groupNames are the group names given so far, by kind. It is immutable; nil is a node that has seen no device.
//
// A group's name is an identity to Nomad's scheduler: allocations are booked under it, and one whose group
// has another name holds nothing any more. So a name, once given, is neither changed nor given to another
// kind, also while no device of its kind is there. (add says when it is for all that.)
type groupNames map[groupKey]string

// with names those of the kinds that have no name yet. The first of a model has the model's name, as every job
// that asks for one expects; a further one is told apart by what differs.
//
//	reading 1   H100, 80 GB                  "H100"
//	reading 2   H100, 94 GB at index 0       "H100 (95830 MiB)"
//	            H100, 80 GB at index 1       "H100", as its allocations have it
//
// Unseen are the kinds that were named by an earlier process and of which this one has seen no device.
func (n groupNames) with(present map[groupKey]bool, unseen map[groupKey]int) groupNames {
	for _, k := range slices.SortedFunc(maps.Keys(present), compareKinds) {
		if n[k] == "" {
			n = n.add(k, unseen)
		}
	}
	return n
}

// add is n with a name for k. Of a model, kinds of which not everything is known come last, because their
// names are for the time being: the next that is known is most likely what they turn out to be, and takes
// the model's name over from them. So does the next after a kind that is unseen: another driver version tells another
// size of the same memory, and jobs name the model.
func (n groupNames) add(k groupKey, unseen map[groupKey]int) groupNames {
	next, first := groupNames{}, k
	maps.Copy(next, n)
	for other, name := range n {
		if k.conflicts(other) && name == k.plain() {
			first = other
		}
	}
	if k.complete() && !first.complete() {
		maps.DeleteFunc(next, func(o groupKey, _ string) bool { return k.conflicts(o) && !o.complete() })
		first = k
	}
	if _, replaced := unseen[first]; replaced && k.complete() && k != first {
		delete(next, first)
		first = k
	}
	next[k] = next.free(k, first)
	return next
}

// free is a name for k that no other kind of its type has.
func (n groupNames) free(k, first groupKey) string {
	name := k.name(first)
	for i := 1; n.taken(k.groupType, name); i++ {
		if name = k.name(groupKey{}); i > 1 { // with all that is known
			name += fmt.Sprintf(" #%d", i)
		}
	}
	return name
}

func (n groupNames) taken(groupType, name string) bool {
	for k, given := range n {
		if k.groupType == groupType && given == name {
			return true
		}
	}
	return false
}

// assignment is what an inventory's groups are called.
type assignment struct {
	by      GroupBy
	topology  places
	names   groupNames
	previous previous
}

func (n assignment) keyOf(u core.Unit) groupKey { return n.topology.kindOf(u, n.by) }

// with has names for all of inv.
func (n assignment) with(inv *core.Inventory) assignment {
	n.topology, n.previous.topology = n.topology.with(inv, n.by, n.previous.topology)
	present := map[groupKey]bool{}
	var last core.Unit
	for u := range inv.Units() {
		if u.Device != last.Device || u.Pool != last.Pool || u.Sharing.Mode != last.Sharing.Mode { // else a replica
			present[n.keyOf(u)] = true
		}
		last = u
	}
	n.previous.names = without(n.previous.names, present)
	n.names = n.names.with(present, n.previous.names)
	return n.bounded(inv, present)
}
