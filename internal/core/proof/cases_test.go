package proof_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/proof"
)

// TestCases has the cases of the contract that concern the decision, by their numbers. 23 is TestRandom in part. The others are about the command, its
// output, and what shows its result.
func TestCases(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"1 withhold: GPUs are offered one by one":                   case1Withhold,
		"1 offer: GPUs are offered at once, and proved when idle":   case1Offer,
		"2 a GPU that failed is unhealthy at once":                  case2,
		"3 a check that could not run is counted and put off":       case3,
		"4 a GPU whose check can't run is offered":                  case4,
		"5 work that comes after the beginning cancels":             case5,
		"6 work that comes before it has the proof wait":            case6,
		"7 a record that can't be read has no proof begin or go on": case7,
		"7 a record that is never complete withholds nothing":       case7Never,
		"8 a GPU that was reset is proved before it is offered":     case8,
		"8 so is one that has recovered":                            case8Recovery,
		"8 one that fails and recovers again and again":             case8Often,
		"8 a check that can't run is tried again after each fault":  case8NotRun,
		"9 a proof that the agent did not survive could not run":    case9,
		"10 nor one that the node did not survive":                  case10,
		"12 a proof that does not end keeps no other back":          case12,
		"13 what ends a proof, and that its result does not count":  case13,
		"13 demand ends no proof of a GPU that takes no work":       case13Demand,
		"13 an operator's cancel has it offered":                    case13Operator,
		"15 the last free GPU of a pool":                            case15,
		"16 a clock step of a year":                                 case16,
		"17 nodes that start together":                              case17,
		"18 an instance or a share that is held":                    case18,
		"21 a GPU that fails again after its reset needs service":   case21,
		"21 nor is there a third try after a boot":                  case21Boot,
		"21 an operator clears a failure":                           case21Clear,
		"22 proofs of another agent count":                          case22,
		"a GPU that left, or another one in its place":              caseGone,
		"a decision without news changes nothing on disk":           caseUnchanged,
		"off":     caseOff,
		"windows": caseWindows,
		"every":   caseEvery,
	} {
		t.Run(name, test)
	}
}

func case1Withhold(t *testing.T) {
	w := newWorld(t, 8)
	w.policy.Withhold = true
	if all := w.policy.Withheld(w.state, w.node); len(all) != 8 { // before the first decision
		t.Fatalf("%+v", all)
	}
	began := w.now
	w.pass(0)
	w.withheld(8)
	w.waits(0, proof.WaitSettle)
	for left := 8; left > 0; left-- {
		b := w.until(2 * minute)
		if w.now.Sub(began) < proof.SettleTime || b.Reason != proof.Boot {
			t.Fatalf("%+v after %v", b, w.now.Sub(began))
		}
		w.withheld(left)
		if w.pass(4 * second); len(w.last.Begin) > 0 {
			t.Fatalf("a second one: %+v", w.last.Begin)
		}
		w.end(b.GPU, proof.Passed)
	}
	w.pass(0)
	w.withheld(0)
	if took := w.now.Sub(began); took > proof.SettleTime+minute+8*6*second {
		t.Errorf("it took %v", took)
	}
	w.never(day)
	w.restart()
	w.pass(0)
	w.withheld(0)
	w.boot("2")
	w.pass(0)
	w.withheld(8)
}

func case1Offer(t *testing.T) {
	w := newWorld(t, 8)
	w.pass(0)
	w.withheld(0)
	w.pass(proof.SettleTime)
	w.waits(0, proof.WaitIdle)
	w.gpu(0).Holders = []string{"pod default/train"}
	began := w.now
	for range 7 {
		if b := w.until(12 * minute); b.GPU == w.gpu(0).ID || b.Reason != proof.Boot || w.now.Sub(began) < w.policy.IdleFor-proof.SettleTime {
			t.Fatalf("%+v after %v", b, w.now.Sub(began))
		}
		w.withheld(0)
		w.end(w.last.Begin[0].GPU, proof.Passed)
	}
	w.never(day)
	w.waits(0, proof.WaitHeld)
	w.gpu(0).Holders = nil
	if b := w.until(11 * minute); b.GPU != w.gpu(0).ID {
		t.Errorf("%+v", b)
	}
}

