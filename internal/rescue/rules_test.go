package rescue_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// An operator is shown all mistakes of a policy at once, each with the valid values.
func TestPolicyCheck(t *testing.T) {
	if err := rescue.Default().Check(); err != nil {
		t.Error(err)
	}
	err := rescue.Policy{MaxPercent: 200, QuorumTime: time.Second, Delay: -1, CoolDown: 48 * time.Hour, Deadline: -1}.Check()
	for _, want := range []string{
		`max_gpus = "0": a number from 1 to 64`, `max_nodes = "0"`, `max_percent = "200": a number from 0 to 50`, `attempts = "0"`, `quorum_nodes = "0"`,
		`quorum_time = "1s": a time from 1m0s to 24h0m0s`, `delay = "-1ns"`, `cool_down = "48h0m0s"`, `deadline = "-1ns"`,
	} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s is missing in %v", want, err)
		}
	}
}

// A fault of a MIG instance moves the work of that instance, one of the GPU that of all.
func TestInstances(t *testing.T) {
	w := newWorld(t, 3, 1)
	id := uuid("kube", 0, 0)
	for n := range 3 {
		node, parent := w.node("kube", n), uuid("kube", n, 0)
		node.Devices = nil
		for i := range uint32(4) {
			node.Devices = append(node.Devices, rescue.Device{
				ID: gpu.DeviceID(fmt.Sprintf("MIG-%d-%d", n, i)), At: gpu.Placement{GPU: parent, GI: i, CI: gpu.Whole}, Kind: "gpu", Healthy: true,
			})
		}
	}
	for i := range 3 {
		w.run(fmt.Sprint("pod-", i), "kube", 0, i)
	}
	f := xid(94)
	f.At, f.Since = gpu.Placement{GPU: id, GI: 1, CI: gpu.Whole}, w.now
	w.node("kube", 0).Faults, w.node("kube", 0).Devices[1].Healthy = []rescue.Fault{f}, false
	w.pass(minute)
	w.answer(w.acts("of one instance", "pod-1")[0], rescue.Accepted)
	w.move("pod-1", "kube", 1, 0)
	w.pass(5 * minute)
	w.acts("its neighbours stay")
	f.At, f.Cause = gpu.WholeGPU(id), "XID_79"
	w.node("kube", 0).Faults = []rescue.Fault{f}
	for i := range 4 {
		w.node("kube", 0).Devices[i].Healthy = false
	}
	w.pass(minute)
	w.acts("of the GPU", "pod-0", "pod-2")
}

// Work with two faulty GPUs is stopped once.
func TestTwoFaultyGPUs(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.policy.MaxGPUs = 4
	w.run("job", "nomad", 0, 0, 1)
	w.fault("nomad", 0, 0, xid(95))
	w.fault("nomad", 0, 1, xid(79))
	w.pass(minute)
	w.answer(w.acts("both are faulty", "job")[0], rescue.Accepted)
	for range 5 {
		w.pass(3 * time.Second)
		w.acts("it ends")
	}
	w.move("job", "nomad", 1, 0, 1)
	w.pass(minute)
	w.outcomes("it has moved", rescue.Moved)
}

// The workloads of a shared GPU are one attempt. Those without a place wait in it, and need no other one.
func TestSharedGPU(t *testing.T) {
	w := newWorld(t, 2, 2)
	for n := range 2 {
		for g := range 2 {
			w.node("kube", n).Devices[g].Units = 3
		}
	}
	for i := range 3 {
		w.run(fmt.Sprint("pod-", i), "kube", 0, 0)
	}
	for i := range 7 { // two units are free
		n, g := 1, i/3
		if i >= 6 {
			n, g = 0, 1
		}
		w.run(fmt.Sprint("other-", i), "kube", n, g)
	}
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	for _, a := range w.acts("two places", "pod-0", "pod-1") {
		w.answer(a, rescue.Accepted)
	}
	w.waits("two places", rescue.ReasonNoPlace)
	w.move("pod-0", "kube", 0, 1)
	w.move("pod-1", "kube", 0, 1)
	for range 5 {
		w.pass(minute)
		w.acts("no place for the third")
	}
	w.work("other-0").Phase = rescue.Ended
	w.pass(time.Second)
	w.acts("a place for the third", "pod-2")
	if len(w.state.Ledger.Rescues) != 1 {
		w.Errorf("%d attempts", len(w.state.Ledger.Rescues))
	}
}

