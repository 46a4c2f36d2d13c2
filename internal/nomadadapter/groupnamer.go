package nomadadapter

import (
	"maps"
	"sync"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// unusedBoots is the number of boots after which an unused group name, and an unconfirmed topology group, are forgotten.
// Hardware that returns from a repair gets its names again; an NVLink bridge that was removed does not stay in the names
// of groups.
const unusedBoots = 8

// maxNames bounds the group names that are remembered, and the topology groups. A node has some tens of each; a program
// that changes the policy could create any number of names.
const maxNames = 1024

// assignment is all that determines the groups of an inventory. It is immutable.
type assignment struct {
	by       config.GroupBy
	topology topologyGroups
	names    groupNames
	previous previous
}

// previous is what earlier processes announced and this one has not found again, with the number of boots in which a
// device was present since; after forgetAfter of them an entry is dropped.
type previous struct {
	topology map[topologyKey]previousTopology
	names    map[groupKey]int // boots since a unit with the key was found; 0 = found in this boot
}

func (a assignment) keyOf(u inventory.Unit) groupKey { return a.topology.keyOf(u, a.by) }

// groups returns the groups of inv, each unit in one, in the order of the inventory, and the assignment with a name for
// each of them.
func (a assignment) groups(inv *inventory.Allocatable) (assignment, []group) {
	a.topology, a.previous.topology = a.topology.with(inv, a.by, a.previous.topology)
	var all []group
	index, keys := map[groupKey]int{}, map[groupKey]bool{}
	var last inventory.Unit
	at, of, size := 0, make([]int, 0, inv.Len()), []int(nil) // the group of last and of each unit; the units of each group
	for u := range inv.Units() {
		if len(all) == 0 || u.Device != last.Device || u.Pool != last.Pool || u.Sharing.Mode != last.Sharing.Mode { // else a replica
			k, ok := a.keyOf(u), false
			if at, ok = index[k]; !ok {
				at = len(all)
				index[k], keys[k] = at, true
				all, size = append(all, group{key: k}), append(size, 0)
			}
			last = u
		}
		of, size[at] = append(of, at), size[at]+1
	}
	for i := range all {
		all[i].units = make([]inventory.Unit, 0, size[i])
	}
	i := 0
	for u := range inv.Units() {
		all[of[i]].units = append(all[of[i]].units, u)
		i++
	}
	a.previous.names = maps.Clone(a.previous.names)
	maps.DeleteFunc(a.previous.names, func(k groupKey, _ int) bool { return keys[k] })
	a.names = a.names.with(keys, a.previous.names)
	for i := range all {
		all[i].name = a.names[all[i].key]
	}
	return a.bounded(inv, keys), all
}

// bounded returns a without the entries that inv does not use, if there are more than maxNames.
func (a assignment) bounded(inv *inventory.Allocatable, keys map[groupKey]bool) assignment {
	if len(a.names) > maxNames {
		a.names = maps.Clone(a.names)
		maps.DeleteFunc(a.names, func(k groupKey, _ string) bool { return !keys[k] })
		a.previous.names = nil
	}
	if len(a.topology)+len(a.previous.topology) > 2*maxNames {
		present := map[gpu.DeviceID]bool{}
		for u := range inv.Units() {
			present[u.Device.At.GPU] = true
		}
		a.topology, a.previous.topology = maps.Clone(a.topology), maps.Clone(a.previous.topology)
		maps.DeleteFunc(a.topology, func(k topologyKey, _ topologyGroup) bool { return !present[k.device] })
		maps.DeleteFunc(a.previous.topology, func(k topologyKey, _ previousTopology) bool { return !present[k.device] })
	}
	return a
}

// merge returns a with what an earlier process saved. What a has assigned does not change.
func (a assignment) merge(saved assignment) assignment {
	topology := copyOf(saved.topology)
	maps.Copy(topology, a.topology)
	names := copyOf(a.names)
	before := previous{copyOf(a.previous.topology), copyOf(a.previous.names)}
	for k, p := range saved.previous.topology {
		_, assigned := a.topology[k]
		if _, known := before.topology[k]; !assigned && !known {
			before.topology[k] = p
		}
	}
	for k, name := range saved.names {
		if names[k] == "" && !names.taken(k.groupType, name) && len(names) < maxNames {
			names[k], before.names[k] = name, saved.previous.names[k]
		}
	}
	a.topology, a.names, a.previous = topology, names, before
	return a
}

// copyOf is maps.Clone, but never nil.
func copyOf[M ~map[K]V, K comparable, V any](m M) M {
	if m == nil {
		return M{}
	}
	return maps.Clone(m)
}

// equal reports whether a and o have the same file.
func (a assignment) equal(o assignment) bool {
	return maps.Equal(a.names, o.names) && maps.Equal(a.topology, o.topology) &&
		maps.Equal(a.previous.names, o.previous.names) && maps.Equal(a.previous.topology, o.previous.topology)
}

// groupNamer assigns the same names for all streams of the process, and tracks which of them a groupSaver has to save for
// the next process. The zero value has assigned none, and saves none. It is safe for concurrent use.
type groupNamer struct {
	mu       sync.Mutex
	assigned assignment

	loaded  chan struct{} // closed once the saved names are loaded; nil = names are not saved
	wake    chan struct{} // wakes the groupSaver; capacity 1; nil = names are not saved
	dirty   bool          // assigned is not saved
	attempt chan struct{} // closed after the next attempt to save assigned; nil = none is due
	saving  bool          // that attempt has begun: names assigned from now on need another one
}

// groups returns the groups of inv. Send none to Nomad before loading is done.
func (n *groupNamer) groups(inv *inventory.Allocatable, by config.GroupBy) []group {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.assigned.by = by
	next, all := n.assigned.groups(inv)
	if changed := !next.equal(n.assigned); changed && n.wake != nil {
		if n.dirty = true; n.attempt == nil || n.saving {
			n.attempt, n.saving = make(chan struct{}), false
		}
		watch.Notify(n.wake)
	}
	n.assigned = next
	return all
}

// loading returns a channel that is closed once the names of earlier processes are loaded; nil = they are, or names are
// not saved.
func (n *groupNamer) loading() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.loaded == nil || closed(n.loaded) {
		return nil
	}
	return n.loaded
}