func case2(t *testing.T) {
	w := newWorld(t, 2)
	b := w.until(20 * minute)
	w.end(b.GPU, proof.Failed)
	if all := w.policy.Failures(w.state, w.node); len(all) != 1 || all[0].GPU != b.GPU || all[0].State != health.Unhealthy || all[0].Summary != "memory error" { // before a decision
		t.Errorf("%+v", all)
	}
	w.restart()
	w.pass(day)
	if len(w.last.Failures) != 1 {
		t.Errorf("after a restart: %+v", w.last.Failures)
	}
	if v := w.record(b.GPU).Last; v.Passed || v.Reason != proof.Boot || v.Took != 5*second || v.Boot != "1" || v.Values["gemm_tflops"] != 612.3 {
		t.Errorf("%+v", v)
	}
}

func case3(t *testing.T) {
	w := newWorld(t, 1)
	for i, wait := range []time.Duration{hour, 6 * hour, day, day, day} {
		b := w.until(20 * minute)
		if !w.end(b.GPU, proof.NotRun) {
			t.Fatal("it does not count")
		}
		w.pass(0)
		if one := w.waits(0, proof.WaitBackOff); !one.Until.Equal(w.now.Add(wait)) || one.Text != "the check could not run: exit status 2" {
			t.Errorf("%d: %+v at %v", i, one, w.now)
		}
		if r := w.record(b.GPU); r.Tries.Count != i+1 || r.Last != nil || len(w.last.Failures)+len(w.last.Withheld) > 0 {
			t.Errorf("%d: %+v", i, r)
		}
		if i%2 == 0 {
			w.restart()
		}
		w.never(wait - 5*minute)
		w.pass(5*minute - second)
	}
	w.until(20 * minute)
	w.end(w.gpu(0).ID, proof.Passed)
	if w.pass(0); w.record(w.gpu(0).ID).Tries != nil {
		t.Errorf("%+v", w.record(w.gpu(0).ID))
	}
}

func case4(t *testing.T) {
	w := newWorld(t, 2)
	w.policy.Withhold = true
	for left := 2; left > 0; left-- {
		b := w.until(2 * minute)
		w.withheld(left)
		w.end(b.GPU, proof.NotRun)
		w.pass(0)
		w.withheld(left - 1)
	}
	w.until(2 * hour)
	w.withheld(0)
	w.end(w.gpu(0).ID, proof.Passed)
	w.gpu(1).Reset = w.now.Add(second) // another reason: it is tried at once, and withheld for it
	w.pass(second)
	w.withheld(1)
	if b := w.until(second); b.GPU != w.gpu(1).ID || b.Reason != proof.Reset {
		t.Errorf("%+v", b)
	}
}

func case5(t *testing.T) {
	w := newWorld(t, 2)
	b := w.until(20 * minute)
	if why, ok := w.policy.Still(w.state, w.node, b.GPU); !ok || why != "" {
		t.Errorf("%q", why)
	}
	w.gpu(0).Processes = []string{"pid 2114"}
	if why, ok := w.policy.Still(w.state, w.node, b.GPU); ok || why != proof.Held {
		t.Errorf("a process: %q", why)
	}
	w.gpu(0).Processes, w.gpu(0).Holders = nil, []string{"pod default/train"}
	if why, ok := w.policy.Still(w.state, w.node, b.GPU); ok || why != proof.Held {
		t.Errorf("work: %q", why)
	}
	if w.pass(second); len(w.last.Cancel) != 1 || w.last.Cancel[0] != (proof.Cancelling{GPU: b.GPU, Number: b.Number, Why: proof.Held}) {
		t.Errorf("%+v", w.last.Cancel)
	}
	if w.end(b.GPU, proof.Failed) {
		t.Error("the result of a proof beside work counts")
	}
}

func case6(t *testing.T) {
	w := newWorld(t, 1)
	w.policy.Withhold = true
	w.pass(29 * second)
	w.gpu(0).Holders = []string{"claim default/gpus"}
	w.never(hour)
	if one := w.waits(0, proof.WaitHeld); one.Text != "claim default/gpus has it" {
		t.Errorf("%+v", one)
	}
	w.gpu(0).Holders = nil
	w.pass(second)
	ended := w.now
	if w.until(minute); w.now.Sub(ended) < proof.SettleTime {
		t.Errorf("after %v", w.now.Sub(ended))
	}
}

