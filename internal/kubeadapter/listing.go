package kubeadapter

import (
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
)

// listing is what the kubelet is told about one unit. It is comparable: equal lists are not sent twice.
type listing struct {
	id       core.UnitID
	healthy  bool
	numaNode int
}

// listings are the units of an inventory by resource, each list in canonical order.
func listings(inv *core.Inventory) map[string][]listing {
	size := map[string]int{}
	for u := range inv.Units() {
		size[u.Pool]++
	}
	pools := make(map[string][]listing, len(size))
	for pool, n := range size {
		pools[pool] = make([]listing, 0, n)
	}
	for u := range inv.Units() {
		pools[u.Pool] = append(pools[u.Pool], listing{u.ID, u.Health.Schedulable(), u.Device.NUMANode})
	}
	lists := make(map[string][]listing, len(pools))
	for pool, list := range pools {
		lists[vendor+pool] = list
	}
	return lists
}

// lister makes what the kubelet is told of an inventory, once for all the endpoints that look at it, since each looks at
// every inventory: a node may have a dozen resources and a thousand units. It is safe for concurrent use.
type lister struct {
	held *tracker // nil = nothing is known of pods

	mu    sync.Mutex
	of    *core.Inventory
	with  *holdings
	inv   *core.Inventory
	lists map[string][]listing
}

// all are the lists of an inventory, which nobody may change.
func (l *lister) all(inv *core.Inventory) map[string][]listing {
	_, lists := l.make(inv)
	return lists
}

// changed is closed when the lists of the same inventory may be others.
func (l *lister) changed() <-chan struct{} {
	if l.held == nil {
		return nil
	}
	return l.held.bell.heard()
}

// offered is the inventory without what pods hold under other names.
func (l *lister) offered(inv *core.Inventory) *core.Inventory {
	if l == nil {
		return inv
	}
	offered, _ := l.make(inv)
	return offered
}

func (l *lister) make(inv *core.Inventory) (*core.Inventory, map[string][]listing) {
	held := l.held.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if inv != l.of || held != l.with || l.lists == nil {
		l.of, l.with = inv, held
		l.inv = inv.Withhold(held.withheld(inv))
		l.lists = listings(l.inv)
		if !inv.Provisional() { // else an ID that is missing has not left
			for resource, gone := range held.vanished(l.lists) {
				l.lists[resource] = slices.Concat(l.lists[resource], gone)
			}
		}
	}
	return l.inv, l.lists
}

// farewell is next with the units that go from one list to the next while they are healthy, as unhealthy: the
// kubelet may be handing them out (1.37 can panic over an ID that vanishes then). The core withdraws units for a
// while before they go, but not a unit that comes to another resource under the same ID: a MIG instance in the
// place of another may have it, and a GPU that another policy puts into another pool keeps it.
func farewell(sent, next []listing) (list []listing, leaving bool) {
	if slices.EqualFunc(sent, next, func(a, b listing) bool { return a.id == b.id }) {
		return next, false
	}
	stays := make(map[core.UnitID]bool, len(next))
	for _, l := range next {
		stays[l.id] = true
	}
	var gone []listing
	for _, l := range sent {
		if l.healthy && !stays[l.id] {
			l.healthy = false
			gone = append(gone, l)
		}
	}
	return slices.Concat(next, gone), len(gone) > 0
}
