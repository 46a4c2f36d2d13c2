package rescue

import (
	"fmt"
	"iter"
	"slices"
	"strings"
)

// rooms are the free healthy devices of a cluster, and what may take them.
//
// The orchestrator chooses the places, after the act. A replacement has a place for certain if it has one whatever places the other replacements under way
// get. A node with f free devices, of which it needs n, is lost to it when the others have taken f - n + 1 of them. So it has a place as long as the others
// need less in all than the sum of f - n + 1 over its nodes:
//
//	free     2 1 3    nodes that it may use
//	n = 2    1 - 2    the others have to take 3 devices at least: those that need 2 in all leave it a place
type rooms struct {
	c     *cluster
	nodes nodeSet            // that take new work
	free  map[string][]int   // by kind: units by node
	pools map[string]nodeSet // by name, of nodes that take new work
	fits  map[ask]fit        // away from home
	all   []replacement
}

// ask is what much work asks for: one need, in a pool.
type ask struct {
	pool string
	Need
}

// fit is where it fits: the nodes, and the sum of slack.
type fit struct {
	nodes nodeSet
	slack int
}

// replacement is work that is under way to a place.
type replacement struct {
	work   string  // ID of the work that it replaces
	nodes  nodeSet // that it may take; nil = not known
	slack  int     // units that others have to take until it has no place; 0 = it has none that is certain
	others int     // units that others under way need, of those that may take the same nodes
	units  int
}

// nodeSet is a set of nodes by index.
type nodeSet []uint64

func newNodeSet(c *cluster) nodeSet { return make(nodeSet, (len(c.Nodes)+63)/64) }

func (s nodeSet) add(i int) { s[i/64] |= 1 << (i % 64) }

func (s nodeSet) has(i int) bool { return s[i/64]&(1<<(i%64)) != 0 }

// all are the nodes of the set, in order.
func (s nodeSet) all() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := range len(s) * 64 {
			if s[i/64] == 0 {
				continue
			}
			if s.has(i) && !yield(i) {
				return
			}
		}
	}
}