func case7(t *testing.T) {
	w := newWorld(t, 1)
	w.gpu(0).Unread = "the kubelet does not answer"
	w.never(day)
	if one := w.waits(0, proof.WaitUnread); one.Alert || !strings.Contains(one.Text, "the kubelet does not answer") {
		t.Errorf("%+v", one)
	}
	w.gpu(0).Unread = ""
	b := w.until(20 * minute)
	w.gpu(0).Unread = "the kubelet does not answer"
	if w.pass(0); len(w.last.Cancel) != 1 || w.last.Cancel[0].Why != proof.Unread {
		t.Errorf("%+v", w.last.Cancel)
	}
	w.end(b.GPU, proof.Cancelled)
}

func case7Never(t *testing.T) {
	w := newWorld(t, 1)
	w.policy.Withhold = true
	w.gpu(0).Unread, w.gpu(0).Never = "the agent's API is not set", true
	w.pass(0)
	w.withheld(0)
	if one := w.waits(0, proof.WaitUnread); !one.Alert {
		t.Errorf("%+v", one)
	}
}

func case8(t *testing.T) {
	w := provedWorld(t, 4)
	w.gpu(2).Reset = w.now.Add(second)
	if all := w.policy.Withheld(w.state, w.node); len(all) != 1 || all[0].GPU != w.gpu(2).ID || all[0].Reason != proof.Reset || all[0].Text != "since its reset" {
		t.Errorf("before a decision: %+v", all)
	}
	w.pass(second)
	w.withheld(1)
	b := w.until(minute)
	if b.GPU != w.gpu(2).ID || b.Reason != proof.Reset {
		t.Errorf("%+v", b)
	}
	w.end(b.GPU, proof.Passed)
	w.pass(0)
	w.withheld(0)
	w.policy.At = []proof.Reason{proof.Boot}
	w.gpu(2).Reset = w.now.Add(second)
	w.never(hour)
	w.withheld(0)
}

func case8Recovery(t *testing.T) {
	w := provedWorld(t, 4)
	w.gpu(1).Health, w.gpu(1).Cause = health.Unhealthy, "XID 95"
	w.never(hour)
	w.withheld(1) // from its recovery on: no work gets it before the next decision
	w.restart()
	w.never(10 * minute)
	w.withheld(1)
	w.gpu(1).Health = health.Degraded
	w.pass(0)
	w.withheld(1)
	if b := w.until(minute); b.GPU != w.gpu(1).ID || b.Reason != proof.Recovery {
		t.Errorf("%+v", b)
	}
	w.end(w.gpu(1).ID, proof.Passed)
	w.pass(0)
	w.withheld(0)
	for _, s := range []health.State{health.Degraded, health.Unknown, health.Healthy} { // a driver that was released is no fault
		w.gpu(1).Health = s
		w.pass(second)
		w.withheld(0)
	}
}

// A GPU that fails again after each proof is left to a person after the second one within a day. A reset goes on, which
// a person has made.
func case8Often(t *testing.T) {
	for _, outcome := range []proof.Outcome{proof.Passed, proof.NotRun} {
		w := provedWorld(t, 2)
		proofs := 0
		flap := func() {
			w.gpu(1).Health, w.gpu(1).Cause = health.Unhealthy, "XID 95"
			w.never(2 * minute)
			w.gpu(1).Health = health.Healthy
			for range 10 {
				w.pass(20 * second)
				for _, b := range w.last.Begin {
					proofs++
					w.pass(second)
					w.end(b.GPU, outcome)
				}
			}
		}
		for range 240 { // more than half a day
			flap()
		}
		if proofs != 2 {
			t.Fatalf("%v: %d proofs", outcome, proofs)
		}
		w.restart()
		w.pass(0)
		if one := w.waits(1, proof.WaitOften); !one.Alert || !strings.Contains(one.Text, "a person decides") {
			t.Errorf("%+v", one)
		}
		w.withheld(1)
		w.gpu(1).Reset = w.now.Add(second)
		if b := w.until(minute); b.GPU != w.gpu(1).ID || b.Reason != proof.Reset {
			t.Errorf("%+v", b)
		}
	}
}

