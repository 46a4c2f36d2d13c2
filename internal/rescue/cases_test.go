package rescue_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

const minute = time.Minute

// orchestrators runs a case under both.
func orchestrators(test func(w *world, cluster string)) func(*testing.T) {
	return func(t *testing.T) {
		for _, cluster := range []string{"nomad", "kube"} {
			t.Run(cluster, func(t *testing.T) { test(newWorld(t, 4, 4), cluster) })
		}
	}
}

// alone runs a case under one.
func alone(test func(w *world)) func(*testing.T) {
	return func(t *testing.T) { test(newWorld(t, 4, 4)) }
}

// TestCases has the cases of the contract that concern the decision, by their numbers. 24 is TestReportIsAct, 25 TestRandomFleets, 27 BenchmarkDecision.
// The others are about the agents (15 and 16 in part, 17) and the reset (18 to 23).
func TestCases(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"1 a service is moved, its neighbours are not":                  orchestrators(case1),
		"2 batch work is moved once":                                    orchestrators(case2),
		"3 work that no controller starts elsewhere stays":              orchestrators(case3),
		"4 the act names work, node and GPU, and holds right before":    orchestrators(case4),
		"5 a disruption budget blocks for as long as it lasts":          alone(case5),
		"6 work that another one has replaced is left alone":            orchestrators(case6),
		"7 devices without a fault are no reason":                       alone(case7),
		"8 a missing or hung driver is no reason":                       orchestrators(case8),
		"9 one cause on three nodes stops everything":                   orchestrators(case9),
		"9 without a delay at most quorum_nodes acts come before":       alone(case9Undelayed),
		"10 one node at a time":                                         orchestrators(case10),
		"10 one GPU of a node within an hour":                           alone(case10GPUs),
		"11 a controller that ends after it reserved repeats the act":   orchestrators(case11),
		"12 a damaged ledger stops everything":                          alone(case12),
		"13 a fault that ends before the act is let through cancels it": alone(case13),
		"14 a new fault after that is acted on":                         alone(case14),
		"15 causes that alternate are one fault":                        alone(case15),
		"16 a silent agent neither has faults nor has ended them":       alone(case16),
		"26 of two controllers one acts":                                alone(case26),
		"28 no act before the servers show the device as unhealthy":     orchestrators(case28),
		"29 work of lower priority is not ended without consent":        orchestrators(case29),
		"30 without a place work goes on":                               orchestrators(case30),
		"31 an allocation whose client is away is not stopped":          alone(case31),
		"32 a budget that will not let it through needs a person":       alone(case32),
		"33 a decision about a pod that is gone makes no call":          alone(case33),
		"34 healthy in the pod's status refutes nothing":                alone(case34),
		"35 a namespace that can't be seen does not make a GPU free":    orchestrators(case35),
		"36 a leader that was stopped sends nothing":                    alone(case36),
		"37 eligibility that an operator changed stays":                 alone(case37),
		"38 work that can't be ended is not stopped again":              orchestrators(case38),
	} {
		t.Run(name, test)
	}
}

func case1(w *world, cluster string) {
	for g := range 4 {
		w.run(fmt.Sprint("job-", g), cluster, 0, g)
	}
	w.pass(minute)
	w.acts("healthy")
	w.fault(cluster, 0, 3, xid(95))
	w.pass(0)
	w.acts("at once")
	if until := w.waits("at once", rescue.ReasonDelay).Until; !until.Equal(w.now.Add(minute)) || !w.last.Wake.Equal(until) {
		w.Errorf("it waits until %v, and wakes at %v", until, w.last.Wake)
	}
	w.pass(minute)
	w.answer(w.acts("after the delay", "job-3")[0], rescue.Accepted)
	w.work("job-3").Phase = rescue.Ending
	w.pass(time.Second)
	w.acts("it ends")
	w.waits("it ends", rescue.ReasonEnding)
	w.move("job-3", cluster, 1, 0)
	w.pass(time.Second)
	w.acts("it has moved")
	w.outcomes("it has moved", rescue.Moved)
	if len(w.last.Free) != 1 || w.last.Free[0].GPU != uuid(cluster, 0, 3) {
		w.Errorf("free: %+v", w.last.Free)
	}
	w.pass(48 * time.Hour)
	w.acts("two days later")
	w.outcomes("two days later")
}

