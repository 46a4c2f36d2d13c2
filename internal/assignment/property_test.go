package assignment_test

import (
	"flag"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

var (
	moves = flag.Int("moves", 10_000, "moves of GPUs in TestMoves")
	seed  = flag.Uint64("seed", 1, "of TestMoves")
)

// move is a requested move of a GPU.
type move struct {
	to    inventory.API
	began time.Duration
	turn  uint64 // of the entry when it was requested
}

// atMost is how long a move may take while work comes and goes and everything dies: each piece of work ends within 80 s, and an agent
// or a record is away for at most two minutes at a time.
const atMost = 40 * time.Minute

// GPUs move between the three APIs under churn of pods, claims and allocations, while agents are killed at any step, the kubelet and the
// Nomad agent restart, and the directory of the agents is wiped. No GPU ever has two holders, each move completes, and a side changes
// only when a move was requested.
func TestMoves(t *testing.T) {
	m := newModel(*seed, 8)
	pending, requested, completed := map[gpu.DeviceID]move{}, 0, 0
	var longest time.Duration
	for completed < *moves {
		m.now += time.Second
		m.disturb()
		if requested < *moves {
			id := m.gpus[m.IntN(len(m.gpus))]
			if _, moving := pending[id]; !moving {
				to := assignment.APIs()[m.IntN(3)]
				if e := m.file.GPUs[id]; e.Target != to {
					pending[id] = move{to, m.now, e.Turn}
					m.file = m.file.WithTargets([]assignment.Change{{GPU: id, Target: to}})
					requested++
					for _, a := range m.agents { // the command wakes them
						if a.alive {
							m.tick(a, m.IntN(20) == 0)
						}
					}
				}
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
			case e.Side == mv.to && m.offered(id) == mv.to:
				// One change for the move, and one at the first, by which an agent records that it has the GPU.
				if changes := e.Turn - mv.turn; changes > 2 || mv.turn > 0 && changes != 1 {
					t.Fatalf("seed %d: %s changed its side %d times on its way to %s", *seed, id, changes, mv.to)
				}
				delete(pending, id)
				completed++
				longest = max(longest, took)
			case took > atMost:
				t.Fatalf("seed %d: %v: %s does not come to %s: %+v, k8s-gpu %+v, nomad-gpu %+v", *seed, m.now, id, mv.to, e, m.agents[0].published[id], m.agents[1].published[id])
			}
		}
	}
	if m.given < *moves/10 || m.refused == 0 {
		t.Errorf("little happened: %d times given out, %d times refused", m.given, m.refused)
	}
	t.Logf("%d moves in %v of the model, the longest took %v; %d times given out, %d times refused", completed, m.now, longest, m.given, m.refused)
}

// offered returns the API through which a GPU takes work; "" if none, and also if there are several.
func (m *model) offered(id gpu.DeviceID) (through inventory.API) {
	for _, a := range m.agents {
		if one, ok := a.published[id]; ok && one.Here && one.Moving == "" {
			if through != "" {
				return ""
			}
			through = one.API
		}
	}
	return through
}

// disturb kills, restarts and wipes at random.
func (m *model) disturb() {
	for _, a := range m.agents {
		switch {
		case !a.alive && m.IntN(10) == 0:
			a.alive, a.process = true, process{reserved: map[gpu.DeviceID]time.Duration{}}
		case a.alive && m.IntN(200) == 0:
			m.kill(a)
		}
		if a.reserved == nil && a.alive {
			a.reserved = map[gpu.DeviceID]time.Duration{}
		}
	}
	switch m.IntN(600) {
	case 0: // the kubelet restarts; for two minutes its record may lack pods
		m.kubelet.unknownUntil = m.now + 2*time.Minute
	case 1:
		m.nomad.unknownUntil = m.now + time.Duration(m.IntN(60))*time.Second
	case 2: // an event wakes each agent that runs, which restores what it remembers; without one that does, nothing is known of Nomad
		if m.agents[0].alive && m.agents[1].alive && m.agents[0].published != nil && m.agents[1].published != nil {
			m.file, m.claims = assignment.File{}, map[string]map[gpu.DeviceID]int{"k8s-gpu": {}, "nomad-gpu": {}}
			m.agents[0].prepared = map[gpu.DeviceID]*work{}
			first := m.IntN(2)
			m.tick(m.agents[first], false)
			m.tick(m.agents[1-first], false)
		}
	case 3: // the mode of the node changes: another run of k8s-gpu, in the same or another process
		a := m.agents[0]
		a.mode = a.apis[m.IntN(2)]
		m.kill(a)
	}
}
