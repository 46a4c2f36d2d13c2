package live

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	shared   = "nvidia.com/gpu.shared"
	shared1g = "nvidia.com/mig-1g.10gb.shared"
)

// shares are the units of devices of which each is shared by so many.
func shares(by int, devices ...string) (ids []string) {
	for _, id := range devices {
		for n := range by {
			ids = append(ids, fmt.Sprintf("%s::%d", id, n))
		}
	}
	return ids
}

// sharing is a rule: the devices that a selector selects are shared by so many.
func sharing(by int, devices inventory.Selector) inventory.Rule {
	return inventory.Rule{Select: devices, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: by}}
}

// slots selects GPUs by number, which is their slot on a machine that nobody has changed.
func slots(numbers ...int) (s inventory.Selector) {
	for _, n := range numbers {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: n, Instance: -1})
	}
	return s
}

// rules is a configuration with a policy.
func rules(all ...inventory.Rule) func(*core.Config) {
	return func(c *core.Config) { c.Policy = inventory.Policy{Rules: all} }
}

// adopt has the agents of the scene go on with another policy.
func (s *scene) adopt(all ...inventory.Rule) {
	s.t.Helper()
	rules(all...)(&s.cfg)
	must(s.t, s.monitor.ApplyPolicy(s.t.Context(), s.cfg))
}

// Two GPUs get fewer shares, more, none, and are kept back, while work has a share of one. Nobody else is told of
// anything, and no unit goes that was healthy a moment ago.
func TestSharesBecomeOthers(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "h100x8")
	s := stage(t, m, hasty, rules(sharing(4, slots(2, 3)), sharing(3, slots(4))))
	two, third := s.uuids(2, 3), shares(3, s.UUID(4))
	rest := slices.Concat(s.uuids(0, 1, 5, 6, 7), third)
	s.settles("start", time.Now(), slices.Concat(rest, shares(4, two...)))
	works := s.UUID(2) + "::3"
	s.granted("work starts", works)

	change := func(what string, units []string, silent []string, all ...inventory.Rule) {
		t.Helper()
		since, began := s.mark(), time.Now()
		s.adopt(all...)
		s.settles(what, began, append(units, rest...))
		s.undisturbed(what, since, rest)
		s.silent(what, since, silent...)
		s.granted(what, units...)
	}
	since := s.mark()
	change("4 shares to 2", shares(2, two...), []string{gpuResource}, sharing(2, slots(2, 3)), sharing(3, slots(4)))
	s.undisturbed("4 shares to 2", since, shares(2, two...))
	if _, err := s.nomad.reserve(works); err == nil || !strings.Contains(err.Error(), "unknown device IDs: "+works) {
		t.Errorf("Reserve(%s): %v", works, err)
	}
	change("2 shares to 5", shares(5, two...), []string{gpuResource}, sharing(5, slots(2, 3)), sharing(3, slots(4)))
	change("no share, but a GPU", two, nil, sharing(3, slots(4)))
	change("kept back", nil, []string{shared}, inventory.Rule{Select: slots(2, 3), Reserve: "reserved"}, sharing(3, slots(4)))
	change("4 shares again", shares(4, two...), []string{gpuResource}, sharing(4, slots(2, 3)), sharing(3, slots(4)))
	change("nothing new", shares(4, two...), []string{gpuResource, shared}, sharing(4, slots(2, 3)), sharing(3, slots(4)))
}

// One GPU is cut into instances and made whole again, beside some that are exclusive and some that are shared. What
// happens to an instance happens to all its shares, and to no other's.
func TestMIGBesideShares(t *testing.T) {
	if !apart(t) {
		return
	}
	const cut = 7
	m := simdriver.Start(t, "h100x8")
	small := sharing(3, inventory.Selector{Profiles: []string{"1g.*"}})
	s := stage(t, m, hasty, rules(small, sharing(4, slots(2, 3))))
	rest := append(s.uuids(0, 1, 4, 5, 6), shares(4, s.uuids(2, 3)...)...)
	s.settles("start", time.Now(), append(s.uuids(cut), rest...))

	since, began := s.mark(), time.Now()
	must(t, m.SetMIG(cut, "1g.10gb", "1g.10gb", "3g.40gb"))
	instances := s.unitsOf(cut)
	units := append(shares(3, instances[:2]...), instances[2])
	s.settles("cut in three, of which two are shared by three", began, slices.Concat(rest, units))
	s.undisturbed("cut", since, rest)
	s.silent("cut", since, shared)
	s.capacity("cut", shared1g, 6)
	s.capacity("cut", "nvidia.com/mig-3g.40gb", 1)
	s.granted("cut", units...)

	began = time.Now()
	must(t, m.Set(cut, "recovery_action", "1"), m.XID(cut, 95))
	s.settles("XID 95 of the GPU takes all of them", began, append(units, rest...), units...)
	began = time.Now()
	must(t, m.Reset(cut))
	s.settles("reset", began, append(units, rest...))

	must(t, m.Set(cut, "recovery_action", "none")) // a driver that does not say at once that all is well
	must(t, m.XID(cut, 94, simdriver.At{GI: 8}))   // the second one
	s.until("XID 94 in a shared instance is known of its shares and of nobody else", func() bool {
		for _, id := range append(units, rest...) {
			known := strings.Contains(s.nomad.last().device(t, id).HealthDesc, "XID 94")
			if known != strings.HasPrefix(id, instances[1]) {
				return false
			}
		}
		return true
	})

	began = time.Now()
	must(t, m.MIGOff(cut))
	s.settles("whole again", began, append(s.uuids(cut), rest...))
	s.undisturbed("whole again", since, rest)
	s.silent("all the time", since, shared)
	s.granted("whole again", s.UUID(cut))
	s.until("no shares of instances are left", func() bool { n, _ := s.kubelet.Capacity(shared1g); return n == 0 })
}

// uuids are the GPUs in slots.
func (s *scene) uuids(slots ...int) (ids []string) {
	for _, slot := range slots {
		ids = append(ids, s.UUID(slot))
	}
	return ids
}