// Where the orchestrator moves all work of a device at once, all of it must be fit to move.
func TestByDevice(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.node("kube", 0).Devices[0].Units = 2
	w.run("pod-0", "kube", 0, 0).ByDevice = true
	bare := w.run("pod-1", "kube", 0, 0)
	bare.ByDevice, bare.Controller = true, rescue.Unmanaged
	w.run("by a device plugin", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.acts("one is a bare pod", "by a device plugin")
	w.refused("one is a bare pod", rescue.ReasonController)
	w.state = rescue.State{Ledger: rescue.NewLedger()}.Lead()
	w.work("pod-1").Controller = rescue.Service
	w.pass(time.Second)
	all := w.acts("both can move", "by a device plugin", "pod-0", "pod-1")
	if len(all) != 2 || all[1].Device != uuid("kube", 0, 0) || len(all[1].Work) != 2 {
		w.Fatalf("%+v", all)
	}
	w.answer(all[1], rescue.Accepted)
	w.move("pod-0", "kube", 1, 0)
	w.pass(time.Second)
	w.waits("one of two has ended", rescue.ReasonEnding)
	w.move("pod-1", "kube", 1, 1)
	w.pass(time.Second)
	w.outcomes("both have ended", rescue.Open, rescue.Moved)
}

// What the orchestrator refuses for good, or does not let through in time, is not tried again while the fault lasts.
func TestRefused(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.policy.Deadline = 10 * minute
	w.run("denied", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	a := w.acts("at first", "denied")[0]
	w.state = w.state.Answered(a, rescue.Answer{Kind: rescue.Denied, Text: strings.Repeat("more than one PodDisruptionBudget ", 50)}, w.now)
	for range 10 {
		w.pass(minute)
		w.acts("denied")
		w.refused("denied", rescue.ReasonRefused)
	}
	w.repair("kube", 0)
	w.pass(time.Second)
	w.fault("kube", 0, 0, xid(79))
	w.pass(minute)
	a = w.acts("another fault", "denied")[0]
	for range 50 {
		if len(w.last.Acts) > 0 {
			w.answer(a, rescue.Blocked)
		}
		w.pass(15 * time.Second)
	}
	w.acts("given up")
	w.refused("given up", rescue.ReasonDeadline)
}

// In mode report an act is listed once while the fault lasts, has its slot for as long as it would take, and holds up no real one.
func TestReport(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.policy.MaxPercent = 0
	for _, c := range w.clusters {
		c.Mode = rescue.ModeReport
		w.run("a-"+c.Name, c.Name, 0, 0)
	}
	w.fault("nomad", 0, 0, xid(95))
	w.pass(time.Second)
	w.fault("kube", 0, 0, xid(79))
	w.pass(minute)
	if a := w.acts("the first", "a-nomad")[0]; !a.Listed {
		w.Errorf("%+v", a)
	}
	w.waits("the second has no slot", rescue.ReasonNodes)
	w.pass(34 * time.Second)
	w.acts("the first would end")
	w.pass(w.policy.CoolDown + time.Second)
	w.acts("the second", "a-kube")
	for range 20 {
		w.pass(minute)
		w.acts("both were listed")
	}
	w.refused("both were listed", rescue.ReasonListed)
	w.cluster("nomad").Mode = rescue.ModeAct
	w.pass(time.Second)
	if a := w.acts("mode act", "a-nomad")[0]; a.Listed || a.Try != 1 {
		w.Errorf("%+v", a)
	}
}

// Where the servers do not show the health of a device, the word of the agent counts when it was given twice, 30 s apart.
func TestTwoReports(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.policy.Delay = 0
	w.run("pod", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	reports := func(after time.Duration, comes bool) {
		w.now = w.now.Add(after)
		w.show()
		w.work("pod").Holds[0].Shown = rescue.NotShown
		w.cluster("kube").ReadAt, w.cluster("nomad").ReadAt = w.now, w.now
		if comes {
			w.node("kube", 0).ReportedAt = w.now
		}
		w.next()
	}
	reports(0, true)
	w.acts("one report")
	w.waits("one report", rescue.ReasonNotShown)
	reports(40*time.Second, false)
	w.acts("the same report")
	reports(time.Second, true)
	w.acts("another report", "pod")

	n := newWorld(t, 3, 4)
	n.run("job", "nomad", 0, 0)
	n.fault("nomad", 0, 0, xid(95))
	n.pass(minute)
	n.state = rescue.State{Ledger: rescue.NewLedger()}.Lead()
	n.work("job").Holds[0].Shown = rescue.NotShown
	for range 3 {
		n.now = n.now.Add(minute)
		n.answering()
		n.next()
		n.acts("there are no reports")
	}
}

// A node of both orchestrators is one node, and its GPU is free only if no work of either has it.
func TestNodeOfBoth(t *testing.T) {
	w := newWorld(t, 4, 1)
	for n := range 4 {
		w.node("kube", n).Devices[0].ID = uuid("nomad", n, 0)
		w.node("kube", n).Devices[0].At = w.node("nomad", n).Devices[0].At
		w.node("kube", n).Hardware, w.node("nomad", n).Hardware = fmt.Sprint("node-", n), fmt.Sprint("node-", n)
	}
	w.run("pod", "kube", 0, 0).Controller = rescue.System
	for n := range 2 {
		w.fault("kube", n, 0, xid(95))
		w.fault("nomad", n, 0, xid(95))
	}
	w.pass(minute)
	if s := w.state.Ledger.Stop; s != nil {
		w.Errorf("two nodes: %+v", s)
	}
	if len(w.last.Free) != 2 || w.last.Free[0].GPU != uuid("nomad", 1, 0) || w.last.Free[1].GPU != uuid("nomad", 1, 0) {
		w.Errorf("free: %+v", w.last.Free)
	}
	w.fault("nomad", 2, 0, xid(95))
	w.pass(time.Second)
	if w.state.Ledger.Stop == nil {
		w.Error("three nodes")
	}
}

// A clock that was set back neither frees a budget nor holds it for ever.
func TestClockSetBack(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.run("a", "nomad", 0, 0)
	w.run("b", "nomad", 0, 1)
	w.fault("nomad", 0, 0, xid(95))
	w.fault("nomad", 0, 1, xid(79))
	w.pass(minute)
	w.answer(w.acts("the first", "a")[0], rescue.Accepted)
	w.move("a", "nomad", 1, 0)
	w.pass(time.Second)
	w.state = w.state.Resumed(w.now)
	w.now = w.now.Add(-48 * time.Hour)
	for range 59 {
		w.pass(minute)
		w.acts("within an hour")
	}
	w.pass(2 * minute)
	w.acts("an hour later", "b")
	for n := range 3 {
		w.fault("nomad", n, 2, xid(119))
	}
	w.pass(minute)
	if w.state.Ledger.Stop == nil {
		w.Error("a resume of before has no effect on later faults")
	}
}

// A cluster that is taken out of the configuration holds no budget for longer than a day.
func TestClusterRemoved(t *testing.T) {
	w := newWorld(t, 3, 4)
	w.policy.MaxPercent = 0
	w.run("pod", "kube", 0, 0)
	w.run("job", "nomad", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("before", "pod")[0], rescue.Accepted)
	w.cluster("kube").Mode = rescue.ModeOff
	w.fault("nomad", 0, 0, xid(79))
	w.pass(2 * minute)
	w.acts("its act may be under way")
	w.waits("its act may be under way", rescue.ReasonNodes)
	w.pass(24 * time.Hour)
	w.acts("a day later", "job")
}

// Two objects of one name make a cluster one that can't be read.
func TestTwoOfOneName(t *testing.T) {
	for name, change := range map[string]func(c *rescue.Cluster){
		"two nodes": func(c *rescue.Cluster) { c.Nodes[1].Name = c.Nodes[0].Name },
		"two pods":  func(c *rescue.Cluster) { c.Work = append(c.Work, c.Work[0]) },
	} {
		w := newWorld(t, 3, 4)
		w.run("pod", "kube", 0, 0)
		w.fault("kube", 0, 0, xid(95))
		w.pass(minute)
		w.acts("before", "pod")
		change(w.cluster("kube"))
		w.pass(minute)
		w.acts(name)
		w.waits(name, rescue.ReasonUnread)
	}
	w := newWorld(t, 3, 4)
	w.clusters = append(w.clusters, newCluster("kube", 3, 4))
	w.pass(minute)
	if x := w.waits("two clusters", rescue.ReasonUnread); !strings.Contains(x.Text, `two clusters have the name "kube"`) {
		w.Error(x.Text)
	}
}

// The ledger fits a Nomad variable, whatever happens within a day, and no rescue is made that it could not have.
func TestLedgerFull(t *testing.T) {
	w := newWorld(t, 1, 1)
	long := "kube-" + strings.Repeat("x", 25)
	w.clusters = []*rescue.Cluster{newCluster(long, 130, 2)}
	w.policy = rescue.Policy{MaxGPUs: 1, MaxNodes: 1000, Attempts: 1, QuorumNodes: 1000, QuorumTime: minute}
	rescued := 0
	for n := range 130 {
		id := fmt.Sprintf("%d-%s", n, strings.Repeat("i", 33))
		one := w.run(id, long, n, 0)
		one.Name, one.Namespace = strings.Repeat("n", 50), strings.Repeat("s", 20)
		w.fault(long, n, 0, rescue.Fault{State: health.GPULost, Repair: health.Replace, Cause: "RECOVERY_ACTION_DRAIN_AND_RESET", HoldersKnown: true})
		for _, a := range w.pass(time.Second).Acts {
			rescued++
			w.state = w.state.Answered(a, rescue.Answer{Kind: rescue.Denied, Text: strings.Repeat("t", 1000)}, w.now)
		}
		if size := len(text(t, w.state.Ledger)); size > 64<<10 {
			t.Fatalf("%d bytes after %d rescues", size, rescued)
		}
	}
	if x := w.waits("full", rescue.ReasonLedger); rescued != 80 || x.Until.Sub(w.now) > 24*time.Hour {
		t.Errorf("%d rescues, %+v", rescued, x)
	}
	t.Logf("%d rescues: %d bytes", rescued, len(text(t, w.state.Ledger)))
	w.pass(25 * time.Hour)
	if len(w.last.Acts) == 0 {
		t.Errorf("a day later: %+v", w.last.Waits)
	}
}

// A place is certain: whatever the order and the places of the replacements are, each gets one. And where only one act is to be made and there is a
// place, it is made.
func TestPlaces(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 27)) //nolint:gosec // a test that repeats
	acts := 0
	for range 400 {
		w := newWorld(t, 1, 1)
		c := newCluster("nomad-x", 5, 4)
		w.clusters = []*rescue.Cluster{c}
		w.policy.MaxNodes, w.policy.MaxGPUs, w.policy.QuorumNodes, w.policy.Delay = 5, 4, 100, 0
		s := &storm{world: w, Rand: r, sent: map[string]*sent{}}
		s.fill(c)
		struck := 1 + r.IntN(4)
		for range struck {
			w.fault(c.Name, r.IntN(5), r.IntN(4), xid(r.IntN(100)))
		}
		w.pass(time.Second)
		if struck == 1 && len(w.last.Acts) == 0 {
			for _, x := range w.last.Waits {
				if old := s.work(x.Work); x.Reason == rescue.ReasonNoPlace && s.place(c, &rescue.Work{Pool: old.Pool, Needs: old.Needs}, old) {
					t.Fatalf("it has a place: %+v", x)
				}
			}
		}
		for _, i := range r.Perm(len(w.last.Acts)) {
			s.stop(w.last.Acts[i], w.last.Acts[i].Work[0].ID)
			acts++
		}
	}
	if acts < 100 {
		t.Errorf("only %d acts", acts)
	}
}

// Work of which it is not certain where it may run waits, also while GPUs are free, and the text names what it has. It is moved as soon as that is known.
func TestPoolUnknown(t *testing.T) {
	for _, cluster := range []string{"kube", "nomad"} {
		w := newWorld(t, 3, 1)
		one := w.run("one", cluster, 0, 0)
		pool := one.Pool
		one.Pool, one.PoolUnknown = "", "persistent volume claim data, which one node mounts at a time"
		w.fault(cluster, 0, 0, xid(95))
		for range 3 {
			w.pass(minute)
			w.acts("not known")
		}
		if x := w.waits("not known", rescue.ReasonNoPlace); !strings.HasSuffix(x.Text, "which nodes may take default/one: it has "+one.PoolUnknown) {
			w.Error(x.Text)
		}
		if len(w.state.Ledger.Rescues) > 0 {
			w.Errorf("%s: a slot of the budget is taken: %+v", cluster, w.state.Ledger.Rescues)
		}
		one = w.work("one")
		one.Pool, one.PoolUnknown = pool, ""
		w.pass(time.Second)
		w.acts("known", "one")
	}
}

// With consent to end work of lower priority, a replacement does not take the last free place from another one: it waits until that has it.
func TestPreemptAfterOthers(t *testing.T) {
	w := newWorld(t, 2, 2)
	w.policy.Preempt, w.policy.MaxGPUs = true, 2
	w.run("a", "nomad", 0, 0)
	b := w.run("b", "nomad", 0, 1)
	b.Preempts, b.Victims = true, 1
	w.run("low", "nomad", 1, 0)
	w.fault("nomad", 0, 0, xid(95))
	w.pass(time.Second)
	w.fault("nomad", 0, 1, xid(79))
	w.pass(minute)
	w.answer(w.acts("one place is free", "a")[0], rescue.Accepted)
	w.waits("one place is free", rescue.ReasonNoPlace)
	w.move("a", "nomad", 1, 1)
	w.pass(time.Second)
	if one := w.acts("it is taken", "b")[0]; one.Victims != 1 {
		w.Errorf("%+v", one)
	}
}

// A call that was not made is no try. If an earlier one had no answer, it may be done, and the move stays under way.
func TestNotMade(t *testing.T) {
	w := newWorld(t, 3, 1)
	w.run("one", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("at first", "one")[0], rescue.NotMade)
	if m := w.state.Ledger.Rescues[0].Moves[0]; m.Tries != 0 || !m.Sent.IsZero() {
		t.Errorf("after a call that was not made: %+v", m)
	}
	w.pass(10 * time.Second)
	w.acts("before the time is over")
	w.pass(10 * time.Second)
	w.answer(w.acts("again", "one")[0], rescue.Failed)
	w.pass(20 * time.Second)
	a := w.acts("for the second time", "one")[0]
	if a.Try != 2 {
		t.Errorf("try %d", a.Try)
	}
	w.answer(a, rescue.NotMade)
	w.work("one").Phase = rescue.Ended
	w.pass(15 * time.Second)
	w.outcomes("the call without an answer was done", rescue.Moved)
	if len(w.last.Ended) != 1 || w.last.Ended[0].Move.Outcome != rescue.Moved || w.last.Ended[0].Work != "one" {
		t.Errorf("ended: %+v", w.last.Ended)
	}
}

// The agent looks every few seconds at who has a GPU: it may still name work that was moved away and is gone. Other work that the servers do not show
// is awaited.
func TestAgentIsLate(t *testing.T) {
	w := newWorld(t, 3, 1)
	w.run("one", "kube", 0, 0)
	w.fault("kube", 0, 0, xid(95))
	w.pass(minute)
	w.answer(w.acts("at first", "one")[0], rescue.Accepted)
	w.move("one", "kube", 1, 0)
	w.pass(time.Second)
	w.outcomes("replaced", rescue.Moved)
	c := w.cluster("kube")
	c.Work = slices.DeleteFunc(c.Work, func(one rescue.Work) bool { return one.ID == "one" })
	for id, want := range map[string]int{"one": 0, "two": 1} {
		w.node("kube", 0).Faults[0].Holders = []string{id}
		w.next()
		if len(w.last.Waits) != want {
			t.Errorf("agent names %s: %+v", id, w.last.Waits)
		}
	}
}

// Moves that have ended are told once, also those that the ledger does not keep.
func TestEndedMoves(t *testing.T) {
	w := newWorld(t, 60, 2)
	w.policy.MaxNodes, w.policy.QuorumNodes, w.policy.MaxGPUs = 1000, 1000, 2
	for n := range 50 {
		w.run(fmt.Sprint("one-", n), "kube", n, 0)
		w.fault("kube", n, 0, xid(95))
	}
	w.pass(minute)
	for _, a := range w.last.Acts {
		w.answer(a, rescue.NotMade)
	}
	sent := len(w.last.Acts)
	if sent <= 40 {
		t.Fatalf("%d acts", sent)
	}
	for n := range 50 {
		w.work(fmt.Sprint("one-", n)).Phase = rescue.Ended
	}
	if w.pass(time.Second); len(w.last.Ended) != sent {
		t.Errorf("%d of %d moves are told as ended", len(w.last.Ended), sent)
	}
	if w.pass(time.Second); len(w.last.Ended) != 0 {
		t.Errorf("told again: %+v", w.last.Ended)
	}
}

// Nodes of one cluster, or of two clusters of one orchestrator, that have one hostname are several: for the budget of nodes and the quorum.
func TestSameHostname(t *testing.T) {
	for name, where := range map[string][]string{"in one region": {"nomad", "nomad", "nomad"}, "in three regions": {"nomad", "nomad-b", "nomad-c"}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 4, 2)
			w.clusters = append(w.clusters, newCluster("nomad-b", 4, 2), newCluster("nomad-c", 4, 2))
			for _, c := range w.clusters {
				for n := range c.Nodes {
					c.Nodes[n].Hardware = "ubuntu"
				}
			}
			w.policy.MaxPercent = 0
			strike := func(n int) {
				w.run(fmt.Sprint("w", n), where[n], n, 0)
				w.fault(where[n], n, 0, xid(95))
			}
			strike(0)
			strike(1)
			w.pass(minute)
			if len(w.last.Acts) != 1 {
				t.Errorf("acts on two nodes, and one is allowed: %+v", w.last.Acts)
			}
			w.waits("the other one", rescue.ReasonNodes)
			strike(2)
			w.pass(time.Second)
			if w.state.Ledger.Stop == nil {
				t.Error("three nodes, and two are allowed")
			}
		})
	}
}

