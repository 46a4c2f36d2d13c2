package holders_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Two works have devices on the same hardware only by the same API: units of one resource, which the orchestrator gives out once each, or shares
// of one device by claims. Whatever conflicts does so in either order.
func TestConflict(t *testing.T) {
	device := func(id gpu.DeviceID, at gpu.Placement, api inventory.API, resource string) holders.Holder {
		return holders.Holder{API: api, Resource: resource, Unit: inventory.UnitID(id), Device: id, At: at}
	}
	whole := gpu.WholeGPU(coretest.GPU(0))
	pod := device(coretest.GPU(0), whole, inventory.DevicePlugin, "nvidia.com/gpu")
	claim := device(coretest.GPU(0), whole, inventory.DRA, "")
	instance := func(n int, api inventory.API, resource string) holders.Holder {
		return device(coretest.Instance(0, n), gpu.Placement{GPU: coretest.GPU(0), GI: uint32(n) + 1}, api, resource)
	}
	shared := func(h holders.Holder, sharing string, unit inventory.UnitID) holders.Holder {
		h.Sharing, h.Unit = sharing, unit
		return h
	}
	replica := func(n string) holders.Holder {
		return shared(pod, "shared", inventory.UnitID(string(coretest.GPU(0))+"::"+n))
	}
	pooled := pod
	pooled.Resource = "nvidia.com/training"
	elsewhere := claim
	elsewhere.Device, elsewhere.At = coretest.GPU(1), gpu.WholeGPU(coretest.GPU(1))
	remade := instance(0, inventory.DRA, "")
	remade.At.GI = 7
	for name, c := range map[string]struct {
		a, b     holders.Holder
		conflict bool
	}{
		"another GPU":                              {claim, elsewhere, false},
		"pod and claim":                            {pod, claim, true},
		"pod and claim of an instance":             {pod, instance(0, inventory.DRA, ""), true},
		"pod and pod: the kubelet decides":         {pod, pod, false},
		"pods of two resources":                    {pod, pooled, true},
		"pod of the GPU and pod of a replica":      {pod, replica("0"), true},
		"replicas of a resource":                   {replica("0"), replica("1"), false},
		"pods of GPU and instance":                 {pod, instance(1, inventory.DevicePlugin, "nvidia.com/mig-1g.10gb"), true},
		"two instances":                            {instance(0, inventory.DRA, ""), instance(1, inventory.DRA, ""), false},
		"instances by pod and claim":               {instance(0, inventory.DRA, ""), instance(1, inventory.DevicePlugin, "nvidia.com/mig-1g.10gb"), false},
		"an instance that was made again":          {instance(0, inventory.DRA, ""), remade, true},
		"claims of a GPU":                          {claim, claim, true},
		"claims of GPU and instance":               {claim, instance(1, inventory.DRA, ""), true},
		"shares, counted by the scheduler":         {shared(claim, "mps", ""), shared(claim, "mps", ""), false},
		"shares of different kinds":                {shared(claim, "mps", ""), shared(claim, "time-slicing", ""), true},
		"share and GPU":                            {shared(claim, "mps", ""), claim, true},
		"one share that is a device":               {shared(claim, "mps", "g::1"), shared(claim, "mps", "g::1"), true},
		"two shares that are devices":              {shared(claim, "mps", "g::1"), shared(claim, "mps", "g::2"), false},
		"a share that is a device, and one by sum": {shared(claim, "mps", "g::1"), shared(claim, "mps", ""), false},
	} {
		for _, pair := range [][2]holders.Holder{{c.a, c.b}, {c.b, c.a}} {
			if _, conflict := holders.NewSet(pair[:1]).Conflict(pair[1]); conflict != c.conflict {
				t.Errorf("%s: %+v beside %+v: conflict %t", name, pair[1], pair[0], conflict)
			}
		}
	}
}

// A holder that was seen remains until a complete record lacks it, and is there once.
func TestSince(t *testing.T) {
	pod := func(name string) holders.Holder { return holders.Holder{Work: holders.Work{Name: name}} }
	a, b := pod("a"), pod("b")
	for name, c := range map[string]struct {
		record holders.Record
		seen   []holders.Holder
		want   []holders.Holder
	}{
		"nothing was seen":     {holders.Record{Holders: []holders.Holder{a}}, nil, []holders.Holder{a}},
		"not complete":         {holders.Record{Holders: []holders.Holder{a}}, []holders.Holder{b, a, b}, []holders.Holder{a, b}},
		"no record":            {holders.Record{}, []holders.Holder{a, b}, []holders.Holder{a, b}},
		"complete":             {holders.Record{Holders: []holders.Holder{a}, Complete: true}, []holders.Holder{a, b}, []holders.Holder{a}},
		"complete and without": {holders.Record{Complete: true}, []holders.Holder{a}, nil},
	} {
		before := slices.Clone(c.record.Holders)
		if got := c.record.Since(c.seen); !slices.Equal(got.Holders, c.want) || got.Complete != c.record.Complete || !slices.Equal(c.record.Holders, before) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A record is located by the devices that the driver lists. Work with another device may have any, so the record is not complete.
func TestLocate(t *testing.T) {
	placements := map[gpu.DeviceID]gpu.Placement{coretest.Instance(0, 1): {GPU: coretest.GPU(0), GI: 2}}
	work := holders.Work{Orchestrator: holders.Nomad, Name: "train", ID: "5b1f"}
	known := holders.Record{Complete: true, Holders: []holders.Holder{{Work: work, Device: coretest.Instance(0, 1)}}}
	located := known.Locate(placements)
	if by := located.On(coretest.GPU(0)); !located.Complete || !slices.Equal(by, []string{"job train (allocation 5b1f)"}) {
		t.Errorf("%+v: %q", located, by)
	}
	if known.Holders[0].At != (gpu.Placement{}) {
		t.Error("Locate has changed its record")
	}
	known.Holders = append(known.Holders, holders.Holder{Work: work, Device: "GPU-removed"})
	if located = known.Locate(placements); located.Complete || !strings.Contains(located.Missing, "the end of job train (allocation 5b1f), whose device GPU-removed") {
		t.Errorf("%+v", located)
	}
}
