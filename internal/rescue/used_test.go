package rescue_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// What is shown of the budgets is what acts use: one act is one node, one GPU of it, one attempt, one node of its cause. In mode report the same is
// only listed.
func TestBudget(t *testing.T) {
	for mode, want := range map[rescue.Mode]rescue.Used{rescue.ModeAct: {Used: 1}, rescue.ModeReport: {Listed: 1}} {
		t.Run(mode.String(), func(t *testing.T) {
			w := newWorld(t, 20, 2)
			for _, c := range w.clusters {
				c.Mode = mode
			}
			w.run("work", "nomad", 0, 0)
			w.fault("nomad", 0, 0, xid(95))
			w.pass(minute)
			w.acts("one", "work")
			with := func(limit int) rescue.Used { u := want; u.Limit = limit; return u }
			got := w.policy.Budget(w.state, w.fleet(), w.now)
			if expect := (rescue.Budget{
				Nodes: with(4), Rescues: rescue.Used{Used: 1, Limit: 80}, Moves: rescue.Used{Used: 1, Limit: 80},
				GPUs:     []rescue.NodeUsed{{Hardware: "nomad/nomad-0", Used: with(1)}},
				Attempts: []rescue.GPUUsed{{GPU: uuid("nomad", 0, 0), Used: with(2)}},
				Quorum:   []rescue.CauseUsed{{Cause: "XID_95", Used: rescue.Used{Used: 1, Limit: 2}}},
			}); !reflect.DeepEqual(got, expect) {
				t.Errorf("got  %+v\nwant %+v", got, expect)
			}
		})
	}
}

// A second act for the same GPU is another attempt, and no other GPU of the node. After an hour the node has its GPUs again, and after a day the GPU its attempts.
func TestBudgetAsTimePasses(t *testing.T) {
	w := newWorld(t, 3, 1)
	for i, id := range []string{"a", "b"} {
		w.run(id, "nomad", 0, 0)
		w.fault("nomad", 0, 0, xid(95))
		w.pass(minute)
		w.answer(w.acts(id, id)[0], rescue.Accepted)
		w.move(id, "nomad", i+1, 0)
		w.pass(minute)
		w.repair("nomad", 0)
		w.pass(5 * minute)
	}
	for _, step := range []struct {
		after          time.Duration
		gpus, attempts int
	}{{0, 1, 2}, {2 * time.Hour, 0, 2}, {24 * time.Hour, 0, 0}} {
		b := w.policy.Budget(w.state, w.fleet(), w.now.Add(step.after))
		gpus, attempts := 0, 0
		for _, u := range b.GPUs {
			gpus += u.Used.Used
		}
		for _, u := range b.Attempts {
			attempts += u.Used.Used
		}
		if gpus != step.gpus || attempts != step.attempts {
			t.Errorf("after %v: %d GPUs and %d attempts, want %d and %d", step.after, gpus, attempts, step.gpus, step.attempts)
		}
	}
}
