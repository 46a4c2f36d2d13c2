package nomadadapter

import (
	"maps"

	"github.com/tandem-gpu/tandem/internal/core"
)

// previous is what processes before this one announced, as far as this one still has to find it again. It is immutable.
// All of it is counted in boots at which a device was there: after forgetAfter of them it is forgotten.
type previous struct {
	topology map[seat]earlierPlace
	names  map[groupKey]int // of kinds that this process has not seen: boots since one was seen; 0 = seen since the latest boot
}

// earlierPlace is the place in which a GPU was announced, and the boots since its links (or its NUMA node) were last seen
// to agree with it; 0 = they have been since the latest boot.
type earlierPlace struct {
	place place
	boots int
}

// forgetAfter is the number of boots in a row after which the name of a kind that was not seen, and the place of a GPU
// that its links did not confirm, are forgotten. Hardware that comes back from a repair finds its names; a bridge that
// was taken off does not stay in the names of groups for ever.
const forgetAfter = 8

// maxNames bounds the names and the places that are remembered, each. A machine has some tens of each; a policy
// that is changed by a program could give rise to any number of names.
const maxNames = 1024

// bounded is n without what is not there now, if there is too much of it.
func (n assignment) bounded(inv *core.Inventory, present map[groupKey]bool) assignment {
	if len(n.names) > maxNames {
		n.names = maps.Clone(n.names)
		maps.DeleteFunc(n.names, func(k groupKey, _ string) bool { return !present[k] })
		n.previous.names = nil
	}
	if len(n.topology)+len(n.previous.topology) > 2*maxNames {
		there := map[core.DeviceID]bool{}
		for u := range inv.Units() {
			there[u.Device.At.GPU] = true
		}
		n.topology, n.previous.topology = maps.Clone(n.topology), maps.Clone(n.previous.topology)
		maps.DeleteFunc(n.topology, func(s seat, _ place) bool { return !there[s.gpu] })
		maps.DeleteFunc(n.previous.topology, func(s seat, _ earlierPlace) bool { return !there[s.gpu] })
	}
	return n
}

// merge is n with what was kept of an earlier process beside it. What n has given stays as it is.
func (n assignment) merge(kept assignment) assignment {
	places, names, before := maps.Clone(kept.topology), maps.Clone(n.names), previous{maps.Clone(n.previous.topology), maps.Clone(n.previous.names)}
	if before.topology == nil {
		before.topology = map[seat]earlierPlace{}
	}
	if before.names == nil {
		before.names = map[groupKey]int{}
	}
	for s, e := range kept.previous.topology {
		_, given := n.topology[s]
		if _, known := before.topology[s]; !given && !known {
			before.topology[s] = e
		}
	}
	if places == nil {
		places = map[seat]place{}
	}
	maps.Copy(places, n.topology)
	if names == nil {
		names = map[groupKey]string{}
	}
	for k, name := range kept.names {
		if names[k] == "" && !names.taken(k.groupType, name) && len(names) < maxNames {
			names[k], before.names[k] = name, kept.previous.names[k]
		}
	}
	n.topology, n.names, n.previous = places, names, before
	return n
}

// equal reports whether there is nothing new to keep.
func (n assignment) equal(o assignment) bool {
	return maps.Equal(n.names, o.names) && maps.Equal(n.topology, o.topology) &&
		maps.Equal(n.previous.names, o.previous.names) && maps.Equal(n.previous.topology, o.previous.topology)
}

// without is the map without the kinds that are present. It is the same map if there are none.
func without(unseen map[groupKey]int, present map[groupKey]bool) map[groupKey]int {
	cloned := false
	for k := range present {
		if _, ok := unseen[k]; !ok {
			continue
		}
		if !cloned {
			unseen, cloned = maps.Clone(unseen), true
		}
		delete(unseen, k)
	}
	return unseen
}