func (s nodeSet) meets(o nodeSet) bool {
	if s == nil || o == nil {
		return true // not known
	}
	for i := range s {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// roomsOf returns the free devices of a cluster beside what acts under way need.
func (d *decision) roomsOf(c *cluster) *rooms {
	if r := d.rooms[c.Name]; r != nil {
		return r
	}
	r := newRooms(c)
	d.rooms[c.Name] = r
	for i := range d.ledger.Rescues {
		one := &d.ledger.Rescues[i]
		for j := range one.Moves {
			if m := &one.Moves[j]; one.Cluster == c.Name && (!one.Listed || c.Mode == ModeReport) && d.busy(m) {
				r.addUnderWay(m)
			}
		}
	}
	return r
}

func newRooms(c *cluster) *rooms {
	r := &rooms{c: c, nodes: newNodeSet(c), free: map[string][]int{}, pools: map[string]nodeSet{}, fits: map[ask]fit{}}
	for n := range c.Nodes {
		if node := &c.Nodes[n]; node.Ready && !node.Draining && node.Schedulable {
			r.nodes.add(n)
			r.countNode(n)
		}
	}
	return r
}

// countNode counts the free units of a node.
func (r *rooms) countNode(n int) {
	node := &r.c.Nodes[n]
	for i := range node.Devices {
		if dev := &node.Devices[i]; usable(node, dev) {
			r.of(dev.Kind)[n] += dev.units()
		}
	}
	for _, i := range r.c.onNode[n] {
		w := &r.c.Work[i]
		if len(w.Holds) == 0 { // placed, its devices are not chosen yet
			for _, need := range w.Needs {
				r.of(need.Kind)[n] -= need.Units
			}
		}
		for kind, used := range held(node, w) {
			r.of(kind)[n] -= used
		}
	}
}

// of returns the free units of a kind, by node.
func (r *rooms) of(kind string) []int {
	free, ok := r.free[kind]
	if !ok {
		free = make([]int, len(r.c.Nodes))
		r.free[kind] = free
	}
	return free
}

// usable reports whether a device takes new work.
func usable(node *Node, dev *Device) bool {
	return dev.Healthy && !slices.ContainsFunc(node.Faults, func(f Fault) bool { return f.At.Overlaps(dev.At) })
}

// held returns the units of usable devices that work holds on a node, by kind, as often as it holds them.
func held(node *Node, w *Work) iter.Seq2[string, int] {
	return func(yield func(string, int) bool) {
		for _, h := range w.Holds {
			for i := range node.Devices {
				if dev := &node.Devices[i]; dev.ID == h.Device && usable(node, dev) && !yield(dev.Kind, h.units()) {
					return
				}
			}
		}
	}
}

// pool returns the nodes of a pool that take new work.
func (r *rooms) pool(name string) nodeSet {
	set, ok := r.pools[name]
	if !ok {
		set = newNodeSet(r.c)
		for _, node := range r.c.Pools[name] {
			if n, ok := r.c.nodeAt[node]; ok && r.nodes.has(n) {
				set.add(n)
			}
		}
		r.pools[name] = set
	}
	return set
}

// addUnderWay adds the replacements of a move that may not have got their places yet.
func (r *rooms) addUnderWay(m *Move) {
	for i := range m.Work {
		t := &m.Work[i]
		if slices.ContainsFunc(r.c.after[t.ID], func(w int) bool { return r.c.Work[w].Node != "" }) {
			continue // it has its place
		}
		next := replacement{work: t.ID, units: units(t.Needs)}
		if w := r.c.work(t.ID); w != nil {
			if next = r.replacement(w); next.slack == 0 {
				next.nodes = r.pool(w.Pool) // its place is lost, or never was free: it may get any
			}
		}
		r.add(next)
	}
}

// replacement returns that of work, with the nodes that have a place for it.
func (r *rooms) replacement(w *Work) replacement {
	free := make([][]int, len(w.Needs))
	for i, need := range w.Needs {
		free[i] = r.of(need.Kind)
	}
	away := r.away(w, free)
	next := replacement{work: w.ID, units: units(w.Needs), nodes: slices.Clone(away.nodes), slack: away.slack}
	if n, ok := r.c.nodeAt[w.Node]; ok && r.pool(w.Pool).has(n) {
		if slack := r.slack(w, free, n, true); slack > 0 {
			next.slack += slack - r.slack(w, free, n, false)
			next.nodes.add(n)
		}
	}
	return next
}

// away is where work fits that leaves nothing behind. It is the same for much of the work.
func (r *rooms) away(w *Work, free [][]int) fit {
	var key ask
	if len(w.Needs) == 1 {
		key = ask{w.Pool, w.Needs[0]}
		if known, ok := r.fits[key]; ok {
			return known
		}
	}
	one := fit{nodes: newNodeSet(r.c)}
	for n := range r.pool(w.Pool).all() {
		if slack := r.slack(w, free, n, false); slack > 0 {
			one.slack += slack
			one.nodes.add(n)
		}
	}
	if len(w.Needs) == 1 {
		r.fits[key] = one
	}
	return one
}

// slack is how many units of a node others have to take until the replacement of work does not fit; 0 = it does not fit now. At home, what the work has
// is free for its replacement.
func (r *rooms) slack(w *Work, free [][]int, n int, home bool) int {
	least := 0
	for i, need := range w.Needs {
		left := free[i][n] - need.Units + 1
		if home {
			left += own(&r.c.Nodes[n], w, need.Kind)
		}
		if left <= 0 {
			return 0
		}
		if i == 0 || left < least {
			least = left
		}
	}
	return least
}

// own is how many units of usable devices of a kind work has on its node.
func own(node *Node, w *Work, kind string) (n int) {
	for k, used := range held(node, w) {
		if k == kind {
			n += used
		}
	}
	return n
}

// add adds a replacement to those that are under way.
func (r *rooms) add(next replacement) {
	for i := range r.all {
		if one := &r.all[i]; one.nodes.meets(next.nodes) {
			next.others += one.units
			one.others += next.units
		}
	}
	r.all = append(r.all, next)
}

// take adds the replacements of work, if each of them has a place for certain, and those under way keep theirs. Else it returns why not. With consent
// one workload may have no place, if one of lower priority ends for it: take returns how many end.
func (r *rooms) take(work []*Work, consent bool) (victims int, v verdict) {
	for i, w := range work {
		mayPreempt := consent && len(work) == 1 && w.Preempts && w.Victims == 1
		if victims, v = r.takeOne(w, mayPreempt); !v.ok() {
			r.giveBack(i)
			return 0, v
		}
	}
	return victims, verdict{}
}

func (r *rooms) takeOne(w *Work, mayPreempt bool) (victims int, v verdict) {
	if len(w.Needs) == 0 {
		return 0, waits(ReasonNoPlace, "it is not known which devices %s asks for", w.name())
	}
	next := r.replacement(w)
	if next.slack == 0 {
		if !mayPreempt {
			return 0, r.noPlace(w)
		}
		victims, next.nodes = 1, r.pool(w.Pool) // it may get the place of any work there
	}
	for i := range r.all {
		one := &r.all[i]
		if !one.nodes.meets(next.nodes) {
			continue
		}
		next.others += one.units
		if one.slack > 0 && one.others+next.units >= one.slack {
			return 0, waits(ReasonNoPlace, "the replacement of %s could take the last place of another one", w.name())
		}
	}
	if victims == 0 && next.others >= next.slack {
		return 0, waits(ReasonNoPlace, "the replacements under way may take the last places for %s", w.name())
	}
	next.others = 0 // add counts them
	r.add(next)
	return victims, verdict{}
}

func (r *rooms) noPlace(w *Work) verdict {
	if w.PoolUnknown != "" {
		return waits(ReasonNoPlace, "it is not known for certain which nodes may take %s: it has %s", w.name(), w.PoolUnknown)
	}
	nodes, read := r.c.Pools[w.Pool]
	if !read {
		return waits(ReasonNoPlace, "which nodes may take %s is being read", w.name())
	}
	var asks []string
	for _, need := range w.Needs {
		asks = append(asks, fmt.Sprintf("%d %s", need.Units, need.Kind))
	}
	return waits(ReasonNoPlace, "none of the %d nodes that %s may use has %s free and healthy", len(nodes), w.name(), strings.Join(asks, " and "))
}

// giveBack removes the latest n replacements.
func (r *rooms) giveBack(n int) {
	for ; n > 0; n-- {
		r.remove(len(r.all) - 1)
	}
}

func (r *rooms) remove(i int) {
	gone := r.all[i]
	r.all = slices.Delete(r.all, i, i+1)
	for j := range r.all {
		if one := &r.all[j]; one.nodes.meets(gone.nodes) {
			one.others -= gone.units
		}
	}
}

// takeAgain is take for an act that may be repeated: its places may have been lost since. It stays among those that are under way.
func (r *rooms) takeAgain(m *Move, work []*Work, consent bool) (victims int, v verdict) {
	if !m.underWay() {
		return r.take(work, consent)
	}
	for i := len(r.all) - 1; i >= 0; i-- {
		if m.has(r.all[i].work) {
			r.remove(i)
		}
	}
	victims, v = r.take(work, consent)
	if !v.ok() {
		r.addUnderWay(m)
	}
	return victims, v
}