func case2(w *world, cluster string) {
	w.run("batch", cluster, 0, 0).Controller = rescue.Batch
	w.fault(cluster, 0, 0, xid(95))
	w.pass(minute)
	a := w.acts("after the delay", "batch")[0]
	w.answer(a, rescue.Accepted)
	for range 5 {
		w.pass(time.Second)
		w.acts("no second call")
	}
	w.move("batch", cluster, 2, 1)
	w.pass(time.Second)
	w.outcomes("it has moved", rescue.Moved)
}

func case3(w *world, cluster string) {
	for i, kind := range []rescue.Controller{rescue.System, rescue.SystemBatch, rescue.Static, rescue.Unmanaged} {
		w.run(kind.String(), cluster, 0, i).Controller = kind
	}
	w.run("fails for good", cluster, 1, 0).LosesAttempt = true
	for g := range 4 {
		w.fault(cluster, 0, g, xid(95))
	}
	w.fault(cluster, 1, 0, xid(95))
	w.pass(minute)
	w.acts("after the delay")
	w.refused("after the delay", rescue.ReasonController)
	w.refused("after the delay", rescue.ReasonAttempt)
	if len(w.last.Refusals) != 5 || len(w.state.Ledger.Rescues) != 0 {
		w.Errorf("%d refusals, %+v", len(w.last.Refusals), w.state.Ledger.Rescues)
	}
}

func case4(w *world, cluster string) {
	w.run("pod", cluster, 2, 1)
	w.fault(cluster, 2, 1, xid(79))
	w.pass(minute)
	a := w.acts("after the delay", "pod")[0]
	if a.Cluster != cluster || a.Node != w.node(cluster, 2).Name || a.GPU != uuid(cluster, 2, 1) || a.Cause != "XID_79" || a.Name != "default/pod" || a.Try != 1 || a.Listed {
		w.Errorf("%+v", a)
	}
	still := func(when string, want bool) {
		w.Helper()
		if ok, why := w.policy.Still(w.state, a, w.fleet(), w.now); ok != want || ok != (why == "") {
			w.Errorf("%s: %t %q", when, ok, why)
		}
	}
	still("read right before", true)
	for when, change := range map[string]func(){
		"it has ended":               func() { w.work("pod").Phase = rescue.Ended },
		"its node is away":           func() { w.work("pod").Phase = rescue.Unknown },
		"it is ending":               func() { w.work("pod").Phase = rescue.Ending },
		"it is elsewhere":            func() { w.work("pod").Node = w.node(cluster, 1).Name },
		"it has another GPU":         func() { w.work("pod").Holds[0].Device = uuid(cluster, 2, 2) },
		"the servers show no fault":  func() { w.work("pod").Holds[0].Shown = rescue.ShownHealthy },
		"the GPU has recovered":      func() { w.repair(cluster, 2) },
		"the node is being drained":  func() { w.node(cluster, 2).Draining = true },
		"the servers do not answer":  func() { w.cluster(cluster).Problem = "connection refused" },
		"the mode has changed":       func() { w.cluster(cluster).Mode = rescue.ModeReport },
		"a person has stopped it":    func() { w.state = w.state.Stopped("anna", "upgrade", w.now) },
		"another process has begun":  func() { w.state.Ledger.Term++ },
		"its controller has changed": func() { w.work("pod").Controller = rescue.System },
	} {
		clusters, state := clone(w), w.state
		change()
		still(when, false)
		w.clusters, w.state = clusters, state
	}
	still("read again", true)
}