// saveAttempt returns a channel that is closed after an attempt to save all names assigned so far; nil = it is done.
func (n *groupNamer) saveAttempt() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.attempt
}

// startSaving begins to track names for a groupSaver, and returns its channels.
func (n *groupNamer) startSaving() (loaded, wake chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loaded, n.wake = make(chan struct{}), make(chan struct{}, 1)
	n.dirty, n.saving = len(n.assigned.names) > 0, false // the previous groupSaver may hang, or use another file
	n.wake <- struct{}{}
	return n.loaded, n.wake
}

// stopSaving ends the tracking of names.
func (n *groupNamer) stopSaving() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loaded, n.wake, n.dirty, n.attempt, n.saving = nil, nil, false, nil, false
}

// merge adds saved names.
func (n *groupNamer) merge(saved assignment) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.assigned = n.assigned.merge(saved)
}

// unsaved reports whether there are names to save.
func (n *groupNamer) unsaved() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dirty
}

// beginSave merges the present content of the file and returns what to write. Call done with the result.
func (n *groupNamer) beginSave(saved assignment) (all assignment, done func(ok bool)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.assigned = n.assigned.merge(saved)
	attempt := n.attempt // nil = a failed attempt is repeated
	n.dirty, n.saving = false, true
	return n.assigned, func(ok bool) { n.endSave(attempt, ok) }
}

func (n *groupNamer) endSave(attempt chan struct{}, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dirty = n.dirty || !ok
	if n.attempt != attempt { // names were assigned meanwhile, or another groupSaver was faster because this one hung
		if attempt != nil && !closed(attempt) {
			close(attempt)
		}
		return
	}
	if n.saving = false; attempt != nil {
		close(attempt)
		n.attempt = nil
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
