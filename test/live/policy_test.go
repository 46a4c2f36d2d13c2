package live

import (
	"fmt"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const sharedResource = "nvidia.com/gpu.shared"

// shares are the units of devices that have n shares each.
func shares(n int, devices ...string) (ids []string) {
	for _, id := range devices {
		for share := range n {
			ids = append(ids, fmt.Sprintf("%s::%d", id, share))
		}
	}
	return ids
}

// sharing is a rule by which devices have n shares.
func sharing(n int, devices inventory.Selector) inventory.Rule {
	return inventory.Rule{Select: devices, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}}
}

// byIndex selects GPUs by index.
func byIndex(indices ...int) (s inventory.Selector) {
	for _, n := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: n, Instance: -1})
	}
	return s
}

// A policy gives two GPUs fewer shares, more, none, and reserves them, while work uses a share. Other units don't change, and
// no unit is removed while it is healthy.
func TestSharesChange(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	two, three := byIndex(2, 3), sharing(3, byIndex(4))
	policy := func(rules ...inventory.Rule) inventory.Policy { return inventory.Policy{Rules: append(rules, three)} }
	s := startScene(t, simdriver.Start(t, "h100x8"), shortIntervals, func(c *core.Config) { c.Policy = policy(sharing(4, two)) })
	shared := s.uuids(2, 3)
	rest := slices.Concat(s.uuids(0, 1, 5, 6, 7), shares(3, s.UUID(4)))
	s.AwaitOnly("start", slices.Concat(rest, shares(4, shared...)))
	used := s.UUID(2) + "::3"
	s.checkAllocatable("work starts", used)

	since := s.mark()
	for _, c := range []struct {
		what   string
		rules  []inventory.Rule
		units  []string
		silent []string
	}{
		{"4 shares to 2", []inventory.Rule{sharing(2, two)}, shares(2, shared...), []string{gpuResource}},
		{"2 shares to 5", []inventory.Rule{sharing(5, two)}, shares(5, shared...), []string{gpuResource}},
		{"no shares", nil, shared, nil},
		{"reserved", []inventory.Rule{{Select: two, NotOffered: "reserved"}}, nil, []string{sharedResource}},
		{"4 shares again", []inventory.Rule{sharing(4, two)}, shares(4, shared...), []string{gpuResource}},
		{"the same", []inventory.Rule{sharing(4, two)}, shares(4, shared...), []string{gpuResource, sharedResource}},
	} {
		s.change(change{what: c.what, units: slices.Concat(c.units, rest), unchanged: rest, silent: c.silent, do: func() error {
			s.Config.Policy = policy(c.rules...)
			return s.Monitor.ApplyPolicy(t.Context(), s.Config)
		}})
		if c.what == "4 shares to 2" {
			s.checkUndisturbed(c.what, since, c.units)
			s.checkNotReservable(c.what, used)
		}
	}
	s.AwaitOnly("former units are removed", slices.Concat(shares(4, shared...), rest))
}

// uuids are those of the GPUs in slots.
func (s *scene) uuids(slots ...int) (ids []string) {
	for _, slot := range slots {
		ids = append(ids, s.UUID(slot))
	}
	return ids
}
