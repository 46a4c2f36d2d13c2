package storm

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// era is a time within which no device may change its pool or its agent, as a workload may hold it.
type era struct {
	bindings   int // counts what loses them on both sides: a state directory of another machine
	generation int // of the numbering; each order to bind anew begins another
	policy     int
}

// deal is what a device is offered as.
type deal struct {
	agent, pool string
	history     int // of the agent, when it was first offered so
}

// deals is what each agent has offered, and what must hold of it: in an era a device is in one pool of one agent, and has one
// number. It is safe for concurrent use.
type deals struct {
	mu        sync.Mutex
	bindings  int
	histories map[string]int // by agent: how often its history was replaced
	known     map[gpu.DeviceID]bool
	forgotten map[gpu.DeviceID]time.Time // GPUs that agents may have forgotten, and when each came back
	of        map[era]map[gpu.DeviceID]deal
	numbers   map[[2]int]map[gpu.DeviceID]gpu.DeviceIndex // by bindings and generation
	indices   map[string]map[gpu.DeviceID]int             // by agent: the driver's, as seen last
	sick      map[string]map[gpu.DeviceID]bool            // by agent: GPUs whose fault is in its history

	latest map[string]map[gpu.DeviceID]int // by agent: number of the policy under which each device is offered; the process runs
	both   map[gpu.DeviceID]time.Time      // devices that both offer, since when

	seen, moved int // inventories; how often the driver's index of a GPU that is offered changed
}

func newDeals() *deals {
	return &deals{
		histories: map[string]int{}, known: map[gpu.DeviceID]bool{}, forgotten: map[gpu.DeviceID]time.Time{}, of: map[era]map[gpu.DeviceID]deal{},
		numbers: map[[2]int]map[gpu.DeviceID]gpu.DeviceIndex{}, indices: map[string]map[gpu.DeviceID]int{},
		sick:   map[string]map[gpu.DeviceID]bool{forNomad: {}, forKubernetes: {}},
		latest: map[string]map[gpu.DeviceID]int{}, both: map[gpu.DeviceID]time.Time{},
	}
}

// see takes in an inventory and says what is wrong with it.
func (d *deals) see(agent string, o *offered) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen++
	if err := d.number(agent, o); err != nil {
		return err
	}
	pools := map[gpu.DeviceID]string{}
	for _, u := range o.Units {
		switch was, again := pools[u.Device]; {
		case again && was != u.Pool:
			return fmt.Errorf("%s offers %s in two pools: %s and %s", agent, u.Device, was, u.Pool)
		case !d.known[u.GPU] && o.Ready && !o.Nameless: // else the history may be that of this machine
			return fmt.Errorf("%s lists %s (%s), which never was in this machine", agent, u.Device, u.Health)
		case u.Well && d.sick[agent][u.GPU]:
			return fmt.Errorf("%s offers %s, whose fault was in its history and which nothing has repaired", agent, u.Device)
		}
		pools[u.Device] = u.Pool
		if err := d.deal(agent, o.Generation, u); err != nil {
			return err
		}
		d.follow(agent, u)
	}
	d.compare(agent, o)
	return nil
}

