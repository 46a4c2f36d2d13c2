package nomadadapter

import (
	"maps"

	"github.com/tandem-gpu/tandem/internal/core"
)

// earlier is what processes before this one announced, as far as this one still has to find it again. It is immutable.
// All of it is counted in boots at which a device was there: after forgetAfter of them it is forgotten.
type earlier struct {
	places map[seat]earlierPlace
	names  map[kind]int // of kinds that this process has not seen: boots since one was seen; 0 = seen since the latest boot
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

// mostNames bounds the names and the places that are remembered, each. A machine has some tens of each; a policy
// that is changed by a program could give rise to any number of names.
const mostNames = 1024

// bounded is n without what is not there now, if there is too much of it.
func (n naming) bounded(inv *core.Inventory, present map[kind]bool) naming {
	if len(n.names) > mostNames {
		n.names = maps.Clone(n.names)
		maps.DeleteFunc(n.names, func(k kind, _ string) bool { return !present[k] })
		n.earlier.names = nil
	}
	if len(n.places)+len(n.earlier.places) > 2*mostNames {
		there := map[core.DeviceID]bool{}
		for u := range inv.Units() {
			there[u.Device.At.GPU] = true
		}
		n.places, n.earlier.places = maps.Clone(n.places), maps.Clone(n.earlier.places)
		maps.DeleteFunc(n.places, func(s seat, _ place) bool { return !there[s.gpu] })
		maps.DeleteFunc(n.earlier.places, func(s seat, _ earlierPlace) bool { return !there[s.gpu] })
	}
	return n
}

// recalling is n with what was kept of an earlier process beside it. What n has given stays as it is.
func (n naming) recalling(kept naming) naming {
	places, names, before := maps.Clone(kept.places), maps.Clone(n.names), earlier{maps.Clone(n.earlier.places), maps.Clone(n.earlier.names)}
	if before.places == nil {
		before.places = map[seat]earlierPlace{}
	}
	if before.names == nil {
		before.names = map[kind]int{}
	}
	for s, e := range kept.earlier.places {
		_, given := n.places[s]
		if _, known := before.places[s]; !given && !known {
			before.places[s] = e
		}
	}
	if places == nil {
		places = map[seat]place{}
	}
	maps.Copy(places, n.places)
	if names == nil {
		names = map[kind]string{}
	}
	for k, name := range kept.names {
		if names[k] == "" && !names.taken(k.groupType, name) && len(names) < mostNames {
			names[k], before.names[k] = name, kept.earlier.names[k]
		}
	}
	n.places, n.names, n.earlier = places, names, before
	return n
}

// equal reports whether there is nothing new to keep.
func (n naming) equal(o naming) bool {
	return maps.Equal(n.names, o.names) && maps.Equal(n.places, o.places) &&
		maps.Equal(n.earlier.names, o.earlier.names) && maps.Equal(n.earlier.places, o.earlier.places)
}

// without is the map without the kinds that are present. It is the same map if there are none.
func without(unseen map[kind]int, present map[kind]bool) map[kind]int {
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
