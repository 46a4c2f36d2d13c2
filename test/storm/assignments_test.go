package storm

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// period is a time within which no device may change its pool or its agent, as a workload may use it.
type period struct {
	bindings   int // counts the losses of the bindings of both agents: a state directory of another node
	generation int // of the numbering, which a rebind increments
	policy     int
}

// assignment is what a device is offered as.
type assignment struct {
	agent, pool string
	history     int // number of the agent's history when the device was first offered so
}

// notSaved is the history of an assignment that is in none.
const notSaved = -1

// assignments are what each agent has offered, and check that a device is in one pool of one agent, and has one number, within a
// period. It is safe for concurrent use.
type assignments struct {
	limit time.Duration // for an agent to apply what the other one has decided: it reads the files once a second

	mu        sync.Mutex
	bindings  int
	histories map[string]int // by agent: how often its history was replaced
	known     map[gpu.DeviceID]bool
	returned  map[gpu.DeviceID]time.Time // GPUs that agents may have forgotten, and when each was added again
	offered   map[period]map[gpu.DeviceID]assignment
	numbers   map[period]map[gpu.DeviceID]gpu.DeviceIndex // with policy 0
	indices   map[string]map[gpu.DeviceID]int             // by agent: NVML's, in the latest inventory
	faulty    map[string]map[gpu.DeviceID]bool            // by agent: GPUs whose fault is in its history

	latest map[string]map[gpu.DeviceID]int // by running agent: number of the policy with which each device is offered
	both   map[gpu.DeviceID]time.Time      // devices that both offer, since when

	inventories, moved int // see counts
}

func newAssignments(limit time.Duration) *assignments {
	return &assignments{
		limit:     limit,
		histories: map[string]int{}, known: map[gpu.DeviceID]bool{}, returned: map[gpu.DeviceID]time.Time{},
		offered: map[period]map[gpu.DeviceID]assignment{}, numbers: map[period]map[gpu.DeviceID]gpu.DeviceIndex{},
		indices: map[string]map[gpu.DeviceID]int{}, faulty: map[string]map[gpu.DeviceID]bool{forNomad: {}, forKubernetes: {}},
		latest: map[string]map[gpu.DeviceID]int{}, both: map[gpu.DeviceID]time.Time{},
	}
}

// put is m[outer][inner] = v.
func put[K, L comparable, V any](m map[K]map[L]V, outer K, inner L, v V) {
	if m[outer] == nil {
		m[outer] = map[L]V{}
	}
	m[outer][inner] = v
}

// check adds an inventory and returns an error if it violates an invariant.
func (d *assignments) check(agent string, o *offered) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inventories++
	if err := d.checkNumbers(agent, o); err != nil {
		return err
	}
	pools := map[gpu.DeviceID]string{}
	for _, u := range o.Units {
		switch other, again := pools[u.Device]; {
		case again && other != u.Pool:
			return fmt.Errorf("%s offers %s in two pools: %s and %s", agent, u.Device, other, u.Pool)
		case !d.known[u.GPU] && o.Ready && !o.Unidentified: // else the history may be that of this node
			return fmt.Errorf("%s lists %s (%s), which was never in this node", agent, u.Device, u.Health)
		case u.Schedulable && d.faulty[agent][u.GPU]:
			return fmt.Errorf("%s offers %s, whose fault was in its history and which nothing has repaired", agent, u.Device)
		}
		pools[u.Device] = u.Pool
		if err := d.checkAssignment(agent, o.Generation, u); err != nil {
			return err
		}
		if index, again := d.indices[agent][u.Device]; again && index != u.Index {
			d.moved++
		}
		put(d.indices, agent, u.Device, u.Index)
	}
	d.compare(agent, o)
	return nil
}

// counts are the number of inventories, and how often the NVML index of an offered GPU changed.
func (d *assignments) counts() (inventories, moved int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inventories, d.moved
}

// compare records which devices both agents offer now.
func (d *assignments) compare(agent string, o *offered) {
	latest := map[gpu.DeviceID]int{}
	for _, u := range o.Units {
		latest[u.Device] = policyOf(u.Pool)
	}
	d.latest[agent] = latest
	for id := range d.known {
		a, byNomad := d.latest[forNomad][id]
		b, byKubernetes := d.latest[forKubernetes][id]
		if !byNomad || !byKubernetes || a != b {
			delete(d.both, id)
		} else if d.both[id].IsZero() {
			d.both[id] = time.Now()
		}
	}
}