// A ledger of the longest names fits a Nomad variable, too, with what is to be added: answers, nodes that are ineligible, and the stop of a person.
func TestLedgerOfLongNames(t *testing.T) {
	w := newWorld(t, 1, 1)
	c := newCluster("nomad-"+strings.Repeat("x", 25), 130, 2)
	w.clusters = []*rescue.Cluster{c}
	w.policy = rescue.Policy{MaxGPUs: 1, MaxNodes: 1000, Attempts: 1, QuorumNodes: 1000, QuorumTime: minute, Ineligible: true}
	for n := range c.Nodes {
		node := &c.Nodes[n]
		node.Name, node.Hardware = fmt.Sprint(strings.Repeat("l", 60), n), fmt.Sprint(strings.Repeat("h", 60), n)
		c.Pools["all"][n] = node.Name
		id := fmt.Sprintf("%d-%s", n, strings.Repeat("i", 33))
		one := w.run(id, c.Name, n, 0)
		one.Name, one.Namespace = strings.Repeat("n", 63), strings.Repeat("s", 63)
	}
	for n := range c.Nodes {
		for g := range 1 + n%2 {
			w.fault(c.Name, n, g, rescue.Fault{State: health.GPULost, Repair: health.Replace, Cause: "RECOVERY_ACTION_DRAIN_AND_RESET", HoldersKnown: true})
		}
		for _, a := range w.pass(time.Second).Acts {
			w.state = w.state.Answered(a, rescue.Answer{Kind: rescue.Blocked, Text: strings.Repeat("t", 1000), Remedy: strings.Repeat("r", 1000)}, w.now)
		}
		stopped := w.state.Stopped(strings.Repeat("b", 100), strings.Repeat("\"", 300), w.now)
		if size := len(text(t, stopped.Ledger)); size > rescue.LedgerBytes {
			t.Fatalf("%d bytes after %d rescues", size, len(w.state.Ledger.Rescues))
		}
	}
	w.waits("full", rescue.ReasonLedger)
	if n := len(w.state.Ledger.Rescues); n < 30 {
		t.Errorf("%d rescues", n)
	}
}

// A node whose names, or that of a GPU or cause, are longer than those of any, has no work moved: it would fill the ledger of all others.
func TestLongNames(t *testing.T) {
	for name, change := range map[string]func(w *world, f *rescue.Fault){
		"cause":    func(_ *world, f *rescue.Fault) { f.Cause = strings.Repeat("X", 2000) },
		"hostname": func(w *world, _ *rescue.Fault) { w.node("nomad", 0).Hardware = strings.Repeat("\x01", 300) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, 2)
			w.run("w0", "nomad", 0, 0)
			f := xid(95)
			change(w, &f)
			w.fault("nomad", 0, 0, f)
			w.run("w1", "nomad", 1, 0)
			w.fault("nomad", 1, 0, xid(79))
			w.pass(minute)
			w.acts("the other node", "w1")
			w.refused("too long", rescue.ReasonLedger)
		})
	}
}
