package nomadadapter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Group types. Nomad compares a requested type for equality (nomad/structs, DeviceIdTuple.Matches), so a request for "gpu"
// never gets a share.
const (
	typeExclusive   = "gpu"
	typeTimeSlicing = "gpu-shared"
	typeMPS         = "gpu-mps"
)

// groupKey is what the units of a group have in common. Nomad takes all devices of a task from one group, and treats
// them as interchangeable.
type groupKey struct {
	groupType string
	pool      string
	topology  topologyGroup

	// The model, where the policy does not name the pool: a pool with a name is one group.
	model   string
	memory  uint64      // MiB; 0 = unknown (yet)
	compute gpu.Compute // zero = unknown (yet)
}

func (t topologyGroups) keyOf(u inventory.Unit, by config.GroupBy) groupKey {
	k := groupKey{groupType: groupTypeOf(u.Sharing.Mode), pool: u.Pool, topology: t[topologyKey{by, u.Device.At.GPU}]}
	if u.NamedByPolicy() {
		return k
	}
	k.model = cmp.Or(u.Device.Model, "N/A") // as in nomad-device-nvidia; an empty group name is invalid
	k.memory, k.compute = u.Device.Memory>>20, u.Device.Compute
	return k
}

func groupTypeOf(m inventory.SharingMode) string {
	switch m {
	case inventory.TimeSlicing:
		return typeTimeSlicing
	case inventory.MPS:
		return typeMPS
	default:
		return typeExclusive
	}
}

// complete reports whether the driver has reported all fields of the key.
func (k groupKey) complete() bool {
	return k.model == "" || k.memory != 0 && k.compute != gpu.Compute{}
}

// baseName is the name of the key's group if no other key conflicts.
func (k groupKey) baseName() string { return k.withTopology(cmp.Or(k.model, k.pool)) }

func (k groupKey) withTopology(name string) string {
	return strings.TrimSuffix(name+" "+string(k.topology), " ")
}

// conflicts reports whether two keys have the same base name, which only one of them can be given.
func (k groupKey) conflicts(o groupKey) bool {
	return k.groupType == o.groupType && k.baseName() == o.baseName()
}

// compareKeys is the order in which the new keys of one inventory are named: complete before incomplete, smaller before
// larger. It does not depend on device indices, which change with slots and reboots: two nodes with the same GPUs have
// the same names.
func compareKeys(a, b groupKey) int {
	incomplete := func(k groupKey) int {
		if k.complete() {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(a.groupType, b.groupType),
		cmp.Compare(a.baseName(), b.baseName()),
		cmp.Compare(incomplete(a), incomplete(b)),
		cmp.Compare(a.pool, b.pool),
		cmp.Compare(a.memory, b.memory),
		cmp.Compare(a.compute.Major, b.compute.Major),
		cmp.Compare(a.compute.Minor, b.compute.Minor),
		cmp.Compare(a.topology, b.topology),
	)
}

// nameBeside is the key's name on a node where first has the base name: the base name with what differs from first.
func (k groupKey) nameBeside(first groupKey) string {
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
	case gpu.Compute{}:
		differs = append(differs, "compute unknown")
	default:
		differs = append(differs, "compute "+k.compute.String())
	}
	if differs == nil {
		return k.baseName()
	}
	return k.withTopology(cmp.Or(k.model, k.pool) + " (" + strings.Join(differs, ", ") + ")")
}

// groupNames are the group names that were assigned, by key. It is immutable; nil has none.
//
// Nomad's scheduler records allocations under a group's name: under another name their devices are free. So a name is
// neither changed nor assigned to another key, even while no device has its key; add documents the two exceptions.
type groupNames map[groupKey]string

// with adds names for the keys that have none. The first key of a model gets the model's name, which jobs request; a
// later one gets the name with what differs.
//
//	reading 1   H100, 80 GB                  "H100"
//	reading 2   H100, 94 GB at index 0       "H100 (95830 MiB)"
//	            H100, 80 GB at index 1       "H100", as its allocations are recorded
//
// previous has the keys that an earlier process named and this one has not found.
func (n groupNames) with(keys map[groupKey]bool, previous map[groupKey]int) groupNames {
	for _, k := range slices.SortedFunc(maps.Keys(keys), compareKeys) {
		if n[k] == "" {
			n = n.add(k, previous)
		}
	}
	return n
}

// add returns n with a name for k. A complete key takes the base name over in two cases:
//   - from an incomplete key, whose names are temporary: k most likely is what that key turns out to be;
//   - from a key of an earlier process that this one has not found: another driver version reports another size of the
//     same memory, and jobs request the model's name.
func (n groupNames) add(k groupKey, previous map[groupKey]int) groupNames {
	next, first := copyOf(n), k
	for other, name := range n {
		if k.conflicts(other) && name == k.baseName() {
			first = other
		}
	}
	if k.complete() && !first.complete() {
		maps.DeleteFunc(next, func(o groupKey, _ string) bool { return k.conflicts(o) && !o.complete() })
		first = k
	}
	if _, replaced := previous[first]; replaced && k.complete() && k != first {
		delete(next, first)
		first = k
	}
	next[k] = next.unusedName(k, first)
	return next
}

// unusedName returns a name for k that no other key of its type has.
func (n groupNames) unusedName(k, first groupKey) string {
	name := k.nameBeside(first)
	for i := 1; n.taken(k.groupType, name); i++ {
		if name = k.nameBeside(groupKey{}); i > 1 { // with all that is known
			name += fmt.Sprintf(" #%d", i)
		}
	}
	return name
}

func (n groupNames) taken(groupType, name string) bool {
	for k, assigned := range n {
		if k.groupType == groupType && assigned == name {
			return true
		}
	}
	return false
}