func case5(w *world) {
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("after the delay", "pod")[0], rescue.Blocked)
	calls := 0
	for range 3600 {
		w.pass(time.Second)
		for _, a := range w.last.Acts {
			calls++
			w.answer(a, rescue.Blocked)
		}
	}
	if calls < 3600/12 || calls > 3600/8 {
		w.Errorf("%d calls in an hour", calls)
	}
	if n := len(w.state.Ledger.Rescues); n != 1 {
		w.Errorf("%d attempts", n)
	}
	w.pass(time.Second)
	if until := w.waits("blocked", rescue.ReasonBlocked).Until; until.Sub(w.now) > 12*time.Second {
		w.Errorf("the next call is at %v, and it is %v", until, w.now)
	}
	w.pass(20 * time.Second) // the budget lets it through
	w.answer(w.acts("lifted", "pod")[0], rescue.Accepted)
	w.move("pod", "kube", 1, 0)
	w.pass(time.Second)
	w.outcomes("lifted", rescue.Moved)
}

func case6(w *world, cluster string) {
	w.run("old", cluster, 0, 0)
	w.fault(cluster, 0, 0, xid(95))
	w.pass(minute)
	a := w.acts("after the delay", "old")[0]
	w.move("old", cluster, 1, 0)
	if ok, why := w.policy.Still(w.state, a, w.fleet(), w.now); ok {
		w.Errorf("the old one is gone: %q", why)
	}
	w.pass(time.Second) // decides before the answer is there
	w.answer(a, rescue.NotFound)
	w.pass(20 * time.Second)
	w.acts("the new one lives")
	w.outcomes("the new one lives", rescue.EndedItself)
}

func case7(w *world) {
	for g := range 4 {
		w.run(fmt.Sprint("pod-", g), "kube", 0, g)
		w.node("kube", 0).Devices[g].Healthy = false // the plugin's stream has ended
	}
	for range 30 {
		w.pass(minute)
		w.acts("during the upgrade")
	}
	if len(w.last.Waits)+len(w.last.Refusals) != 0 {
		w.Errorf("%+v %+v", w.last.Waits, w.last.Refusals)
	}
}

func case8(w *world, cluster string) {
	for name, f := range map[string]rescue.Fault{
		"no driver":         {State: health.Unknown, Cause: "NVML_UNAVAILABLE"},
		"hung driver":       {State: health.Unhealthy, Repair: health.Reset, Cause: "NOT_ANSWERING"},
		"maintenance":       {State: health.Unknown, Cause: "MAINTENANCE"},
		"degraded":          {State: health.Degraded, Repair: health.Reset, Cause: "ROW_REMAP_PENDING"},
		"simulated":         {State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Simulated: true},
		"observed":          {State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Advisory: true},
		"first check":       {State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Unconfirmed: true},
		"beside the GPU":    {State: health.Unhealthy, Cause: "FABRIC_UNHEALTHY"},
		"the policy's list": {State: health.Unhealthy, Repair: health.Reset, Cause: "XID_13"},
	} {
		one := newWorld(w.T, 4, 4)
		one.policy.Ignore = []string{"XID_13"}
		f.HoldersKnown = true
		for n := range 4 {
			one.run(fmt.Sprint("job-", n), cluster, n, 0)
			one.fault(cluster, n, 0, f)
		}
		for range 5 {
			one.pass(minute)
			one.acts(name)
		}
		if one.state.Ledger.Stop != nil {
			one.Errorf("%s: %+v", name, one.state.Ledger.Stop)
		}
		if f.State >= health.Unhealthy {
			one.refused(name, rescue.ReasonNotCounted)
		}
	}
}

