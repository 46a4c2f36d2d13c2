package nomadadapter

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// restarted is what a process knows that begins after one that knew n, in the given boot.
func restarted(t *testing.T, n assignment, from, to string) assignment {
	t.Helper()
	text, err := encodeGroups(n, from)
	if err != nil {
		t.Fatal(err)
	}
	kept, boot, err := decodeGroups(text, to)
	if err != nil || boot != from {
		t.Fatalf("boot %q, %v:\n%s", boot, err, text)
	}
	next := assignment{by: n.by}.merge(kept)
	if from == to {
		if again, _ := encodeGroups(next, to); string(again) != string(text) {
			t.Fatalf("a restart changes the file:\n%s", cmp.Diff(string(text), string(again)))
		}
	}
	return next
}

// What began before a step.
const (
	nothing = iota
	process // a restart of the plugin
	boot    // of the machine
)

type step struct {
	began   int
	reading core.Snapshot
	obs     []core.Observation
	want    map[string]string
}

func walk(t *testing.T, by GroupBy, steps []step) {
	t.Helper()
	boots, given := 0, assignment{by: by}
	for i, s := range steps {
		before := fmt.Sprint("boot ", boots)
		if s.began == boot {
			boots++
		}
		if s.began != nothing {
			given = restarted(t, given, before, fmt.Sprint("boot ", boots))
		}
		inv := machine(s.reading, s.obs...)
		given = given.with(inv)
		if diff := cmp.Diff(s.want, groupOf(t, groups(inv, given))); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

func island(n int) string { return fmt.Sprintf("%s NVLink 0000:1%d:00.0", h100, n) }

// in gives each of the first GPUs the group with the island of this number; -1 is none.
func in(islands ...int) map[string]string {
	of := map[string]string{}
	for gpu, n := range islands {
		if of[id(gpu)] = h100; n >= 0 {
			of[id(gpu)] = island(n)
		}
	}
	return of
}

// A GPU is announced in the same group after a restart of the plugin, whatever became of its links meanwhile.
func TestIslandsStayOverARestart(t *testing.T) {
	two := joined(4, [2]int{0, 1}, [2]int{2, 3})
	only := func(n int) map[string]string { return map[string]string{id(n): island(n - n%2)} }
	for name, steps := range map[string][]step{
		"a link was lost": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{nothing, joined(4, [2]int{0, 1}), nil, in(0, 0, 2, 2)},
			{process, joined(4, [2]int{0, 1}), nil, in(0, 0, 2, 2)},
			{process, two, nil, in(0, 0, 2, 2)},
		},
		"all links were lost": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{process, joined(4), nil, in(0, 0, 2, 2)},
			{process, two, nil, in(0, 0, 2, 2)},
		},
		"a link was lost in the middle of an island": {
			{nothing, joined(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}), nil, in(0, 0, 0, 0)},
			{process, two, nil, in(0, 0, 0, 0)},
		},
		"a link came": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{process, joined(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}), nil, in(0, 0, 2, 2)},
		},
		"links that come after work": {
			{nothing, joined(2), nil, in(-1, -1)},
			{process, joined(2, [2]int{0, 1}), nil, in(-1, -1)},
		},
		"the first GPU of an island has gone": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{process, keeping(two, 1), nil, only(1)},
			{process, two, nil, in(0, 0, 2, 2)},
		},
		"a GPU that was not there before": {
			{nothing, keeping(two, 0, 1), nil, in(0, 0)},
			{process, joined(3, [2]int{1, 2}), nil, in(0, 0, 0)},
		},
	} {
		t.Run(name, func(t *testing.T) { walk(t, GroupByNVLink, steps) })
	}
}