// checkBoth returns an error if both agents have offered a device for longer than a rebind takes.
func (d *assignments) checkBoth() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, since := range d.both {
		if lasted := time.Since(since); lasted > d.limit {
			return fmt.Errorf("both agents have offered %s for %v", id, lasted.Round(time.Millisecond))
		}
	}
	return nil
}

// checkAssignment compares what a device is offered as with the earlier assignment of the period.
func (d *assignments) checkAssignment(agent string, generation int, u offeredUnit) error {
	at := period{d.bindings, generation, policyOf(u.Pool)}
	now := assignment{agent, u.Pool, d.histories[agent]}
	before, again := d.offered[at][u.Device]
	switch {
	case !again || d.returning(u.GPU):
	case before.agent != agent:
		return fmt.Errorf("%s offers %s in %s, and %s has offered it in %s (%+v)", agent, u.Device, u.Pool, before.agent, before.pool, at)
	case before.pool != u.Pool && before.history == now.history:
		return fmt.Errorf("%s offers %s in %s, and has offered it in %s (%+v)", agent, u.Device, u.Pool, before.pool, at)
	}
	put(d.offered, at, u.Device, now)
	return nil
}

// checkNumbers compares the numbers of devices with the earlier ones, whichever agent decided them.
func (d *assignments) checkNumbers(agent string, o *offered) error {
	at := period{bindings: d.bindings, generation: o.Generation}
	for id, n := range o.Numbers {
		if before, again := d.numbers[at][id]; again && before != n && d.known[id] && !d.returning(id) {
			return fmt.Errorf("%s numbers %s %v, and it was %v (%+v)", agent, id, n, before, at)
		}
		put(d.numbers, at, id, n)
	}
	return nil
}

// addGPU records a GPU that is about to be in the machine. One that was out of it for so long that agents may have forgotten it may be
// offered as something else.
func (d *assignments) addGPU(gpu gpu.DeviceID, forgotten bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.known[gpu] = true
	if forgotten {
		d.forget(gpu)
		d.returned[gpu] = time.Now()
	}
}

// returning reports whether a GPU that an agent may have forgotten was added a moment ago: the other agent drops what its history has
// of it when it reads the machine.
func (d *assignments) returning(gpu gpu.DeviceID) bool {
	return time.Since(d.returned[gpu]) < d.limit
}

func (d *assignments) forget(gpu gpu.DeviceID) {
	for _, offered := range d.offered {
		delete(offered, gpu)
	}
	for _, numbers := range d.numbers {
		delete(numbers, gpu)
	}
}

// historyLost records that an agent's history is lost, and with it its faults and the bindings that only it had.
func (d *assignments) historyLost(agent string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.histories[agent]++
	clear(d.faulty[agent])
}

// agentEnded records that an agent has ended: numbers and decisions of a share that were not saved are made again.
func (d *assignments) agentEnded(agent string, numbered, decided func(gpu.DeviceID) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for gpu := range d.known {
		if !numbered(gpu) {
			d.forget(gpu)
		}
	}
	delete(d.latest, agent)
	clear(d.both)
	for _, offered := range d.offered {
		for id, before := range offered {
			if before.agent == agent && agent == forNomad && !decided(id) { // the other one has no shares
				before.history = notSaved
				offered[id] = before
			}
		}
	}
}

// bindingsLost records that both agents have lost all bindings.
func (d *assignments) bindingsLost() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bindings++
	clear(d.indices)
}

// setFaulty records that the fault of a GPU is in an agent's history.
func (d *assignments) setFaulty(agent string, gpu gpu.DeviceID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faulty[agent][gpu] = true
}

// repair records that a GPU may look repaired from now on; "" means all.
func (d *assignments) repair(gpu gpu.DeviceID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, faulty := range d.faulty {
		delete(faulty, gpu)
		if gpu == "" {
			clear(faulty)
		}
	}
}

// forgetPeriods removes the periods of other generations, when no inventory of them is outstanding.
func (d *assignments) forgetPeriods(generation int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.offered, func(p period, _ map[gpu.DeviceID]assignment) bool { return p.generation != generation })
	maps.DeleteFunc(d.numbers, func(p period, _ map[gpu.DeviceID]gpu.DeviceIndex) bool { return p.generation != generation })
}
