package ownership_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// model is a node with two agents, a kubelet, the scheduler of Kubernetes and Nomad, in steps of a second. The orchestrators see what is
// offered late, and what they have placed arrives late:
//
//	step  orchestrator sees the offer . places work on a GPU . . . . . . . the agent gives it out, or refuses . . . . the work ends
//	      (up to 10 s old)             (Nomad: in its record from here on) (up to 20 s later: in all records from here on)
type model struct {
	*rand.Rand
	now     time.Duration
	gpus    []gpu.DeviceID
	file    ownership.File // on disk
	older   ownership.File // that was there before
	devices map[string]map[gpu.DeviceID]int
	latest  int

	agents  []*modelAgent
	work    []*work
	kubelet struct{ unknownUntil time.Duration } // its record lacks pods until then
	nomad   struct{ unknownUntil time.Duration } // its agent does not answer until then

	drained        map[gpu.DeviceID]bool // no work is placed on it
	given, refused int
	late           int // orders when the file was lost or older
	names          int
	wants          uint64

	dying map[gpu.DeviceID]time.Duration // until when a proof goes on whose agent was killed
}

// modelAgent is one agent. What a kill loses is in the embedded struct.
type modelAgent struct {
	name  string
	apis  []inventory.API
	mode  inventory.API
	alive bool
	gone  time.Duration // it is not started before
	process

	prepared map[gpu.DeviceID]*work // on disk
}

type process struct {
	state     ownership.State
	memory    ownership.File
	published map[gpu.DeviceID]inventory.GPUOwner // nil = nothing is published so far
	since     map[gpu.DeviceID]time.Duration      // of the published assignment
	refused   map[gpu.DeviceID]bool               // because the other agent recorded it before
	reserved  map[gpu.DeviceID]time.Duration
	proofs    map[gpu.DeviceID]*proof
}

// proof is what an agent takes a GPU for.
type proof struct {
	ownership.Want
	granted, back bool
	ends          time.Duration // it is given up, or ends
}

// work is a pod, a pod with a claim, or an allocation.
type work struct {
	name    string
	api     inventory.API
	on      gpu.DeviceID
	arrives time.Duration // at the agent
	ends    time.Duration
	holds   bool
}

// want is that a process wants a GPU.
func (m *model) want(p inventory.Purpose) ownership.Want {
	m.wants++
	return ownership.Want{Purpose: p, Number: m.wants}
}

func newModel(seed uint64, gpus int) *model {
	m := &model{Rand: rand.New(rand.NewPCG(seed, 1)), devices: map[string]map[gpu.DeviceID]int{"k8s-gpu": {}, "nomad-gpu": {}}, drained: map[gpu.DeviceID]bool{}, dying: map[gpu.DeviceID]time.Duration{}}
	for i := range gpus {
		m.gpus = append(m.gpus, gpu.DeviceID(fmt.Sprintf("GPU-%d", i)))
	}
	m.agents = []*modelAgent{
		{name: "k8s-gpu", apis: []inventory.API{inventory.DevicePlugin, inventory.DRA}, mode: inventory.DevicePlugin, alive: true, prepared: map[gpu.DeviceID]*work{}},
		{name: "nomad-gpu", apis: []inventory.API{inventory.Nomad}, mode: inventory.Nomad, alive: true},
	}
	return m
}

// clock is the time by the clock of the node.
func (m *model) clock() time.Time { return time.Unix(1_800_000_000, 0).Add(m.now) }

// record is that of the work that has GPUs through an API, with what the agent alone knows.
func (m *model) record(a *modelAgent, api inventory.API) holders.Record {
	h := holders.Record{Complete: true, Missing: "unknown"}
	recorded := func(w *work) bool { return w.holds && m.now >= m.kubelet.unknownUntil }
	if api == inventory.Nomad {
		h.Complete = m.now >= m.nomad.unknownUntil
		recorded = func(*work) bool { return m.now >= m.nomad.unknownUntil }
	} else {
		h.Complete = m.now >= m.kubelet.unknownUntil
	}
	for _, w := range m.work {
		if w.api == api && (recorded(w) || a.prepared[w.on] == w) {
			h.Holders = append(h.Holders, holders.Holder{Work: holders.Work{Name: w.name}, Device: w.on, At: gpu.WholeGPU(w.on)})
		}
	}
	return h
}

// tick is one pass of an agent: read, decide, write, publish. With crash it is killed between the writing and the publishing.
func (m *model) tick(a *modelAgent, crash bool) {
	read := m.file.Restore(a.name, a.memory)
	records := ownership.Records{}
	for _, api := range a.apis {
		records[api] = func() holders.Record { return m.record(a, api) }
	}
	takes := map[gpu.DeviceID]ownership.Want{}
	for id, p := range a.proofs {
		takes[id] = p.Want
	}
	state, file, all := ownership.Next(a.state, ownership.Input{
		Now: m.now, Takes: takes, Agent: a.name, APIs: a.apis, Default: a.mode, GPUs: m.gpus, File: read, Records: records,
		Running: func(agent string) bool {
			return slices.ContainsFunc(m.agents, func(o *modelAgent) bool { return o.name == agent && o.alive })
		},
		Overlaps:      func(id gpu.DeviceID) []ownership.Overlap { return m.overlaps(a, id) },
		Recorded:      func(id gpu.DeviceID) bool { return m.devices[a.name][id] > 0 },
		OfferedBefore: func(id gpu.DeviceID) bool { return m.devices[a.name][id] > 0 },
		Applied: func(id gpu.DeviceID) (inventory.GPUOwner, bool) {
			one, ok := a.published[id]
			return one, ok
		},
		Reserved: func(id gpu.DeviceID) (time.Duration, bool) {
			at, ok := a.reserved[id]
			return at, ok
		},
	})
	m.file = file
	if crash {
		m.kill(a)
		return
	}
	a.state, a.memory = state, file
	m.publish(a, all)
}