func case9(w *world, cluster string) {
	for n := range 3 {
		w.run(fmt.Sprint("job-", n), cluster, n, 0)
		w.fault(cluster, n, 0, xid(119))
		w.pass(29 * time.Second)
		w.acts("within 60 s")
	}
	if s := w.state.Ledger.Stop; s == nil || s.By != rescue.ByQuorum || !strings.Contains(s.Text, "3 nodes got XID_119 within 10m0s") {
		w.Fatalf("%+v", s)
	}
	w.restart()
	for range 60 {
		w.pass(minute)
		w.acts("an hour later")
	}
	w.waits("an hour later", rescue.ReasonStopped)
	w.state = w.state.Resumed(w.now)
	w.pass(time.Second)
	w.acts("a person resumed", "job-0")
	for range 20 { // what is acted on has one cause, and that is known
		w.pass(minute)
		for _, a := range w.last.Acts {
			w.answer(a, rescue.Accepted)
			w.move(a.Subject.Work, cluster, 3, len(w.state.Ledger.Rescues)-1)
		}
	}
	w.outcomes("all moved", rescue.Moved, rescue.Moved, rescue.Moved)
	w.fault(cluster, 3, 3, xid(119)) // one more
	w.pass(2 * minute)
	if w.state.Ledger.Stop != nil {
		w.Errorf("%+v", w.state.Ledger.Stop)
	}
}

func case9Undelayed(w *world) {
	w.policy.Delay, w.policy.MaxNodes, w.policy.QuorumNodes = 0, 1000, 3
	big := newCluster("nomad-big", 50, 2)
	w.clusters = append(w.clusters, big)
	acts := 0
	for n := range 50 {
		w.run(fmt.Sprint("job-", n), "nomad-big", n, 0)
		w.fault("nomad-big", n, 0, xid(119))
		acts += len(w.pass(time.Second).Acts)
	}
	if acts != 3 || w.state.Ledger.Stop == nil {
		w.Errorf("%d acts, %+v", acts, w.state.Ledger.Stop)
	}
}

func case10(w *world, cluster string) {
	w.run("a", cluster, 0, 0)
	w.run("b", cluster, 1, 0)
	w.fault(cluster, 0, 0, xid(95))
	w.pass(time.Second)
	w.fault(cluster, 1, 0, xid(79))
	w.pass(minute)
	a := w.acts("the first", "a")[0]
	w.waits("the second", rescue.ReasonNodes)
	w.answer(a, rescue.Accepted)
	w.work("a").Phase = rescue.Ending
	w.pass(20 * time.Second)
	w.acts("the first ends")
	w.move("a", cluster, 2, 0)
	w.pass(time.Second)
	w.acts("the first has moved")
	until := w.waits("the first has moved", rescue.ReasonNodes).Until
	if !until.Equal(w.now.Add(w.policy.CoolDown)) || !w.last.Wake.Equal(until) {
		w.Errorf("it waits until %v, wakes at %v, and it is %v", until, w.last.Wake, w.now)
	}
	w.pass(until.Sub(w.now))
	w.acts("after the cool-down", "b")
}

func case10GPUs(w *world) {
	w.run("a", "nomad", 0, 0)
	w.run("b", "nomad", 0, 1)
	w.fault("nomad", 0, 0, xid(95))
	w.fault("nomad", 0, 1, xid(95))
	w.pass(minute)
	w.answer(w.acts("the first", "a")[0], rescue.Accepted)
	first := w.now
	w.move("a", "nomad", 1, 0)
	w.pass(10 * minute)
	w.acts("ten minutes later")
	if until := w.waits("ten minutes later", rescue.ReasonGPUs).Until; !until.Equal(first.Add(time.Hour)) {
		w.Errorf("it waits until %v, want an hour after %v", until, first)
	}
	w.pass(first.Add(time.Hour).Sub(w.now))
	w.acts("an hour later", "b")
}

func case11(w *world, cluster string) {
	w.run("job", cluster, 0, 0)
	w.fault(cluster, 0, 0, xid(95))
	w.pass(minute)
	w.acts("reserved", "job")
	w.restart() // no call was made, or its answer is lost
	w.pass(time.Second)
	w.acts("while an answer may come")
	w.pass(15 * time.Second)
	again := w.acts("the same act", "job")[0]
	if again.Try != 2 || len(w.state.Ledger.Rescues) != 1 {
		w.Errorf("%+v, %d attempts", again, len(w.state.Ledger.Rescues))
	}
	w.restart()
	w.work("job").Phase = rescue.Ending // it was made
	w.pass(20 * time.Second)
	w.acts("it is ending")
	w.move("job", cluster, 1, 0)
	w.pass(time.Second)
	w.outcomes("one attempt", rescue.Moved)
}