// A check that can't run is tried again as always, however often, and does not make one fault several.
func case8NotRun(t *testing.T) {
	w := provedWorld(t, 2)
	fail := func() {
		w.gpu(1).Health, w.gpu(1).Cause = health.Unhealthy, "XID 95"
		w.never(2 * minute)
		w.gpu(1).Health = health.Healthy
	}
	fail()
	for i := range 3 {
		if b := w.until(6*hour + 2*minute); b.GPU != w.gpu(1).ID || b.Reason != proof.Recovery {
			t.Errorf("%d: %+v", i, b)
		}
		w.pass(second)
		w.end(w.gpu(1).ID, proof.NotRun)
		w.pass(second)
		w.withheld(0)
		w.waits(1, proof.WaitBackOff)
	}
	fail() // only the second fault within a day
	if b := w.until(2 * minute); b.GPU != w.gpu(1).ID || b.Reason != proof.Recovery {
		t.Errorf("after a second fault: %+v", b)
	}
}

func case9(t *testing.T) {
	w := newWorld(t, 2)
	w.policy.Withhold = true
	b := w.until(2 * minute)
	w.restart()
	w.pass(second)
	if r := w.record(b.GPU); r.Running != nil || r.Tries == nil || r.Tries.Count != 1 {
		t.Errorf("%+v", r)
	}
	w.withheld(1)
	if again := w.until(2 * minute); again.GPU == b.GPU || again.Number == b.Number {
		t.Errorf("%+v", again)
	}
	if _, counts := w.state.Ended(proof.End{GPU: b.GPU, Number: b.Number, Outcome: proof.Failed}, w.now); counts {
		t.Error("the result of a process before counts")
	}
}

func case10(t *testing.T) {
	w := newWorld(t, 1)
	w.policy.Withhold = true
	for i := range 3 { // whose proof ends the node each time
		w.until(2 * day)
		w.boot(fmt.Sprint("again ", i))
		w.restart()
		w.pass(10 * second)
		w.withheld(0)
		w.waits(0, proof.WaitBackOff)
		if r := w.record(w.gpu(0).ID); r.Tries.Count != i+1 {
			t.Errorf("%+v", r)
		}
	}
}

func case12(t *testing.T) {
	w := newWorld(t, 2)
	stuck := w.until(20 * minute)
	began := w.now
	next := w.until(3 * minute)
	if kept := w.now.Sub(began); next.GPU == stuck.GPU || kept < w.policy.Timeout || kept > proof.TakeWithin+w.policy.Timeout+proof.EndsWithin {
		t.Errorf("%+v after %v", next, kept)
	}
	if len(w.last.Cancel) != 1 || w.last.Cancel[0] != (proof.Cancelling{GPU: stuck.GPU, Number: stuck.Number, Why: proof.Overdue}) {
		t.Errorf("%+v", w.last.Cancel)
	}
	if _, counts := w.state.Ended(proof.End{GPU: stuck.GPU, Number: stuck.Number, Outcome: proof.Failed}, w.now); counts {
		t.Error("its result counts when it ends")
	}
}

func case13(t *testing.T) {
	for why, change := range map[proof.Cancel]func(w *world){
		proof.Maintenance: func(w *world) { w.node.Cancel = proof.Maintenance },
		proof.Reload:      func(w *world) { w.node.Cancel = proof.Reload },
		proof.Shutdown:    func(w *world) { w.node.Cancel = proof.Shutdown },
		proof.Move:        func(w *world) { w.gpu(0).Cancel = proof.Move },
		proof.Demand:      func(w *world) { w.gpu(0).Cancel = proof.Demand },
		proof.Fault:       func(w *world) { w.gpu(0).Health = health.Unhealthy },
		proof.Gone:        func(w *world) { w.node.GPUs = w.node.GPUs[1:] },
	} {
		w := newWorld(t, 2)
		id := w.until(20 * minute).GPU
		change(w)
		for range 2 { // until it has ended
			if w.pass(second); len(w.last.Cancel) != 1 || w.last.Cancel[0].Why != why || why.String() == string(why) {
				t.Errorf("%s: %+v", why, w.last.Cancel)
			}
		}
		if len(w.last.Begin) > 0 {
			t.Errorf("%s: %+v begins while the other has not ended", why, w.last.Begin)
		}
		if w.end(id, proof.Failed) {
			t.Errorf("%s: its result counts", why)
		}
		ended := w.now
		if w.pass(0); len(w.last.Failures)+len(w.last.Cancel) > 0 {
			t.Errorf("%s: %+v", why, w.last)
		}
		w.node = newWorld(t, 2).node
		for w.until(25*minute).GPU != id { // the other one may be first
			w.end(w.last.Begin[0].GPU, proof.Passed)
		}
		if again := w.now.Sub(ended); again < proof.SettleTime {
			t.Errorf("%s: again after %v", why, again)
		}
	}
}

