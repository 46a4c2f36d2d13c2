package live

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// fleet is the 8-GPU machine, all well, with one device at work on Nomad.
func fleet(t *testing.T, tune ...func(*core.Config)) *scene {
	t.Helper()
	s := stage(t, simdriver.Start(t, "h100x8"), append([]func(*core.Config){hasty}, tune...)...)
	s.settles("start", time.Now(), s.units())
	return s
}

// A GPU comes, is torn out, comes back, and another one takes a slot. The others don't notice, though each
// change moves their indices.
func TestGPUsComeAndGo(t *testing.T) {
	if !apart(t) {
		return
	}
	s := fleet(t)
	all := s.units()

	since, began := s.mark(), time.Now()
	must(t, s.Add(8))
	all = append(all, s.UUID(8))
	s.settles("a GPU is added", began, all)
	s.undisturbed("added", since, all[:8])
	s.granted("added", all...)
	if got, want := s.nomad.last().names()[all[8]], s.nomad.last().names()[all[0]]; got != want {
		t.Errorf("the new one is in group %q, the others are in %q", got, want)
	}

	torn := all[3]
	was := s.keysOf(3)
	since, began = s.mark(), time.Now()
	must(t, s.Remove(3))
	s.settles("a GPU is torn out: it stays listed", began, all, torn)
	s.undisturbed("torn out", since, without(all, torn))
	s.granted("torn out", without(all, torn)...)
	if why := s.nomad.last().device(t, torn).HealthDesc; !strings.HasPrefix(why, "lost") {
		t.Errorf("torn out: %q", why)
	}

	since, began = s.mark(), time.Now()
	must(t, s.Add(3, was...))
	s.settles("it is put back, behind the others", began, all)
	s.undisturbed("put back", since, without(all, torn))
	s.granted("put back", all...)

	old := all[5]
	since, began = s.mark(), time.Now()
	must(t, s.Set(5, "uuid", "GPU-0e0e0e0e-1111-4222-8333-444444444444"))
	all[5] = s.UUID(5)
	s.refuses("another GPU is in its slot: the old one", began, []string{old})
	s.settles("another GPU is in its slot", began, all)
	s.undisturbed("replaced", since, without(all, all[5]))
	s.granted("replaced", all...)
}

// keysOf are the keys with which a GPU can be added again.
func (s *scene) keysOf(slot int) (keys []string) {
	s.t.Helper()
	for _, key := range []string{"uuid", "pci", "minor", "numa"} {
		value, err := s.Get(slot, key)
		must(s.t, err)
		if value != "" {
			keys = append(keys, key+" = "+value)
		}
	}
	return keys
}

// Who a GPU is, its UUID says: not its index, its slot or its place on the bus.
func TestGPUsChangePlaces(t *testing.T) {
	if !apart(t) {
		return
	}
	s := fleet(t)
	all := s.units()
	place := func(id string) string { return s.nomad.last().device(t, id).HwLocality.PciBusID }

	since, began := s.mark(), time.Now()
	s.rewrite(reversed)
	s.seen("the order is reversed")
	s.settles("the driver counts them in another order", began, all)
	s.undisturbed("reversed", since, all)
	s.granted("reversed", all...)

	a, b := all[1], all[6]
	before := [2]string{place(a), place(b)}
	since, began = s.mark(), time.Now()
	s.rewrite(func(text string) string { return swapped(text, a, b) })
	s.until("Nomad knows their places", func() bool { return [2]string{place(b), place(a)} == before })
	s.settles("two GPUs have changed places", began, all)
	s.undisturbed("swapped", since, without(all, a, b))
	s.granted("swapped", all...)
}

// reversed is a machine whose GPUs are counted from the other end. Slots go with them.
func reversed(text string) string {
	head, rest, _ := strings.Cut(text, "[gpu ")
	gpus, tail, _ := strings.Cut(rest, "[links]")
	blocks := strings.Split(gpus, "[gpu ")
	slices.Reverse(blocks)
	for i, b := range blocks {
		blocks[i] = "[gpu " + strings.TrimRight(b, "\n") + "\n\n"
	}
	return head + strings.Join(blocks, "") + "[links]" + tail
}

