package ownership_test

import (
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

var (
	moves = flag.Int("moves", 10_000, "moves of GPUs in TestMoves")
	seed  = flag.Uint64("seed", 1, "of TestMoves")
)

// move is a requested move of a GPU.
type move struct {
	to    inventory.API
	began time.Duration
	epoch uint64 // of the entry when it was requested
	again bool   // it replaces a move that was not completed
	force bool
}

// atMost is how long a move may take while work comes and goes and everything dies: each piece of work ends within 80 s, and an agent
// or a record is away for at most two minutes at a time.
const atMost = 40 * time.Minute

// GPUs move between the three APIs under churn of pods, claims and allocations, while agents are killed at any step, the kubelet and the
// Nomad agent restart, and the directory of the agents is wiped. No GPU ever has two holders, each move completes, also if its target is
// set when the file is lost or older, and an owner changes only when a move was requested. Some are forced after the GPU was drained, half of
// these from an agent that does not run: force has no effect on what is placed on the GPU later.
func TestMoves(t *testing.T) {
	m := newModel(*seed, 8)
	pending, requested, completed, replaced, forced := map[gpu.DeviceID]move{}, 0, 0, 0, 0
	var longest time.Duration
	for completed < *moves {
		m.now += time.Second
		m.disturb()
		if requested < *moves {
			id := m.gpus[m.IntN(len(m.gpus))]
			_, moving := pending[id]
			e, to := m.known().GPUs[id], ownership.APIs()[m.IntN(3)]
			switch {
			case e.Target == to || m.drained[id] || moving && m.IntN(100) > 0:
			case !moving && m.IntN(10) == 0:
				m.drained[id] = true
			default:
				if moving {
					replaced++
				} else {
					requested++
				}
				pending[id] = move{to: to, began: m.now, epoch: e.Epoch, again: moving}
				m.setTarget(ownership.TargetChange{GPU: id, Target: to})
			}
		}
		for _, id := range m.gpus {
			if _, moving := pending[id]; m.drained[id] && !moving && !m.works(id) {
				e := m.known().GPUs[id]
				to := ownership.APIs()[m.IntN(3)]
				pending[id] = move{to: to, began: m.now, epoch: e.Epoch, again: true, force: true}
				requested++
				if a := m.agentOf(e.Owner); a != nil && ownership.AgentOf(to) != a.name && m.IntN(2) == 0 {
					m.kill(a)
					a.gone = m.now + 3*time.Minute
				}
				m.setTarget(ownership.TargetChange{GPU: id, Target: to, Force: true})
			}
		}
		for _, a := range m.agents {
			if a.alive && m.IntN(3) > 0 {
				m.tick(a, m.IntN(500) == 0)
			}
		}
		for range 2 + m.IntN(6) {
			m.place()
		}
		m.arrive()
		if two := m.twoHolders(); two != "" {
			t.Fatalf("seed %d: %s", *seed, two)
		}
		for id, mv := range pending {
			e := m.file.GPUs[id]
			switch took := m.now - mv.began; {
			case e.Owner == mv.to && m.offered(id) == mv.to:
				// One change for the move, and one at the first, by which an agent records that it has the GPU.
				if changes := e.Epoch - mv.epoch; changes > 2 || mv.epoch > 0 && changes != 1 && !mv.again {
					t.Fatalf("seed %d: %s changed its owner %d times on its way to %s", *seed, id, changes, mv.to)
				}
				delete(pending, id)
				completed++
				if mv.force {
					forced++
					delete(m.drained, id)
				}
				longest = max(longest, took)
			case took > atMost:
				t.Fatalf("seed %d: %v: %s does not come to %s: %+v, k8s-gpu %+v, nomad-gpu %+v", *seed, m.now, id, mv.to, e, m.agents[0].published[id], m.agents[1].published[id])
			}
		}
	}
	if m.given < *moves/10 || m.refused == 0 {
		t.Errorf("little happened: %d times given out, %d times refused", m.given, m.refused)
	}
	if m.late < *moves/100 || replaced < *moves/100 {
		t.Errorf("%d targets were set when the file was lost or older, %d before the GPU was at the former one", m.late, replaced)
	}
	if forced < *moves/100 {
		t.Errorf("%d moves were forced", forced)
	}
	t.Logf("%d moves, %d of them forced, in %v of the model, the longest took %v; %d targets were replaced, %d set when the file was lost or older; %d times given out, %d times refused",
		completed, forced, m.now, longest, replaced, m.late, m.given, m.refused)
}

// offered returns the API through which a GPU takes work; "" if none, and also if there are several.
func (m *model) offered(id gpu.DeviceID) (through inventory.API) {
	for _, a := range m.agents {
		if one, ok := a.published[id]; ok && one.Local && one.Pending == "" && one.Taken == "" {
			if through != "" {
				return ""
			}
			through = one.API
		}
	}
	return through
}

// setTarget sets the target of a GPU, as the command does: in what is on disk, which may be lost or older by then. Then it wakes the agents.
func (m *model) setTarget(c ownership.TargetChange) {
	if m.remembered() && m.IntN(20) == 0 {
		m.late++
		m.loseFile()
	}
	if m.IntN(50) == 0 {
		m.older = m.file
	}
	if m.IntN(10) == 0 { // another one at the same time, just before
		other := ownership.TargetChange{GPU: c.GPU, Target: ownership.APIs()[m.IntN(3)]}
		m.file = m.file.WithTargets([]ownership.TargetChange{other}, m.clock())
	}
	m.file = m.file.WithTargets([]ownership.TargetChange{c}, m.clock())
	first := m.IntN(2)
	for _, a := range []*modelAgent{m.agents[first], m.agents[1-first]} {
		if a.alive {
			m.tick(a, m.IntN(20) == 0)
		}
	}
}

// works reports whether there is work on a GPU, or on its way to it.
func (m *model) works(id gpu.DeviceID) bool {
	return slices.ContainsFunc(m.work, func(w *work) bool { return w.on == id })
}

// agentOf is the agent that offers devices through an API; nil for none.
func (m *model) agentOf(a inventory.API) *modelAgent {
	if i := slices.IndexFunc(m.agents, func(o *modelAgent) bool { return o.name == ownership.AgentOf(a) }); i >= 0 {
		return m.agents[i]
	}
	return nil
}

// known is what the file has or an agent remembers.
func (m *model) known() ownership.File {
	f := m.file
	for _, a := range m.agents {
		f = f.Restore(a.name, a.memory)
	}
	return f
}

// loseFile has no file on disk, or an older one.
func (m *model) loseFile() {
	if m.file = m.older; m.IntN(2) == 0 {
		m.file = ownership.File{}
	}
}

// remembered reports whether both agents run and have read the file.
func (m *model) remembered() bool {
	return m.agents[0].alive && m.agents[1].alive && m.agents[0].published != nil && m.agents[1].published != nil
}

// disturb kills, restarts and wipes at random.
func (m *model) disturb() {
	for _, a := range m.agents {
		switch {
		case !a.alive && m.now >= a.gone && m.IntN(10) == 0:
			a.alive, a.process = true, process{reserved: map[gpu.DeviceID]time.Duration{}, proofs: map[gpu.DeviceID]*proof{}}
		case a.alive && m.IntN(200) == 0:
			m.kill(a)
		}
		if a.reserved == nil && a.alive {
			a.reserved, a.proofs = map[gpu.DeviceID]time.Duration{}, map[gpu.DeviceID]*proof{}
		}
	}
	switch m.IntN(600) {
	case 0: // the kubelet restarts; for two minutes its record may lack pods
		m.kubelet.unknownUntil = m.now + 2*time.Minute
	case 1:
		m.nomad.unknownUntil = m.now + time.Duration(m.IntN(60))*time.Second
	case 2: // an event wakes each agent that runs, which restores what it remembers; without one that does, nothing is known of Nomad
		if m.remembered() {
			m.file, m.devices = ownership.File{}, map[string]map[gpu.DeviceID]int{"k8s-gpu": {}, "nomad-gpu": {}}
			m.agents[0].prepared = map[gpu.DeviceID]*work{}
			first := m.IntN(2)
			m.tick(m.agents[first], false)
			m.tick(m.agents[1-first], false)
		}
	case 4: // the file alone, without an event: each agent finds that later
		if m.remembered() {
			m.loseFile()
		}
	case 3: // the mode of the node changes: another run of k8s-gpu, in the same or another process
		a := m.agents[0]
		a.mode = a.apis[m.IntN(2)]
		m.kill(a)
	}
}