func case12(w *world) {
	w.run("job", "nomad", 0, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.pass(minute)
	w.acts("a good one", "job")
	good := w.state
	change := func(change func(*rescue.Rescue)) rescue.Ledger {
		l := good.Ledger
		r := l.Rescues[0]
		r.Moves = append([]rescue.Move(nil), r.Moves...)
		change(&r)
		l.Rescues = []rescue.Rescue{r}
		return l
	}
	for name, l := range map[string]rescue.Ledger{
		"absent":       {},
		"of a newer":   {Version: 2},
		"too long":     {Version: 1, Rescues: make([]rescue.Rescue, 500)},
		"no time":      change(func(r *rescue.Rescue) { r.Reserved = time.Time{} }),
		"no GPU":       change(func(r *rescue.Rescue) { r.GPU = "" }),
		"no work":      change(func(r *rescue.Rescue) { r.Moves = nil }),
		"no ID":        change(func(r *rescue.Rescue) { r.Moves[0].Work = []rescue.Target{{}} }),
		"tries":        change(func(r *rescue.Rescue) { r.Moves[0].Tries = -1 }),
		"end":          change(func(r *rescue.Rescue) { r.Moves[0].Outcome = rescue.Moved }),
		"the same two": {Version: 1, Rescues: append(good.Ledger.Rescues, good.Ledger.Rescues...)},
	} {
		w.state = rescue.State{Ledger: l, Term: l.Term}
		r := w.pass(minute)
		if len(r.Acts) != 0 || !strings.Contains(r.Problem, "the ledger can't be used") || text(w.T, r.State.Ledger) != text(w.T, l) {
			w.Errorf("%s: %+v %q", name, r.Acts, r.Problem)
		}
	}
}

func case13(w *world) {
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("after the delay", "pod")[0], rescue.Blocked)
	w.pass(5 * time.Second)
	w.repair("kube", 0)
	w.pass(time.Second)
	w.outcomes("recovered", rescue.Cancelled)
	for range 5 {
		w.pass(minute)
		w.acts("recovered")
	}
}

func case14(w *world) {
	case13(w)
	for want, n := range []int{2, 3} { // the third has to wait for the next day
		w.fault("kube", 0, 0, xid(95))
		w.pass(2 * minute)
		if want == 1 {
			w.acts("the third")
			if until := w.waits("the third", rescue.ReasonAttempts).Until; until.Sub(w.now) > 24*time.Hour || until.Sub(w.now) < 23*time.Hour {
				w.Errorf("until %v", until)
			}
			return
		}
		w.answer(w.acts(fmt.Sprint("fault ", n), "pod")[0], rescue.Blocked)
		w.repair("kube", 0)
		w.pass(minute)
	}
}

func case15(w *world) {
	w.run("pod", "kube", 0, 0)
	acts := 0
	for i := range 20 * 60 {
		w.repair("kube", 0)
		w.fault("kube", 0, 0, xid(94+i%2))
		for _, a := range w.pass(time.Second).Acts {
			acts++
			if i != 59 { // a minute after the first
				w.Errorf("an act after %d s", i)
			}
			w.answer(a, rescue.Accepted)
			w.move("pod", "kube", 1, 0)
		}
	}
	if acts != 1 || len(w.state.Ledger.Rescues) != 1 || w.state.Ledger.Stop != nil {
		w.Errorf("%d acts, %d attempts, %+v", acts, len(w.state.Ledger.Rescues), w.state.Ledger.Stop)
	}
}

