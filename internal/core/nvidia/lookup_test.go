package nvidia

import (
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// relocated are GPUs with the old indices 0, 1, 2 and so on, and their new indices; -1 for one that does not answer.
func relocated(now ...int) (found, unresponsive []identity) {
	for old, index := range now {
		if index >= 0 {
			found = append(found, identity{oldIndex: old, index: index})
		} else {
			unresponsive = append(unresponsive, identity{index: old, err: &hungError{Call: "nvmlDeviceGetUUID", At: gpu.Node}})
		}
	}
	return found, unresponsive
}

func TestUnassignedIndices(t *testing.T) {
	for _, c := range []struct {
		name  string
		count int
		now   []int // by old index
		moved bool
		free  []int
		at    []int // of those that do not answer; -1 = indexUnknown
	}{
		{"no GPUs", 0, nil, false, nil, nil},
		{"first reading", 3, nil, true, []int{0, 1, 2}, nil},
		{"unchanged", 3, []int{0, 1, 2}, false, nil, nil},
		{"one added", 4, []int{0, 1, 2}, true, []int{3}, nil},
		{"one unresponsive, unchanged", 3, []int{0, -1, 2}, false, nil, []int{1}},
		{"one of two unresponsive answers again", 4, []int{0, 1, -1, 3}, false, nil, []int{2}},
		{"one removed before the unresponsive one", 3, []int{0, 1, -1, 2}, true, []int{}, []int{-1}},
		{"last one removed", 2, []int{-1, 1}, true, nil, []int{0}},
		{"one removed before the unresponsive last one", 2, []int{0, 1, -1}, true, nil, []int{-1}},
		{"one added at the end", 4, []int{0, -1, 2}, true, []int{3}, []int{1}},
		{"one added behind the unresponsive last one", 4, []int{0, 1, -1}, true, []int{2, 3}, []int{-1}},
		{"one added before all, the last one unresponsive", 3, []int{1, -1}, true, []int{0}, []int{2}},
		{"two unresponsive neighbours", 4, []int{0, -1, -1, 3}, true, nil, []int{1, 2}},
		{"two unresponsive neighbours, one removed", 3, []int{0, -1, -1, 2}, true, []int{1}, []int{-1, -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			found, unresponsive := relocated(c.now...)
			free, blocked := unassignedIndices(c.count, c.moved, found, unresponsive)
			var at []int
			for _, s := range unresponsive {
				if s.indexUnknown {
					s.index = -1
				}
				at = append(at, s.index)
			}
			if !slices.Equal(free, c.free) || !slices.Equal(at, c.at) || (blocked != nil) != slices.Contains(at, -1) {
				t.Errorf("free %v, unresponsive at %v, %v", free, at, blocked)
			}
		})
	}
}

// A GPU that has moved since it was queried is identified by its handle, without a call about it, and stays as it was found.
func TestLookupOfKnownGPU(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	e := enumeration{s.enumeration.count, slices.Clone(s.enumeration.gpus)}
	n := counted(t, m, func() {
		found, err := query(s, target{s.newWorker(), 3, gpu.Node}, func(c *caller) identity { return lookUp(c, s.lib, 3, e.handles()) })
		if must(t, err); found.id != h100ID {
			t.Errorf("%+v", found)
		}
		e.add(identity{id: found.id, handle: found.handle, index: 7})
	})
	if total(n) != 1 || !e.equal(s.enumeration) {
		t.Errorf("%v, %+v", n, e.gpus)
	}
}

// A GPU whose handle is invalid is found by its PCI address, also if its index has changed.
func TestInvalidHandleAfterRemoval(t *testing.T) {
	m, slots := h100x8(t)
	s := open(t, m)
	snapshot(t, s)
	must(t, m.Remove(0), m.Invalidate(3))
	expectSlots(t, s, "removed", slots, 1, 1, 2, 3, 4, 5, 6, 7)
	if o := probe(t, s)[h100ID]; o.Kind != health.Checked {
		t.Errorf("%+v", o)
	}
}

// Two GPUs swap their slots: they are identified by UUID.
func TestTwoGPUsSwapSlots(t *testing.T) {
	m, slots := h100x8(t)
	s := open(t, m)
	before := snapshot(t, s)
	a, b := before.Devices[1].PCI, before.Devices[6].PCI
	must(t, m.Set(1, "pci", string(b)), m.Set(6, "pci", string(a)))
	snap := expectSlots(t, s, "swapped", slots, 0, 0, 1, 2, 3, 4, 5, 6, 7)
	if snap.Devices[1].PCI != b || snap.Devices[6].PCI != a {
		t.Errorf("in slots %s and %s", snap.Devices[1].PCI, snap.Devices[6].PCI)
	}
}

// withoutUUID is a handle whose UUID is empty.
type withoutUUID struct{ nvml.Device }

func (withoutUUID) GetUUID() (string, nvml.Return) { return "", nvml.SUCCESS }

// An empty UUID is no answer, and of two GPUs with one UUID the second one is excluded: nothing is offered twice.
func TestUUIDsThatIdentifyNothing(t *testing.T) {
	if _, ret := uuidOf(withoutUUID{})(); ret == nvml.SUCCESS {
		t.Error("an empty UUID is an answer")
	}
	var e enumeration
	e.add(identity{index: 0, id: "GPU-1", pci: "0000:01:00.0"})
	e.add(identity{index: 1, id: "GPU-1", pci: "0000:02:00.0"})
	e.add(identity{index: 0, id: "GPU-1", pci: "0000:01:00.0"}) // it has moved
	want := []identity{{index: 0, id: "GPU-1", pci: "0000:01:00.0"}, {index: 1, pci: "0000:02:00.0", err: errSharedUUID}}
	if !slices.Equal(e.gpus, want) {
		t.Errorf("%+v", e.gpus)
	}
}