func case13Demand(t *testing.T) {
	w := newWorld(t, 2)
	w.policy.Withhold = true
	w.gpu(0).Cancel, w.gpu(1).Cancel = proof.Demand, proof.Demand
	b := w.until(2 * minute)
	if w.pass(second); len(w.last.Cancel) > 0 {
		t.Errorf("%+v", w.last.Cancel)
	}
	w.end(b.GPU, proof.Passed)
}

func case13Operator(t *testing.T) {
	w := newWorld(t, 1)
	w.policy.Withhold = true
	id := w.until(2 * minute).GPU
	w.gpu(0).Cancel = proof.ByOperator
	if w.pass(0); len(w.last.Cancel) != 1 || w.last.Cancel[0].Why != proof.ByOperator {
		t.Errorf("%+v", w.last.Cancel)
	}
	w.end(id, proof.Cancelled)
	w.gpu(0).Cancel = ""
	w.pass(0)
	w.withheld(0)
	w.never(59 * minute)
	if w.until(2 * minute); w.record(id).Tries.Count != 0 {
		t.Errorf("it counts as a check that could not run: %+v", w.record(id))
	}
}

func case15(t *testing.T) {
	w := provedWorld(t, 3)
	w.gpu(0).Holders, w.gpu(1).Holders = []string{"pod a"}, []string{"pod b"}
	w.never(30 * day)
	w.waits(2, proof.WaitLastFree)
	w.gpu(2).Reset = w.now.Add(second)
	if b := w.until(2 * minute); b.Reason != proof.Reset {
		t.Errorf("%+v", b)
	}
	w.end(w.gpu(2).ID, proof.Passed)
	w.boot("2")
	if b := w.until(20 * minute); b.Reason != proof.Boot {
		t.Errorf("%+v", b)
	}
	w.end(w.gpu(2).ID, proof.Passed)
	w.gpu(2).Pools = []string{"other"} // in which it is alone, too
	w.gpu(1).Holders = nil
	w.proveAll()
	w.never(30 * day)
	w.waits(1, proof.WaitLastFree)
	w.waits(2, proof.WaitLastFree)
}

func case16(t *testing.T) {
	for _, step := range []time.Duration{365 * day, -365 * day} {
		for _, known := range []bool{true, false} {
			w := newWorld(t, 8)
			if !known {
				w.node.BootTime = time.Time{}
			}
			w.proveAll()
			w.set(step)
			n := 0
			for range 55 {
				w.pass(minute)
				for _, b := range w.last.Begin {
					n++
					w.end(b.GPU, proof.Passed)
				}
			}
			if n > 1 || known && n > 0 {
				t.Errorf("a step of %v, boot time known %t: %d proofs", step, known, n)
			}
			n = 0
			for range 15 * 24 * 12 {
				w.pass(5 * minute)
				for _, b := range w.last.Begin {
					n++
					w.end(b.GPU, proof.Passed)
				}
			}
			if n < 16 || n > 24 {
				t.Errorf("a step of %v, boot time known %t: %d proofs in 15 days", step, known, n)
			}
		}
	}
}

func case17(t *testing.T) {
	for _, reason := range []proof.Reason{proof.Boot, proof.Idle} {
		var times []time.Duration
		for n := range 64 {
			w := newWorld(t, 2)
			w.node.Name = fmt.Sprintf("node-%d", n)
			w.policy.Withhold = reason == proof.Boot
			w.policy.At = []proof.Reason{reason}
			began := w.now
			for len(w.last.Begin) == 0 {
				w.pass(second)
				if wake := w.last.Wake; len(w.last.Begin) == 0 && wake.After(w.now) {
					w.now = wake.Add(-second)
				}
			}
			times = append(times, w.now.Sub(began))
		}
		slices.Sort(times)
		span := map[proof.Reason]time.Duration{proof.Boot: minute, proof.Idle: 7 * day / 8}[reason]
		if first, last := times[0], times[63]; last-first < span/2 || last-first > span || reason == proof.Boot && last > proof.SettleTime+minute+second {
			t.Errorf("%v: from %v to %v", reason, first, last)
		}
		for i := range times[8:] {
			if times[i+8]-times[i] < span/64 {
				t.Errorf("%v: nine begin within %v", reason, times[i+8]-times[i])
			}
		}
	}
}