func case16(w *world) {
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("after the delay", "pod")[0], rescue.Blocked)
	reported := w.now
	for range 12 { // the agent is away for an hour; the API has its last words
		w.now = w.now.Add(5 * minute)
		w.cluster("kube").ReadAt = w.now
		w.next()
		w.acts("while the agent is away")
		w.waits("while the agent is away", rescue.ReasonSilent)
		w.outcomes("while the agent is away", rescue.Open)
		if at := w.node("kube", 0).ReportedAt; !at.Equal(reported) {
			w.Fatal(at)
		}
	}
	w.repair("kube", 0)
	w.pass(time.Second)
	w.outcomes("the agent is back", rescue.Cancelled)
}

// case26 has two controllers that both think that they lead, over one variable with check-and-set.
func case26(w *world) {
	w.run("job", "nomad", 0, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.pass(0)
	w.now = w.now.Add(minute)
	w.answering()
	stored, index := w.state.Ledger, 1
	write := func(r rescue.Result, read int) bool {
		if read != index {
			return false
		}
		stored, index = r.State.Ledger, index+1
		return true
	}
	one, two := w.policy.Next(w.state, w.fleet(), w.now), w.policy.Next(w.state, w.fleet(), w.now)
	read := index
	sent := 0
	for _, r := range []rescue.Result{one, two} {
		if write(r, read) {
			sent += len(r.Acts)
		}
	}
	if sent != 1 || len(stored.Rescues) != 1 {
		w.Errorf("%d acts are sent, %d are reserved", sent, len(stored.Rescues))
	}
	first := rescue.State{Ledger: stored, Term: stored.Term}
	second := first.Lead()
	first.Ledger = second.Ledger
	if r := w.policy.Next(first, w.fleet(), w.now.Add(minute)); len(r.Acts) != 0 || r.Problem != "no act is made: another process leads" {
		w.Errorf("%+v %q", r.Acts, r.Problem)
	}
}

func case28(w *world, cluster string) {
	w.policy.Delay = 0
	w.run("job", cluster, 0, 0)
	w.fault(cluster, 0, 0, xid(95))
	for range 10 {
		w.now = w.now.Add(time.Second)
		w.answering()
		w.show()
		w.work("job").Holds[0].Shown = rescue.ShownHealthy // as the servers still have it
		w.next()
		w.acts("the servers do not have it yet")
		w.waits("the servers do not have it yet", rescue.ReasonNotShown)
	}
	w.pass(time.Second)
	w.acts("the servers have it", "job")
}

func case29(w *world, cluster string) {
	for n := range 4 {
		for g := range 4 {
			w.run(fmt.Sprint("low-", n, "-", g), cluster, n, g)
		}
	}
	w.work("low-0-0").Preempts, w.work("low-0-0").Victims = true, 1
	w.fault(cluster, 0, 0, xid(95))
	w.pass(minute)
	w.acts("without consent")
	w.refused("without consent", rescue.ReasonPreempts)
	w.policy.Preempt = true
	w.work("low-0-0").Victims = 2
	w.pass(time.Second)
	w.acts("two would end")
	w.waits("two would end", rescue.ReasonNoPlace)
	w.work("low-0-0").Victims = 1
	w.pass(time.Second)
	if a := w.acts("with consent", "low-0-0")[0]; a.Victims != 1 {
		w.Errorf("%+v", a)
	}
}

func case30(w *world, cluster string) {
	for g := range 4 {
		w.run(fmt.Sprint("job-", g), cluster, 0, g).Pool = "one"
	}
	w.cluster(cluster).Pools["one"] = []string{w.node(cluster, 0).Name}
	w.fault(cluster, 0, 0, xid(95))
	for range 60 {
		w.pass(minute)
		w.acts("full")
	}
	if x := w.waits("full", rescue.ReasonNoPlace); !strings.Contains(x.Text, "none of the 1 nodes that default/job-0 may use has 1 gpu free and healthy") {
		w.Error(x.Text)
	}
	w.work("job-2").Phase = rescue.Ended
	w.pass(time.Second)
	w.acts("a GPU is free", "job-0")
	if len(w.state.Ledger.Rescues) != 1 {
		w.Errorf("%d attempts", len(w.state.Ledger.Rescues))
	}
}

func case31(w *world) {
	w.run("job", "nomad", 0, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.node("nomad", 0).Ready = false
	w.work("job").Phase = rescue.Unknown
	w.pass(minute)
	for range 6 {
		w.pass(20 * time.Second)
		w.acts("the client is away")
		w.waits("the client is away", rescue.ReasonNode)
	}
	w.node("nomad", 0).Ready = true
	w.pass(time.Second)
	w.acts("the allocation is not known to run")
	w.waits("the allocation is not known to run", rescue.ReasonNotRunning)
	w.work("job").Phase = rescue.Running
	w.pass(time.Second)
	w.acts("it is back", "job")
}

func case32(w *world) {
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	a := w.acts("after the delay", "pod")[0]
	remedy := "set unhealthyPodEvictionPolicy to AlwaysAllow"
	w.state = w.state.Answered(a, rescue.Answer{Kind: rescue.Blocked, Text: "429, and the pod is not ready", Remedy: remedy}, w.now)
	w.pass(time.Second)
	if x := w.waits("not ready", rescue.ReasonBlocked); !x.Alert || !strings.Contains(x.Text, "not ready") || !strings.Contains(x.Text, remedy) {
		w.Errorf("%+v", x)
	}
	w.pass(20 * time.Second)
	w.answer(w.acts("the field is set", "pod")[0], rescue.Accepted)
}

func case33(w *world) {
	w.run("web-0 old", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("after the delay", "web-0 old")[0], rescue.Blocked)
	w.move("web-0 old", "kube", 1, 0)
	for range 4 {
		w.pass(20 * time.Second)
		w.acts("the pod of this name has another UID")
	}
	w.outcomes("no call", rescue.EndedItself)
}

func case34(w *world) {
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(time.Second)
	for range 10 { // the agent is killed, the kubelet restarts: the pod's status shows healthy
		w.now = w.now.Add(minute)
		w.cluster("kube").ReadAt = w.now
		w.work("pod").Holds[0].Shown = rescue.ShownHealthy
		w.next()
		w.acts("the agent is away")
	}
	if len(w.state.Ledger.Rescues) != 0 {
		w.Errorf("%+v", w.state.Ledger.Rescues)
	}
	w.pass(time.Second)
	w.acts("the agent is back", "pod")
}

func case35(w *world, cluster string) {
	w.run("hidden", cluster, 0, 0)
	w.fault(cluster, 0, 0, xid(95))
	w.show()
	c := w.cluster(cluster)
	c.Work = nil // the token does not see its namespace
	for range 3 {
		w.now = w.now.Add(minute)
		w.answering()
		w.next()
		w.acts("not seen")
		if x := w.waits("not seen", rescue.ReasonHolders); !strings.Contains(x.Text, "hidden") || len(w.last.Free) != 0 {
			w.Errorf("%q, free %+v", x.Text, w.last.Free)
		}
	}
	w.run("other", cluster, 0, 0) // shares it, and is seen
	w.show()
	w.node(cluster, 0).Faults[0].Holders = []string{"hidden", "other"}
	w.next()
	w.acts("one of two is seen")
	w.waits("one of two is seen", rescue.ReasonHolders)

	c.Problem = "the token has expired"
	w.next()
	w.acts("no rights")
	if x := w.waits("no rights", rescue.ReasonUnread); !strings.Contains(x.Text, "expired") {
		w.Error(x.Text)
	}
}

// case36 has a leader that stops between its reservation and the call, for 60 s.
func case36(w *world) {
	w.run("job", "nomad", 0, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.pass(minute)
	first, late := w.state, w.acts("reserved", "job")[0]
	w.restart() // the second one leads
	w.pass(25 * time.Second)
	a := w.acts("by the second", "job")[0]
	w.answer(a, rescue.Accepted)
	w.work("job").Phase = rescue.Ending
	first.Ledger = w.state.Ledger // what the first one reads when it goes on
	if ok, why := w.policy.Still(first, late, w.fleet(), w.now); ok || why != "another process leads" {
		w.Errorf("the first sends its act: %q", why)
	}
	if ok, _ := w.policy.Still(w.state, late, w.fleet(), w.now); ok {
		w.Error("an act of the term before is sent")
	}
	w.move("job", "nomad", 1, 0)
	w.pass(minute)
	w.outcomes("one attempt", rescue.Moved)
}

func case37(w *world) {
	w.policy.Ineligible = true
	small := newCluster("nomad-small", 2, 1)
	w.clusters = append(w.clusters, small)
	marks := func(when string, want ...rescue.Mark) {
		w.Helper()
		if got := w.last.Marks; fmt.Sprint(got) != fmt.Sprint(want) {
			w.Fatalf("%s: %+v, want %+v", when, got, want)
		}
	}
	name := small.Nodes[0].Name
	w.fault("nomad-small", 0, 0, xid(79))
	w.pass(time.Second)
	marks("before the delay")
	w.pass(minute)
	want := rescue.Mark{Cluster: "nomad-small", Node: name, Repair: health.Reset, Eligible: rescue.MakeIneligible}
	marks("all GPUs need repair", want)
	w.state = w.state.Marked(want, 100)
	node := &small.Nodes[0]
	node.Mark, node.MarkIsOurs, node.Schedulable, node.ChangedIndex = health.Reset, true, false, 100
	w.restart()
	w.pass(minute)
	marks("done")

	again := rescue.Mark{Cluster: "nomad-small", Node: name, Eligible: rescue.MakeEligible}
	node.Faults, node.Devices[0].Healthy = nil, true
	w.pass(time.Second)
	marks("recovered, and not changed", again)

	node.ChangedIndex = 250 // an operator has drained it
	w.pass(time.Second)
	marks("drained meanwhile", rescue.Mark{Cluster: "nomad-small", Node: name})
	if x := w.waits("drained meanwhile", rescue.ReasonNotOurs); !x.Alert {
		w.Errorf("%+v", x)
	}
	node.Mark, node.MarkIsOurs = health.Reboot, false // by a person
	w.pass(time.Second)
	marks("a person's own mark")
}

func case38(w *world, cluster string) {
	w.run("job", cluster, 0, 0)
	w.run("other", cluster, 1, 0)
	w.fault(cluster, 0, 0, xid(95))
	w.pass(time.Second)
	w.fault(cluster, 1, 0, xid(79))
	w.pass(minute)
	w.answer(w.acts("after the delay", "job")[0], rescue.Accepted)
	w.work("job").Phase = rescue.Ending
	if !w.pass(30 * time.Second).Wake.Equal(w.now.Add(5 * time.Second)) {
		w.Errorf("wakes at %v, and it is %v", w.last.Wake, w.now)
	}
	w.waits("in its time", rescue.ReasonEnding)
	for range 60 {
		w.pass(minute)
		w.acts("stuck")
		if x := w.waits("stuck", rescue.ReasonStuck); !x.Alert || !strings.Contains(x.Text, "reboot") {
			w.Errorf("%+v", x)
		}
		w.waits("the slot stays taken", rescue.ReasonNodes)
	}
	w.move("job", cluster, 2, 0)
	w.pass(time.Second)
	w.pass(w.policy.CoolDown)
	w.acts("the process could be ended", "other")
}

// clone returns the clusters of a world as they are.
func clone(w *world) (all []*rescue.Cluster) {
	for _, c := range w.clusters {
		one := *c
		one.Nodes, one.Work = append([]rescue.Node(nil), c.Nodes...), append([]rescue.Work(nil), c.Work...)
		for i := range one.Nodes {
			one.Nodes[i].Devices = append([]rescue.Device(nil), one.Nodes[i].Devices...)
		}
		for i := range one.Work {
			one.Work[i].Holds = append([]rescue.Hold(nil), one.Work[i].Holds...)
		}
		all = append(all, &one)
	}
	return all
}
