package live

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// GPUs of one model that are not alike are of two groups: Nomad takes the devices of a group for
// interchangeable. Whose group has the plain name is decided by who was there first, however the driver
// counts them later: running work is found by that name.
func TestGroupsAreSplit(t *testing.T) {
	if !apart(t) {
		return
	}
	s := fleet(t)
	all := s.units()
	plain := s.nomad.last().names()[all[0]]

	since, began := s.mark(), time.Now()
	must(t, s.Add(8, "memory = 40960 MiB"), s.Add(9, "memory = 40960 MiB"))
	small := []string{s.UUID(8), s.UUID(9)}
	s.settles("two GPUs of the same model with less memory are added", began, append(all, small...))
	s.undisturbed("added", since, all)
	s.groupIs(plain, "81559MiB", all...)
	s.groupIs(plain+" (40960 MiB)", "40960MiB", small...)

	s.rewrite(reversed)
	s.seen("the small ones are counted first")
	s.settles("the small ones are counted first", time.Now(), append(all, small...))
	s.groupIs(plain, "81559MiB", all...)
	s.groupIs(plain+" (40960 MiB)", "40960MiB", small...)
	s.granted("counted in another order", append(all, small...)...)
}

// The kind that was first is gone for good; the name that it had is not given to another kind: work of before
// may still be booked under it.
func TestFirstKindGoes(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "h100x8")
	for slot := 1; slot < 8; slot++ {
		must(t, m.Remove(slot))
	}
	s := stage(t, m, hasty, func(c *core.Config) { c.Health.RemoveLostAfter = 500 * time.Millisecond })
	s.settles("start", time.Now(), s.units())
	first := s.UUID(0)
	plain := s.nomad.last().names()[first]
	must(t, s.Add(1, "memory = 40960 MiB"))
	small := s.UUID(1)
	s.settles("another kind is added", time.Now(), []string{first, small})
	s.groupIs(plain+" (40960 MiB)", "40960MiB", small)

	began := time.Now()
	must(t, s.Remove(0))
	s.settles("the first kind is gone and forgotten", began, []string{small})
	s.groupIs(plain+" (40960 MiB)", "40960MiB", small)
	s.granted("the first kind is gone", small)
}

// groupIs checks that devices are in a group of that name and memory, and nobody else is.
func (s *scene) groupIs(name, memory string, devices ...string) {
	s.t.Helper()
	g := s.nomad.last().group(s.t, devices[0])
	if g.Name != name || len(g.Devices) != len(devices) {
		s.t.Errorf("group %q of %d devices; want %q of %d", g.Name, len(g.Devices), name, len(devices))
	}
	for _, id := range devices {
		s.nomad.last().device(s.t, id)
		if got := s.nomad.last().names()[id]; got != name {
			s.t.Errorf("%s is in group %q, want %q", id, got, name)
		}
	}
	if a := g.Attributes["memory"]; a.GoString() != memory {
		s.t.Errorf("group %q: memory %s, want %s", g.Name, a.GoString(), memory)
	}
}