// seen waits until the machine was read after now.
func (s *scene) seen(what string) {
	s.t.Helper()
	const read = "nvmlDeviceGetName" // asked by readings only
	count := func() uint64 { calls, err := s.Calls(); must(s.t, err); return calls[read] }
	slots, err := s.Slots()
	must(s.t, err)
	enough := count() + uint64(2*len(slots)) // the reading under way, and another
	s.until(what+": read again", func() bool { return count() >= enough })
}

// A GPU that is taken out in good order: its driver is unbound first, which the driver tells of. When the
// driver has not listed it for long enough it is dropped, and nothing of it stays behind.
func TestGPUIsTakenOut(t *testing.T) {
	if !apart(t) {
		return
	}
	s := fleet(t, func(c *core.Config) { c.Health.RemoveLostAfter = 2 * time.Second })
	all := s.units()
	gone := all[2]
	rest := without(all, gone)

	since, began := s.mark(), time.Now()
	must(t, s.Unbind(2), s.Remove(2))
	s.settles("a GPU is unbound and taken out", began, all, gone)
	s.settles("it is forgotten", began, rest)
	s.undisturbed("taken out", since, rest)
	s.granted("taken out", rest...)
	s.capacity("taken out", gpuResource, 7)
	if _, err := s.nomad.reserve(gone); err == nil || !strings.Contains(err.Error(), gone) {
		t.Errorf("Reserve of what is gone: %v", err)
	}
}

// A driver that tells of GPUs that it is bound to and unbound from (nvml.h: nvmlSystemEventSetWait) is heard at
// once, also with the default configuration.
func TestBoundGPUIsSeenAtOnce(t *testing.T) {
	if !apart(t) {
		return
	}
	s := stage(t, simdriver.Start(t, "h100x8"))
	all := s.units()
	s.settles("start", time.Now(), all)
	s.until("system events are listened to", func() bool {
		calls, err := s.Calls()
		must(t, err)
		return calls["nvmlSystemEventSetWait"] > 0
	})
	since, began := s.mark(), time.Now()
	must(t, s.Add(8), s.Bind(8))
	added := s.UUID(8)
	d := s.settles("a GPU is added and bound", began, append(all, added))
	promised(t, "added", d.most(), 5*time.Second)
	s.undisturbed("added", since, all)
	since, began = s.mark(), time.Now()
	must(t, s.Unbind(8), s.Remove(8))
	d = s.settles("it is unbound and taken out again", began, append(all, added), added)
	promised(t, "taken out", d.most(), 5*time.Second)
	s.undisturbed("taken out", since, all)
}

// How long it takes with the settings of an operator who has set none.
func TestGPUsComeAndGoByDefault(t *testing.T) {
	takesLong(t)
	if !apart(t) {
		return
	}
	s := stage(t, simdriver.Start(t, "h100x8"))
	all := s.units()
	s.settles("start", time.Now(), all)
	limit := core.DefaultConfig().Rescan + 5*time.Second

	began := time.Now()
	must(t, s.Add(8))
	all = append(all, s.UUID(8))
	added := s.settles("a GPU is added", began, all)
	began = time.Now()
	must(t, s.Remove(3))
	torn := s.settles("a GPU is torn out", began, all, all[3])
	began = time.Now()
	old := all[5]
	must(t, s.Set(5, "uuid", "GPU-0e0e0e0e-1111-4222-8333-444444444444"))
	s.refuses("another GPU is in its slot: the old one", began, []string{old})
	all[5] = s.UUID(5)
	replaced := s.settles("another GPU is in its slot", began, all, all[3])
	for what, d := range map[string]took{"added": added, "torn out": torn, "replaced": replaced} {
		promised(t, what, d.most(), limit)
	}
}