// After a boot no task runs on: links that are there show where a GPU is, links that are missing move none.
func TestIslandsAfterABoot(t *testing.T) {
	two := joined(4, [2]int{0, 1}, [2]int{2, 3})
	one := joined(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3})
	gone := func(n int, s core.Snapshot, want map[string]string) []step {
		return slices.Repeat([]step{{boot, s, nil, want}}, n)
	}
	for name, steps := range map[string][]step{
		"nothing changed": {{nothing, two, nil, in(0, 0, 2, 2)}, {boot, two, nil, in(0, 0, 2, 2)}},
		"a link is missing": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{boot, joined(4, [2]int{0, 1}), nil, in(0, 0, 2, 2)},
			{process, joined(4, [2]int{0, 1}), nil, in(0, 0, 2, 2)},
			{boot, two, nil, in(0, 0, 2, 2)},
		},
		"links come up after the first reading": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{boot, joined(4), nil, in(0, 0, 2, 2)},
			{nothing, two, nil, in(0, 0, 2, 2)},
		},
		"a bridge was put in": {
			{nothing, joined(4, [2]int{0, 1}), nil, in(0, 0, -1, -1)},
			{process, two, nil, in(0, 0, -1, -1)},
			{boot, two, nil, in(0, 0, 2, 2)},
		},
		"two islands became one": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{boot, one, nil, in(0, 0, 0, 0)},
		},
		"a GPU was moved to another island": {
			{nothing, joined(5, [2]int{0, 1}, [2]int{2, 3}, [2]int{3, 4}), nil, in(0, 0, 2, 2, 2)},
			{boot, joined(5, [2]int{0, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, in(2, 0, 2, 2, 2)},
		},
		"an island keeps its name if its first GPU has gone": {
			{nothing, two, nil, in(0, 0, 2, 2)},
			{boot, keeping(joined(4, [2]int{1, 2}, [2]int{2, 3}), 1, 2, 3), nil, map[string]string{id(1): island(2), id(2): island(2), id(3): island(2)}},
		},
		"a GPU was cut up": {
			{nothing, joined(2, [2]int{0, 1}), nil, in(0, 0)},
			{boot, mig(), nil, map[string]string{id(1): island(0), "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
		},
		"a bridge was taken off for good": slices.Concat(
			[]step{{nothing, two, nil, in(0, 0, 2, 2)}},
			gone(forgetAfter, joined(4, [2]int{0, 1}), in(0, 0, 2, 2)),
			gone(1, joined(4, [2]int{0, 1}), in(0, 0, -1, -1)),
		),
		"an island came apart for good": slices.Concat(
			[]step{{nothing, joined(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, in(0, 0, 0, 0, 0)}},
			gone(forgetAfter, joined(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), in(0, 0, 0, 0, 0)),
			gone(1, joined(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), in(0, 0, 0, 3, 3)),
		),
	} {
		t.Run(name, func(t *testing.T) { walk(t, GroupByNVLink, steps) })
	}
}

func TestNUMANodesStayOverARestart(t *testing.T) {
	s := coretest.GPUs(4)
	moved := changed(s, 3, func(d *core.Device) { d.NUMANode = 0 })
	unknown := changed(s, 3, func(d *core.Device) { d.NUMANode = -1 })
	numa := func(nodes ...int) map[string]string {
		of := map[string]string{}
		for gpu, n := range nodes {
			of[id(gpu)] = fmt.Sprintf("%s NUMA %d", h100, n)
		}
		return of
	}
	walk(t, GroupByNUMA, []step{
		{nothing, s, nil, numa(0, 0, 1, 1)},
		{process, moved, nil, numa(0, 0, 1, 1)},
		{process, unknown, nil, numa(0, 0, 1, 1)},
		{boot, unknown, nil, numa(0, 0, 1, 1)},
		{boot, moved, nil, numa(0, 0, 1, 0)},
	})
}

// The model's name belongs to the kind that was first, also in the next process and after a boot.
func TestModelNameStaysOverARestart(t *testing.T) {
	large := changed(changed(coretest.GPUs(2), 0, memory(97871)), 1, memory(97871))
	both := changed(changed(coretest.GPUs(3), 0, memory(97871)), 1, memory(97871))
	smaller := h100 + " (81559 MiB)"
	for name, began := range map[string]int{"restart": process, "boot": boot} {
		t.Run(name, func(t *testing.T) {
			walk(t, GroupByNone, []step{
				{nothing, large, nil, in(-1, -1)},
				{nothing, both, nil, map[string]string{id(0): h100, id(1): h100, id(2): smaller}},
				{began, both, nil, map[string]string{id(0): h100, id(1): h100, id(2): smaller}},
				{began, keeping(both, 1, 2), nil, map[string]string{id(1): h100, id(2): smaller}}, // the lowest index has gone
				{began, keeping(both, 2), nil, map[string]string{id(2): smaller}},                 // and the other
				{began, both, nil, map[string]string{id(0): h100, id(1): h100, id(2): smaller}},
			})
		})
	}
}

// Another driver version may tell another size of the same memory: jobs still find the model's name.
func TestModelNamePassesToTheKindThatReplacesIt(t *testing.T) {
	two := coretest.GPUs(2)
	other := changed(changed(two, 0, memory(81251)), 1, memory(81251))
	walk(t, GroupByNone, []step{
		{nothing, two, nil, in(-1, -1)},
		{process, other, nil, in(-1, -1)},
		{process, two, nil, in(-1, -1)},
		{nothing, changed(two, 1, memory(81251)), nil, map[string]string{id(0): h100, id(1): h100 + " (81251 MiB)"}},
		{process, other, nil, map[string]string{id(0): h100 + " (81251 MiB)", id(1): h100 + " (81251 MiB)"}}, // it has a name, and keeps it
		{process, changed(other, 0, memory(0)), nil, map[string]string{id(0): h100 + " (memory unknown)", id(1): h100 + " (81251 MiB)"}},
		{process, two, nil, in(-1, -1)},
	})
}
