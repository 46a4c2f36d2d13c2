package ownership_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// proofsSeen counts what happened in TestTakes.
type proofsSeen struct{ granted, ended, givenUp, back, killed int }

// prove has the agents that run want GPUs for proofs, and proofs begin, go on and end.
func (m *model) prove(seen *proofsSeen, wants bool) {
	for _, a := range m.agents {
		if !a.alive {
			continue
		}
		if id := m.gpus[m.IntN(len(m.gpus))]; wants && a.proofs[id] == nil && m.IntN(4) == 0 {
			a.proofs[id] = &proof{ends: m.now + time.Duration(20+m.IntN(300))*time.Second}
		}
		for _, id := range slices.Sorted(maps.Keys(a.proofs)) {
			p, is := a.proofs[id], a.state.Take(id)
			switch {
			case is.Granted && !p.granted:
				p.granted, p.ends = true, m.now+time.Duration(1+m.IntN(70))*time.Second
				seen.granted++
			case is.Back != "" && !p.back: // it is cancelled within three seconds, unless it can't be ended
				p.back, p.ends = true, m.now+time.Duration(m.IntN(4)*(1+30*m.IntN(2)))*time.Second
				seen.back++
			}
			if m.now >= p.ends {
				if p.granted {
					seen.ended++
				} else {
					seen.givenUp++
				}
				delete(a.proofs, id)
			}
		}
	}
}

// GPUs are taken for proofs by both agents, while they move between the three APIs, work comes and goes, agents are killed at any step and
// the file of the node is lost or replaced by an older one. Never do two of a pod, a claim, an allocation and a proof have one GPU, and no GPU stays
// taken without a live taker. (Case 23.)
func TestTakes(t *testing.T) {
	m, seen := newModel(*seed, 8), proofsSeen{}
	stale := map[gpu.DeviceID]int{} // seconds for which a mark has had no taker, though its agent runs
	step := func(busy bool) {
		m.now += time.Second
		if busy {
			before := m.proved()
			m.disturb()
			if id := m.gpus[m.IntN(len(m.gpus))]; m.IntN(60) == 0 {
				m.setTarget(ownership.TargetChange{GPU: id, Target: ownership.APIs()[m.IntN(3)]})
			}
			seen.killed += max(before-m.proved(), 0)
		}
		for _, a := range m.agents {
			if a.alive && m.IntN(3) > 0 {
				m.tick(a, busy && m.IntN(500) == 0)
			}
		}
		if busy && m.IntN(3) == 0 {
			m.place()
		}
		m.arrive()
		m.prove(&seen, busy)
		if two := m.twoHolders(); two != "" {
			t.Fatalf("seed %d: %s", *seed, two)
		}
		for _, id := range m.gpus {
			mark, marked := m.file.Taken[id]
			if a := m.named(mark.Agent); !marked || !a.alive || a.proofs[id] != nil {
				stale[id] = 0
			} else if stale[id]++; stale[id] > 60 {
				t.Fatalf("seed %d: %v: %s stays taken by %s without a taker", *seed, m.now, id, mark.Agent)
			}
		}
	}
	for seen.granted < *moves/4 {
		step(true)
	}
	for _, a := range m.agents {
		a.gone = 0
		if !a.alive {
			a.alive, a.process = true, process{reserved: map[gpu.DeviceID]time.Duration{}, proofs: map[gpu.DeviceID]*proof{}}
		}
	}
	for range 1000 {
		step(false)
	}
	for _, id := range m.gpus {
		if _, taken := m.file.Taken[id]; taken || m.offered(id) == "" {
			t.Errorf("seed %d: at the end %s is taken: %t, and is offered through %q", *seed, id, taken, m.offered(id))
		}
	}
	if seen.back < 50 || seen.killed < 10 || seen.givenUp < 50 || m.given < *moves/10 || m.refused == 0 {
		t.Errorf("little happened: %+v, %d times given out, %d times refused", seen, m.given, m.refused)
	}
	t.Logf("%+v in %v of the model; %d times given out, %d times refused", seen, m.now, m.given, m.refused)
}

// proved counts the GPUs that are proved.
func (m *model) proved() (n int) {
	for _, a := range m.agents {
		for _, p := range a.proofs {
			if p.granted {
				n++
			}
		}
	}
	return n
}

// named is an agent by its name; nil for none.
func (m *model) named(name string) *modelAgent {
	if i := slices.IndexFunc(m.agents, func(a *modelAgent) bool { return a.name == name }); i >= 0 {
		return m.agents[i]
	}
	return nil
}