func case18(t *testing.T) {
	at := gpu.Placement{GPU: coretest.GPU(0), GI: 2}
	record := holders.Record{Complete: true, Holders: []holders.Holder{{Work: holders.Work{Orchestrator: holders.Nomad, Name: "train", ID: "5b1f"}, Device: coretest.Instance(0, 1), At: at}}}
	w := newWorld(t, 1)
	w.gpu(0).Pools = []string{"mig-1g.10gb"}
	w.gpu(0).Holders = record.On(coretest.GPU(0))
	w.never(hour)
	w.waits(0, proof.WaitHeld)
	w.gpu(0).Holders = holders.Record{Complete: true}.On(coretest.GPU(0))
	w.until(20 * minute)
}

func case21(t *testing.T) {
	w := provedWorld(t, 2)
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	if f := w.last.Failures; len(f) != 1 || f[0].GPU != w.gpu(0).ID || f[0].State != health.Unhealthy || f[0].NeedsService || f[0].Summary != "memory error" || !f[0].Since.Equal(w.now) {
		t.Errorf("%+v", f)
	}
	w.never(day)
	w.waits(0, proof.WaitRepair)
	w.gpu(0).Reset = w.now.Add(second)
	w.restart()
	w.fail(0)
	if f := w.last.Failures; len(f) != 1 || !f[0].NeedsService {
		t.Errorf("%+v", f)
	}
	if one := w.waits(0, proof.WaitService); !one.Alert {
		t.Errorf("%+v", one)
	}
	w.gpu(0).Reset = w.now.Add(second)
	w.never(5 * day)
	w.restart()
	w.pass(0)
	w.waits(0, proof.WaitService)
}

func case21Boot(t *testing.T) {
	w := provedWorld(t, 2)
	w.policy.At, w.policy.OnFail = []proof.Reason{proof.Reset}, health.Degraded
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	if f := w.last.Failures; len(f) != 1 || f[0].State != health.Degraded {
		t.Errorf("%+v", f)
	}
	w.boot("2") // also without the reason boot
	w.fail(0)
	if f := w.last.Failures; len(f) != 1 || f[0].State != health.Unhealthy || !f[0].NeedsService {
		t.Errorf("%+v", f)
	}
	w.boot("3")
	w.never(5 * day)
}

func case21Clear(t *testing.T) {
	w := provedWorld(t, 2)
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	var cleared bool
	if w.state, cleared = w.state.Clear(w.gpu(0).ID, w.now); !cleared {
		t.Error("it is not cleared")
	}
	if _, again := w.state.Clear(w.gpu(0).ID, w.now); again {
		t.Error("it is cleared twice")
	}
	w.never(hour)
	if len(w.last.Failures) > 0 {
		t.Errorf("%+v", w.last.Failures)
	}
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	if f := w.last.Failures; len(f) != 1 || f[0].NeedsService {
		t.Errorf("%+v", f)
	}
	w.gpu(0).Reset = w.now.Add(second)
	w.until(minute)
	w.end(w.gpu(0).ID, proof.Passed)
	if w.pass(0); len(w.last.Failures) > 0 {
		t.Errorf("%+v", w.last.Failures)
	}
}

func case22(t *testing.T) {
	w := newWorld(t, 2)
	w.node.Elsewhere = 1
	w.never(hour)
	w.waits(0, proof.WaitTurn)
	w.policy.MaxPerNode = 2
	if w.until(minute); len(w.last.Begin) != 1 {
		t.Errorf("%+v", w.last.Begin)
	}
}

func caseGone(t *testing.T) {
	w := newWorld(t, 2)
	b := w.until(20 * minute)
	w.node.GPUs[0].ID = "GPU-new"
	w.pass(second)
	if w.end(b.GPU, proof.Failed) {
		t.Error("the result of a GPU that left counts")
	}
	if w.pass(0); len(w.last.Failures) > 0 || w.record("GPU-new").Last != nil {
		t.Errorf("%+v", w.last.Failures)
	}
	if _, counts := w.state.Ended(proof.End{GPU: "GPU-never", Outcome: proof.Failed}, w.now); counts {
		t.Error("the result of a GPU that was never there counts")
	}
	w = provedWorld(t, 2)
	w.gpu(0).Reset = w.now.Add(second)
	w.fail(0)
	gpus := slices.Clone(w.node.GPUs)
	w.node.GPUs = gpus[1:]
	if w.never(day); len(w.last.Failures) > 0 {
		t.Errorf("%+v", w.last.Failures)
	}
	w.node.GPUs = gpus
	if w.pass(0); len(w.last.Failures) != 1 {
		t.Error("a GPU that comes back has lost its failure")
	}
	for i := range 1000 {
		w.node.GPUs[1].ID = gpu.DeviceID(fmt.Sprint("GPU-", i))
		w.pass(second)
	}
	if n := len(w.state.Records); n > 256 || len(w.last.Failures) != 1 {
		t.Errorf("%d records, %+v", n, w.last.Failures)
	}
	w.restart()
}