// publish is what the monitor and the files of the agents do with the assignments.
func (m *model) publish(a *modelAgent, all []ownership.Status) {
	was, since := a.published, a.since
	a.published, a.since, a.refused = map[gpu.DeviceID]inventory.GPUOwner{}, map[gpu.DeviceID]time.Duration{}, map[gpu.DeviceID]bool{}
	for _, st := range all {
		a.published[st.GPU] = st.GPUOwner
	}
	for _, id := range m.gpus {
		one, ok := a.published[id]
		if !ok {
			one = inventory.GPUOwner{GPU: id, API: a.mode, Local: true}
			a.published[id] = one
		}
		_, explicit := a.memory.GPUs[id]
		older := slices.ContainsFunc(m.overlaps(a, id), func(c ownership.Overlap) bool { return c.Earlier })
		a.refused[id] = !explicit && older // overlap = refuse
		a.since[id] = m.now
		if one == was[id] {
			a.since[id] = since[id]
		}
		mine := m.devices[a.name]
		switch {
		case !one.Local || a.refused[id]:
			delete(mine, id)
		case mine[id] == 0:
			m.latest++
			mine[id] = m.latest
		}
	}
}

func (m *model) overlaps(a *modelAgent, id gpu.DeviceID) (all []ownership.Overlap) {
	mine := m.devices[a.name][id]
	for _, o := range m.agents {
		if order := m.devices[o.name][id]; o != a && order > 0 {
			all = append(all, ownership.Overlap{Agent: o.name, Running: o.alive, Earlier: mine == 0 || order < mine})
		}
	}
	return all
}

// kill ends an agent. Its proofs end with it, but not at once.
func (m *model) kill(a *modelAgent) {
	for id, p := range a.proofs {
		if p.granted {
			m.dying[id] = m.now + 2*time.Second
		}
	}
	a.alive, a.process = false, process{}
}

// place has an orchestrator place work on a GPU that it believes to be free, by an offer that may be ten seconds old.
func (m *model) place() {
	a := m.agents[m.IntN(2)]
	api := a.apis[m.IntN(len(a.apis))]
	id := m.gpus[m.IntN(len(m.gpus))]
	one, ok := a.published[id]
	late := m.now-a.since[id] < time.Duration(m.IntN(11))*time.Second
	if ok && !late && (!one.Local || one.API != api || one.Pending != "" || one.Taken != "") {
		return
	}
	if m.drained[id] || slices.ContainsFunc(m.work, func(w *work) bool { return w.on == id && w.api == api }) {
		return // its own records
	}
	m.names++
	arrives := m.now + time.Duration(m.IntN(21))*time.Second
	m.work = append(m.work, &work{
		name: fmt.Sprintf("%s-%d", api, m.names), api: api, on: id, arrives: arrives, ends: arrives + time.Duration(1+m.IntN(60))*time.Second,
	})
}

// arrive has the agents answer what arrives, and ends work.
func (m *model) arrive() {
	m.work = slices.DeleteFunc(m.work, func(w *work) bool {
		a := m.agents[0]
		if w.api == inventory.Nomad {
			a = m.agents[1]
		}
		switch {
		case w.holds && m.now >= w.ends:
			if a.prepared[w.on] == w {
				delete(a.prepared, w.on)
			}
			return true
		case w.holds || m.now < w.arrives:
			return false
		case !a.alive:
			return m.now >= w.ends
		}
		return !m.give(a, w)
	})
}

// give is Allocate, Prepare and Reserve: it refuses what is not offered through that API, and what another API of the process has given
// out. Prepare accepts a device that moves, as its claim was allocated before.
func (m *model) give(a *modelAgent, w *work) bool {
	one := a.published[w.on]
	ok := one.Local && one.API == w.api && one.Taken == "" && !a.refused[w.on] && (one.Pending == "" || w.api == inventory.DRA && one.Draining)
	for _, other := range a.apis {
		ok = ok && (other == w.api || len(m.record(a, other).On(w.on)) == 0)
	}
	if !ok {
		m.refused++
		return false
	}
	w.holds, a.reserved[w.on] = true, m.now
	m.given++
	if w.api == inventory.DRA {
		a.prepared[w.on] = w
	}
	return true
}

// twoHolders returns the work that has one GPU through two APIs, or while it is proved, and two proofs of one GPU.
func (m *model) twoHolders() string {
	first := map[gpu.DeviceID]*work{}
	for _, w := range m.work {
		if !w.holds {
			continue
		}
		if o := first[w.on]; o != nil {
			return fmt.Sprintf("%v: %s is held by %s and by %s", m.now, w.on, o.name, w.name)
		}
		first[w.on] = w
	}
	proved := map[gpu.DeviceID]string{}
	for _, a := range m.agents {
		for id, p := range a.proofs {
			if p.granted && (first[id] != nil || proved[id] != "") {
				return fmt.Sprintf("%v: %s is proved by %s, held by %+v, proved by %q", m.now, id, a.name, first[id], proved[id])
			}
			if p.granted {
				proved[id] = a.name
			}
		}
	}
	for id, until := range m.dying {
		if m.now < until && (first[id] != nil || proved[id] != "") {
			return fmt.Sprintf("%v: %s is held by %+v or proved by %q before the proof of a killed agent has ended", m.now, id, first[id], proved[id])
		}
	}
	return ""
}