// compare notes which devices both agents offer now.
func (d *deals) compare(agent string, o *offered) {
	latest := map[gpu.DeviceID]int{}
	for _, u := range o.Units {
		latest[u.Device] = numberOf(u.Pool)
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

// settled is how soon the other agent follows an order to bind anew: it looks once a second.
const settled = 3 * time.Second

// contested says which device both agents offer, for longer than it takes that both follow an order.
func (d *deals) contested(slack float64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, since := range d.both {
		if lasted := time.Since(since); lasted > time.Duration(slack*float64(settled)) {
			return fmt.Errorf("both agents have offered %s for %v", id, lasted.Round(time.Millisecond))
		}
	}
	return nil
}

// deal holds what a device is offered as against what it was offered as.
func (d *deals) deal(agent string, generation int, u offeredUnit) error {
	at := era{d.bindings, generation, numberOf(u.Pool)}
	if d.of[at] == nil {
		d.of[at] = map[gpu.DeviceID]deal{}
	}
	now := deal{agent, u.Pool, d.histories[agent]}
	was, again := d.of[at][u.Device]
	switch {
	case !again || d.returning(u.GPU):
	case was.agent != agent:
		return fmt.Errorf("%s offers %s in %s, and %s has offered it in %s (%+v)", agent, u.Device, u.Pool, was.agent, was.pool, at)
	case was.pool != u.Pool && was.history == now.history:
		return fmt.Errorf("%s offers %s in %s, and has offered it in %s (%+v)", agent, u.Device, u.Pool, was.pool, at)
	}
	d.of[at][u.Device] = now
	return nil
}

// number holds the numbers of devices against those of before, whichever agent gave them.
func (d *deals) number(agent string, o *offered) error {
	at := [2]int{d.bindings, o.Generation}
	if d.numbers[at] == nil {
		d.numbers[at] = map[gpu.DeviceID]gpu.DeviceIndex{}
	}
	for id, n := range o.Numbers {
		if was, again := d.numbers[at][id]; again && was != n && d.known[id] && !d.returning(id) {
			return fmt.Errorf("%s numbers %s %v, and it was %v (%+v)", agent, id, n, was, at)
		}
		d.numbers[at][id] = n
	}
	return nil
}

// follow counts how often the driver's index of a GPU changed.
func (d *deals) follow(agent string, u offeredUnit) {
	if d.indices[agent] == nil {
		d.indices[agent] = map[gpu.DeviceID]int{}
	}
	if was, again := d.indices[agent][u.Device]; again && was != u.Index {
		d.moved++
	}
	d.indices[agent][u.Device] = u.Index
}

// plug enters a GPU that is about to be in the machine. One that was out of it for so long that agents have forgotten it may
// be offered as something else.
func (d *deals) plug(gpu gpu.DeviceID, forgotten bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.known[gpu] = true
	if forgotten {
		d.forget(gpu)
		d.forgotten[gpu] = time.Now()
	}
}

// returning reports whether a GPU came back only now that an agent may have forgotten: what the other has of it in its
// history is void when it reads the machine.
func (d *deals) returning(gpu gpu.DeviceID) bool { return time.Since(d.forgotten[gpu]) < settled }

func (d *deals) forget(gpu gpu.DeviceID) {
	for _, of := range d.of {
		delete(of, gpu)
	}
	for _, of := range d.numbers {
		delete(of, gpu)
	}
}

// lose enters that an agent's history is lost, and with it what it knew of faults and what only it has bound.
func (d *deals) lose(agent string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.histories[agent]++
	clear(d.sick[agent])
}

// die enters that an agent has ended: numbers that are not kept, and decisions of a share, are made anew.
func (d *deals) die(agent string, numbered, decided func(gpu.DeviceID) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for gpu := range d.known {
		if !numbered(gpu) {
			d.forget(gpu)
		}
	}
	delete(d.latest, agent)
	clear(d.both)
	for _, of := range d.of {
		for id, was := range of {
			if was.agent == agent && agent == forNomad && !decided(id) { // the other one has no shares
				was.history = unkept
				of[id] = was
			}
		}
	}
}

// unkept is the history of a deal that is in none.
const unkept = -1

// loseAll enters that both have lost all that was bound.
func (d *deals) loseAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bindings++
	clear(d.indices)
	for _, sick := range d.sick {
		clear(sick)
	}
}

// fail enters that the fault of a GPU is in an agent's history.
func (d *deals) fail(agent string, gpu gpu.DeviceID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sick[agent][gpu] = true
}

// repair enters that a GPU may look repaired from now on; "" means all.
func (d *deals) repair(gpu gpu.DeviceID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, sick := range d.sick {
		delete(sick, gpu)
		if gpu == "" {
			clear(sick)
		}
	}
}

// clean forgets the eras before a generation, when no inventory of one is on its way.
func (d *deals) clean(generation int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.of, func(e era, _ map[gpu.DeviceID]deal) bool { return e.generation != generation })
	maps.DeleteFunc(d.numbers, func(at [2]int, _ map[gpu.DeviceID]gpu.DeviceIndex) bool { return at[1] != generation })
}
