package hostwatch

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// owners reads the claims under the lock and fails if hardware has two owners.
func owners(t *testing.T, folder string) map[string][]gpu.Placement {
	unlock, err := lockFolder(t.Context(), folder)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer unlock()
	_, all, err := (&claimStore{folder: folder, boot: "b00t", log: slog.New(slog.DiscardHandler)}).read()
	if err != nil {
		t.Error(err)
	}
	found := map[string][]gpu.Placement{}
	for i, a := range all {
		found[a.agent] = placements(a.claims)
		for _, b := range all[:i] {
			for _, c := range a.claims {
				for _, d := range b.claims {
					if c.at.Overlaps(d.at) {
						t.Errorf("two owners: %s has %v, %s has %v", a.agent, c.at, b.agent, d.at)
					}
				}
			}
		}
	}
	return found
}

// some are random GPUs and MIG instances of eight GPUs, of which two are sometimes partitioned.
func some(random *rand.Rand) (at []gpu.Placement) {
	for n := range 8 {
		switch {
		case random.IntN(2) == 0:
		case n >= 6 && random.IntN(2) == 0:
			at = append(at, instance(n, uint32(random.IntN(3))))
		default:
			at = append(at, whole(n))
		}
	}
	return at
}

// Two agents change their claims concurrently, 500 times each: with refuse no hardware ever has two owners, and each agent knows
// which claims it has.
func TestNeverTwoOwners(t *testing.T) {
	folder := t.TempDir()
	var agents sync.WaitGroup
	for seed, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		r, _ := newStore(t, folder, agent, true)
		agents.Go(func() {
			random := rand.New(rand.NewPCG(uint64(seed), 5))
			for range 500 {
				wanted := some(random)
				v, err := r.update(t.Context(), want(wanted...))
				if err != nil {
					t.Error(err)
					return
				}
				mine := owners(t, folder)[agent]
				for _, p := range wanted {
					lost := slices.ContainsFunc(v.claims, func(c inventory.Claim) bool { return c.Older && c.At.Overlaps(p) })
					if has := slices.Contains(mine, p); has == lost {
						t.Errorf("%s and %v: claimed %v, another's %v", agent, p, has, lost)
					}
				}
			}
		})
	}
	agents.Wait()
}

// Agents that start at the same time agree on which was first.
func TestSimultaneousStart(t *testing.T) {
	for n := range 50 {
		folder := filepath.Join(t.TempDir(), "claims") // which does not exist yet
		var agents sync.WaitGroup
		start := make(chan struct{})
		views := make([]view, 3)
		for i := range views {
			r, _ := newStore(t, folder, fmt.Sprintf("agent-%d", i), true)
			agents.Go(func() {
				<-start
				v, err := r.update(t.Context(), want(whole(n%8)))
				if err != nil {
					t.Error(err)
				}
				views[i] = v
			})
		}
		close(start)
		agents.Wait()
		found := owners(t, folder)
		for i, v := range views {
			owns := len(found[fmt.Sprintf("agent-%d", i)]) == 1
			if lost := slices.ContainsFunc(v.claims, func(c inventory.Claim) bool { return c.Older }); owns == lost {
				t.Errorf("agent-%d: owner %v, though it sees %v", i, owns, v.claims)
			}
		}
		if len(slices.Concat(found["agent-0"], found["agent-1"], found["agent-2"])) != 1 {
			t.Errorf("owners: %v", found)
		}
	}
}