func caseOff(t *testing.T) {
	w := newWorld(t, 2)
	b := w.until(20 * minute)
	w.policy = proof.Policy{}
	if w.pass(second); len(w.last.Cancel) != 1 || w.last.Cancel[0].Why != proof.Reload {
		t.Errorf("%+v", w.last)
	}
	w.end(b.GPU, proof.Cancelled)
	w.pass(second)
	if r := w.last; len(r.Begin)+len(r.Cancel)+len(r.Withheld)+len(r.Failures)+len(r.Waits) > 0 || !r.Wake.IsZero() {
		t.Errorf("%+v", r)
	}
	w.state = proof.State{}
	if w.pass(second); len(w.state.Records) > 0 {
		t.Errorf("%+v", w.state)
	}
}

func caseWindows(t *testing.T) {
	zone := time.FixedZone("", 3600)
	w := newWorld(t, 2)
	w.now = w.now.In(zone)
	w.policy.Windows = []proof.Window{
		{Days: []time.Weekday{time.Saturday}, From: 22 * hour, To: 2 * hour}, {From: 12 * hour, To: 12*hour + 30*minute},
	}
	w.policy.At = []proof.Reason{proof.Idle}
	if got := fmt.Sprint(w.policy.Windows); got != "[Sat 22:00-02:00 12:00-12:30]" {
		t.Error(got)
	}
	at := map[string]bool{}
	for range 60 * 24 * 6 {
		w.pass(10 * minute)
		for _, b := range w.last.Begin {
			at[w.now.Format("15h")] = true
			if h := w.now.Hour()*60 + w.now.Minute(); (h < 720 || h >= 750) && (w.now.Weekday() != time.Saturday || h < 1320) && (w.now.Weekday() != time.Sunday || h >= 120) {
				t.Errorf("%+v at %v", b, w.now)
			}
			w.end(b.GPU, proof.Passed)
		}
	}
	if len(at) == 0 {
		t.Error("none began")
	}
	w = newWorld(t, 2)
	w.now = w.now.In(zone)
	w.policy.Windows = []proof.Window{{From: 12 * hour, To: 13 * hour}}
	w.policy.At = []proof.Reason{proof.Idle}
	w.pass(day)
	w.pass(day + 40*minute)
	if one := w.waits(0, proof.WaitWindow); one.Until.In(zone).Hour() != 12 {
		t.Errorf("%+v", one)
	}
	w.policy.At = proof.Reasons()
	w.policy.Withhold = true
	if b := w.until(2 * minute); b.Reason != proof.Boot { // a window is for the reason idle
		t.Errorf("%+v", b)
	}
}

func caseEvery(t *testing.T) {
	w := provedWorld(t, 8)
	last := map[gpu.DeviceID]time.Time{}
	n := 0
	for range 60 * 24 * 6 {
		w.pass(10 * minute)
		for _, b := range w.last.Begin {
			if before, ok := last[b.GPU]; ok && (w.now.Sub(before) > 8*day || w.now.Sub(before) < 6*day) {
				t.Errorf("%s: %v", b.GPU, w.now.Sub(before))
			}
			last[b.GPU] = w.now
			n++
			w.end(b.GPU, proof.Passed)
		}
	}
	if n < 8*8 || n > 8*11 {
		t.Errorf("%d proofs of 8 GPUs in 60 days", n)
	}
}

// The boot time is computed from two clocks, and differs a little each time.
func caseUnchanged(t *testing.T) {
	w := provedWorld(t, 8)
	before := w.encoded(w.state)
	for i := range 600 {
		w.node.BootTime = w.booted.Add(time.Duration(i%5) * time.Millisecond)
		w.gpu(i % 8).Holders = [][]string{nil, {"pod default/train"}}[i/8%2]
		w.pass(second)
	}
	if after := w.encoded(w.state); after != before {
		t.Errorf("from\n%s to\n%s", before, after)
	}
}
