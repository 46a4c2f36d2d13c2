package ownership_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// proofsSeen counts what happened in TestTakes. released are the seconds for which agents had the driver released, for the reset that they or another made.
type proofsSeen struct{ granted, ended, givenUp, back, killed, resets, released, byOther int }

// prove has the agents that run want GPUs for proofs and resets, and these begin, go on and end.
func (m *model) prove(seen *proofsSeen, wants bool) {
	for _, a := range m.agents {
		if !a.alive {
			continue
		}
		if id := m.gpus[m.IntN(len(m.gpus))]; wants && a.proofs[id] == nil && m.IntN(4) == 0 {
			p := []inventory.Purpose{inventory.Proof, inventory.Reset}[m.IntN(2)]
			a.proofs[id] = &proof{Want: m.want(p), ends: m.now + time.Duration(20+m.IntN(300))*time.Second}
		}
		for _, id := range slices.Sorted(maps.Keys(a.proofs)) {
			p, is := a.proofs[id], a.state.Take(id)
			switch {
			case is.Number != p.Number: // of one before
			case is.Granted && !p.granted:
				p.granted, p.ends = true, m.now+time.Duration(1+m.IntN(70))*time.Second
				seen.granted++
				if p.Purpose == inventory.Reset {
					seen.resets++
				}
			case is.Back != "" && !p.back: // it is cancelled within three seconds, unless it can't be ended
				p.back, p.ends = true, m.now+time.Duration(m.IntN(4)*(1+30*m.IntN(2)))*time.Second
				seen.back++
			}
			if p.granted && m.IntN(5) == 0 {
				p.ReleaseDriver = !p.ReleaseDriver && m.IntN(3) > 0 // also in a proof, in which it has no effect
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

// oneResets returns two agents that reset GPUs at a time.
func (m *model) oneResets() string {
	by := ""
	for _, a := range m.agents {
		for id, p := range a.proofs {
			if p.granted && p.Purpose == inventory.Reset {
				if by != "" && by != a.name {
					return fmt.Sprintf("%v: %s and %s (%s) reset GPUs", m.now, by, a.name, id)
				}
				by = a.name
			}
		}
	}
	return ""
}

// released returns an agent that has the driver released without a mark on disk, or for one who does not ask for it.
func (m *model) released(a *modelAgent, seen *proofsSeen) string {
	id := a.state.DriverReleased()
	if id == "" {
		return ""
	}
	mark := m.file.Taken[id]
	p, by := a.proofs[id], m.named(mark.Agent)
	if mark.Agent == a.name && p != nil && p.granted && p.ReleaseDriver || mark.Agent != a.name && by != nil && by.alive {
		if seen.released++; mark.Agent != a.name {
			seen.byOther++
		}
		if mark.DriverReleased && mark.Purpose == inventory.Reset {
			return ""
		}
	}
	return fmt.Sprintf("%v: %s has the driver released for %s: the file has %+v, its take is %+v", m.now, a.name, id, mark, p)
}

// GPUs are taken for proofs and resets by both agents, while they move between the three APIs, work comes and goes, agents are killed at any step and
// the file of the node is lost or replaced by an older one. Never do two of a pod, a claim, an allocation, a proof and a reset have one GPU, and no GPU stays
// taken without a live taker. (Case 23.) One agent resets GPUs at a time, and the driver is only released with a mark on disk.
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
				if m.tick(a, busy && m.IntN(500) == 0); a.alive {
					if wrong := m.released(a, &seen); wrong != "" {
						t.Fatalf("seed %d: %s", *seed, wrong)
					}
				}
			}
		}
		if busy && m.IntN(3) == 0 {
			m.place()
		}
		m.arrive()
		m.prove(&seen, busy)
		if two := cmp.Or(m.twoHolders(), m.oneResets()); two != "" {
			t.Fatalf("seed %d: %s", *seed, two)
		}
		for _, id := range m.gpus {
			mark, marked := m.file.Taken[id]
			if a := m.named(mark.Agent); !marked || !a.alive || a.proofs[id] != nil {
				stale[id] = 0
			} else if stale[id]++; stale[id] > 60 && (mark.Purpose != inventory.Reset || stale[id] > 400) {
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
	for _, a := range m.agents {
		if id := a.state.DriverReleased(); id != "" {
			t.Errorf("seed %d: at the end %s has the driver released for %s", *seed, a.name, id)
		}
	}
	if seen.resets < *moves/20 || seen.released < *moves/100 || seen.byOther < *moves/200 {
		t.Errorf("few resets: %+v", seen)
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
