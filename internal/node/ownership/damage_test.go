package ownership

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// damagedHost is a node whose agents end and start, and whose files are damaged, all at random.
type damagedHost struct {
	*rand.Rand
	t      *testing.T
	folder string
	agents []*damagedAgent
	log    []string
}

type damagedAgent struct {
	name   string
	store  *store // nil = it does not run
	ready  bool   // this process has read its GPUs
	wanted []gpu.Placement
	has    []gpu.Placement // what it offers, or has offered and still wants: work may have it, whether the agent runs or not
	good   []byte          // its file before it was damaged; nil = it is not
}

func (h *damagedHost) note(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

func (h *damagedHost) path(a *damagedAgent) string { return filepath.Join(h.folder, a.name+".json") }

// step is one event, and then perhaps a check of each agent that runs.
func (h *damagedHost) step() {
	a := h.agents[h.IntN(2)]
	switch n := h.IntN(20); {
	case n < 3 && a.store == nil:
		h.note("%s starts", a.name)
		a.store, a.ready = &store{folder: h.folder, agent: a.name, boot: "b00t", refuse: true, started: now, log: slog.New(slog.DiscardHandler)}, false
	case n < 3:
		h.note("%s ends", a.name)
		a.store.close()
		a.store = nil
	case n < 6:
		h.damage(a)
	case n < 8:
		h.repair(a)
	case n < 9:
		a.wanted = some(h.Rand)
		h.note("%s wants %v", a.name, a.wanted)
	}
	for _, a := range h.agents {
		if a.store != nil && h.IntN(3) > 0 {
			h.check(a)
		}
	}
}

// damage makes a file unusable.
func (h *damagedHost) damage(a *damagedAgent) {
	good, err := os.ReadFile(h.path(a))
	if err != nil || a.good != nil {
		return
	}
	names := []string{"not JSON", "empty", "a later version", "no regular file"}
	name := names[h.IntN(len(names))]
	h.note("the file of %s is damaged: %s", a.name, name)
	a.good = good
	check.NoError(h.t, os.Remove(h.path(a)))
	check.NoError(h.t, damages[name](h.path(a)))
}

// repair puts a file back that its agent has not written again.
func (h *damagedHost) repair(a *damagedAgent) {
	if a.good == nil {
		return
	}
	if text, err := os.ReadFile(h.path(a)); err == nil && strings.Contains(string(text), `"version": 2`) {
		a.good = nil
		return
	}
	h.note("the file of %s is back", a.name)
	check.NoError(h.t, os.RemoveAll(h.path(a)))
	check.NoError(h.t, os.WriteFile(h.path(a), a.good, 0o600))
	a.good = nil
}

// check is a check of the files by an agent, and what the core makes of it. The first one of a process is before it has read its GPUs.
func (h *damagedHost) check(a *damagedAgent) {
	o := want(a.wanted...)
	if !a.ready {
		o = localDevices{unsure: func(gpu.Placement) bool { return true }}
	}
	v, _ := a.store.update(h.t.Context(), o)
	if !a.ready {
		a.ready = true
		return
	}
	if text, err := os.ReadFile(h.path(a)); err == nil && strings.Contains(string(text), `"version": 2`) {
		a.good = nil
	}
	a.has = slices.DeleteFunc(a.has, func(p gpu.Placement) bool { return !slices.Contains(a.wanted, p) })
	for _, p := range a.wanted {
		older := slices.ContainsFunc(v.overlaps, func(c inventory.PeerDevice) bool { return c.Earlier && c.At.Overlaps(p) })
		covered := slices.ContainsFunc(v.own.At, func(at gpu.Placement) bool { return at.Covers(p) })
		if older || v.own.Reason != "" && !covered || slices.Contains(a.has, p) {
			continue
		}
		a.has = append(a.has, p)
		h.note("%s offers %v", a.name, p)
	}
	for _, p := range h.agents[0].has {
		for _, q := range h.agents[1].has {
			if p.Overlaps(q) {
				h.t.Fatalf("%v has two owners:\n%s", p, strings.Join(h.log[max(len(h.log)-40, 0):], "\n"))
			}
		}
	}
}

// With refuse no hardware has two owners while agents end and start and their files are damaged and come back: an owner is an agent that
// offers it, or that has offered it, still wants it, and is away.
func TestNeverTwoOwnersWithDamagedFiles(t *testing.T) {
	offered := 0
	for seed := range uint64(150) {
		h := &damagedHost{Rand: rand.New(rand.NewPCG(seed, 9)), t: t, folder: t.TempDir()}
		for _, name := range []string{"nomad-gpu", "k8s-gpu"} {
			h.agents = append(h.agents, &damagedAgent{name: name, wanted: some(h.Rand)})
			check.NoError(t, os.WriteFile(filepath.Join(h.folder, name+".lock"), nil, 0o600)) // it has run on this node
		}
		h.note("seed %d", seed)
		for range 150 {
			h.step()
		}
		for _, a := range h.agents {
			offered += len(a.has)
			if a.store != nil {
				a.store.close()
			}
		}
	}
	if offered < 300 {
		t.Errorf("at the ends %d devices were offered: too few for the test to mean anything", offered)
	}
}
