package limits_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// limitOf is what the driver returns for a group.
func (n *node) limitOf(group string) gpu.LimitAnswer {
	n.t.Helper()
	answers, err := n.MemoryLimits(n.t.Context(), []gpu.LimitQuery{{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: n.groups.Path(group)}})
	check.NoError(n.t, err)
	return answers[0]
}

func (n *node) setCount(path string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.sets {
		if strings.HasPrefix(s, path+" ") {
			count++
		}
	}
	return count
}

// fence 13: the limit of a task is set when its group is made, before its first process, although the record of the orchestrator lags behind: the allocation is
// asked for until the servers show it. The driver refuses what is beyond the limit. A task with the share of no policy gets none.
func TestNewTask(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		t.Run(string(b), func(t *testing.T) {
			n := start(t, holders.Nomad, b)
			l, _ := n.run(holders.Nomad)
			n.awaitHealth(health.ReasonNone, "")
			n.reading()
			for i := range 3 {
				w, record, group := n.task(i)
				n.mu.Lock()
				n.lookups[w.ID], n.waiting[w.ID] = record, i // as often as it is not found
				n.mu.Unlock()
				at := n.group(group)
				s := n.await(l, w, limit.Limited, "")
				if s.Driver.Hard != 20*gib || s.Want != 20*gib || s.Way != limit.ByTask || !s.Required || s.Group != group {
					t.Errorf("%+v", s)
				}
				_, err := n.machine.Allocate(0, at, 15*gib)
				check.NoError(t, err)
				if _, err := n.machine.Allocate(0, at, 6*gib); !errors.Is(err, simdriver.ErrOutOfMemory) {
					t.Errorf("allocated beyond the limit: %v", err)
				}
				if n.setCount(group) != 1 {
					t.Errorf("%q", n.sets)
				}
			}
			w, _, group := n.task(7)
			n.group(group) // of an allocation without a device
			n.lists(holders.Record{Work: map[string]holders.Work{w.ID: w}})
			n.reading()
			time.Sleep(100 * time.Millisecond)
			if a := n.limitOf(group); a.State == gpu.LimitRead && a.Limit.Hard != gpu.NoMemoryLimit {
				t.Errorf("%+v", a)
			}
			if c := l.Table().Counts; c.Set != 3 || c.Failed != 0 || c.Late != 0 {
				t.Errorf("%+v", c)
			}
		})
	}
}

// Tasks that begin and end in bursts keep no others from the GPU: the device of a task is never refused in steady state, because Nomad fails its allocation then.
// Neither do groups of allocations that Nomad has forgotten, which it is asked for less and less, with one line in the log.
func TestBursts(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	n.mu.Lock()
	n.refused = nil
	n.mu.Unlock()
	forgotten, _, group := n.task(0)
	began := time.Now()
	n.group(group)
	const burst = 8
	for round := range 3 {
		var records []holders.Record
		var works []holders.Work
		for i := range burst {
			w, record, group := n.taskOn(1+round*burst+i, i%3)
			works, records = append(works, w), append(records, record)
			if i%2 == 0 {
				n.lists(records...) // before it has a group
			} else {
				n.mu.Lock()
				n.lookups[w.ID], n.waiting[w.ID] = record, i
				n.mu.Unlock()
			}
			n.group(group)
			n.reading()
		}
		for _, w := range works {
			n.await(l, w, limit.Limited, "")
		}
		n.lists(records...)
		n.reading()
		for i, w := range works {
			check.NoError(t, os.RemoveAll(n.groups.Path("/nomad.slice/share.slice/"+w.ID+".main.scope")))
			n.lists(records[i+1:]...)
			n.reading()
		}
	}
	time.Sleep(time.Until(began.Add(3 * time.Second)))
	eventually(t, func() bool { return strings.Contains(n.logText(), forgotten.ID) }, func() string { return "the forgotten allocation is not in the log" })
	n.reading()
	asked := func() int { n.mu.Lock(); defer n.mu.Unlock(); return n.asked[forgotten.ID] }
	before, since := asked(), time.Now()
	for range 20 {
		time.Sleep(50 * time.Millisecond)
		n.reading()
	}
	more, took := asked()-before, time.Since(since)
	if before < 2 || before > 45 || more > 1+int(took/(2*time.Second)) {
		t.Errorf("asked %d times in 3 s, then %d times in %v", before, more, took)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !strings.Contains(n.log.String(), `state=limited limit="20480 MiB"`) {
		t.Errorf("no limit in the log:\n%s", &n.log)
	}
	if lines := strings.Count(n.log.String(), forgotten.ID); len(n.refused) > 0 || lines != 1 {
		t.Errorf("refused: %q; %d lines of log about the forgotten allocation:\n%s", n.refused, lines, &n.log)
	}
}

// fence 14, 15, 17: after a restart of the agent nothing is set for work that is limited, what was not set before is, and a limit that another program has changed
// is reported and not overwritten. A process that used the GPU before is late.
func TestRestart(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, stop := n.run(holders.Nomad)
	first, one, group := n.task(0)
	changed, other, changedGroup := n.task(1)
	n.group(group)
	n.group(changedGroup)
	n.reading()
	n.lists(one, other)
	n.reading()
	n.await(l, first, limit.Limited, "")
	n.await(l, changed, limit.Limited, "")
	stop()

	late, third, lateGroup := n.task(2) // reserved, its group is made and it starts while no agent runs
	n.group(lateGroup)
	n.enter(lateGroup, 4711)
	q := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: n.groups.Path(changedGroup)}
	check.NoError(t, n.SetMemoryLimit(t.Context(), gpu.LimitChange{LimitQuery: q, Soft: gib, Hard: 30 * gib}))
	n.lists(one, other, third)
	n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: late, Group: lateGroup})
	l, _ = n.run(holders.Nomad)
	n.await(l, first, limit.Limited, "")
	n.await(l, late, limit.Late, "pid 4711 used the GPU before")
	n.await(l, changed, limit.Unlimited, "another program has changed it")
	if a := n.limitOf(changedGroup); a.Limit.Hard != 30*gib || n.setCount(group) != 1 || n.setCount(lateGroup) != 1 {
		t.Errorf("%+v %q", a, n.sets)
	}
	if !slices.ContainsFunc(l.Problems(), func(p problem.Problem) bool { return p.Code == problem.LimitOverridden }) {
		t.Errorf("%+v", l.Problems())
	}
}

// C1(d): a table of use is made up to seconds after the driver's list of processes in it was read. A process that is not in that list may have used the GPU before the
// limit was set.
func TestTableOfAnOlderList(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	w, record, group := n.task(0)
	at := n.group(group)
	n.enter(group, 4711)
	n.listed = time.Now()
	_, err := n.machine.Allocate(0, at, 15*gib)
	check.NoError(t, err)
	n.lists(record)
	l, _ := n.run(holders.Nomad)
	for range 20 {
		n.reading()
		n.await(l, w, limit.Unknown, "used the GPU before the limit was set")
		time.Sleep(10 * time.Millisecond)
	}
}

// C1(b): an agent in another PID namespace than the node's does not see the processes of a group, and calls its work neither limited nor late.
func TestAnotherPIDNamespace(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	w, record, group := n.task(0)
	n.group(group)
	check.NoError(t, os.WriteFile(n.groups.Path(group+"/cgroup.procs"), []byte("0\n0\n"), 0o600))
	n.lists(record)
	l, _ := n.run(holders.Nomad)
	for range 20 {
		n.reading()
		if s := n.await(l, w, limit.Unknown, "hostPID: true"); s.Driver.Hard != 20*gib || !s.Begun {
			t.Errorf("%+v", s)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// fence 30: a group between that of a task and one below it with a process has the address, and the ended limit, of a group that ended: it gets that of the task.
func TestLeftoverBetween(t *testing.T) {
	n, l, w, group := limited(t)
	between, at := n.group(group+"/a"), n.group(group+"/a/b")
	q := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: between}
	check.NoError(t, n.SetMemoryLimit(t.Context(), gpu.LimitChange{LimitQuery: q, Hard: gpu.NoMemoryLimit}))
	_, err := n.machine.Allocate(0, at, 30*gib)
	check.NoError(t, err)
	n.enter(group+"/a/b", 4711)
	n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: w, Group: group + "/a/b"})
	n.await(l, w, limit.Unlimited, "/a in it has a limit of its own")
}

// fence 16: after the driver was closed, and its GPU reset meanwhile, shares take no new work before the limits of running work are set again.
func TestQuiesceAndReset(t *testing.T) {
	n, l, w, group := limited(t)
	check.NoError(t, n.Quiesce(t.Context(), time.Time{}))
	check.Until(t, "no work", func() bool { l := n.State().Host.Limits; return l != nil && len(l.Withheld) == 0 })
	check.NoError(t, n.machine.Reset(0))
	check.NoError(t, n.Resume(t.Context()))
	n.awaitHealth(health.ReasonNone, "")
	if a := n.limitOf(group); a.State != gpu.LimitRead || a.Limit.Hard != 20*gib {
		t.Errorf("work is taken, and running work has %+v", a)
	}
	n.await(l, w, limit.Limited, "")
}

// fence 31: while the driver is asked one task is restarted in place. The answers of its group are of none; its neighbour on the GPU stays limited, and new work is
// taken.
func TestRestartWhileTheDriverIsAsked(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	restarted, one, group := n.task(0)
	neighbour, other, neighbourGroup := n.task(1)
	n.awaitHealth(health.ReasonNone, "")
	n.group(group)
	n.group(neighbourGroup)
	n.lists(one, other)
	n.reading()
	n.await(l, restarted, limit.Limited, "")
	n.await(l, neighbour, limit.Limited, "")
	n.enter(neighbourGroup, 4711)
	n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: neighbour, Group: neighbourGroup})
	n.await(l, neighbour, limit.Limited, "")
	n.mu.Lock()
	n.refused = nil
	n.mu.Unlock()
	for range 20 {
		began := make(chan struct{})
		once := sync.OnceFunc(func() { n.anew(group); close(began) })
		n.mu.Lock()
		n.asks = func(q gpu.LimitQuery) {
			if q.Group == n.groups.Path(group) {
				once()
			}
		}
		n.mu.Unlock()
		n.reading()
		<-began
		for deadline := time.Now().Add(50 * time.Millisecond); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if s, _ := l.Table().Share(neighbour, gpu.DeviceID(n.machine.UUID(0))); s.State != limit.Limited {
				t.Fatalf("the neighbour: %s: %s", s.State, s.Reason)
			}
		}
		n.await(l, restarted, limit.Limited, "")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.refused) > 0 {
		t.Errorf("%q", n.refused)
	}
}

// fence 14: while Nomad's servers have no leader its client restarts a task of exec in place. Its allocation was seen before, or is in the record of limits.
func TestRestartWithoutServers(t *testing.T) {
	for name, again := range map[string]bool{"allocation was seen": false, "agent is restarted": true} {
		t.Run(name, func(t *testing.T) {
			n := start(t, holders.Nomad, limit.Misc)
			l, stop := n.run(holders.Nomad)
			w, group := n.limitedTask(l)
			n.mu.Lock()
			n.unread = errors.New("No cluster leader")
			n.mu.Unlock()
			n.reading()
			if again {
				stop()
				l, _ = n.run(holders.Nomad)
			}
			n.await(l, w, limit.Limited, "")
			n.anew(group)
			n.reading()
			eventually(t, func() bool { return n.limitOf(group).Limit.Hard == 20*gib }, func() string {
				return fmt.Sprintf("%+v; %+v", n.limitOf(group), l.Table().Shares)
			})
			n.await(l, w, limit.Limited, "")
		})
	}
}

// A task whose GPU a reload takes out of what is offered keeps its limit, also while it has no process, and it is read.
func TestNotOffered(t *testing.T) {
	n, l, w, group := limited(t)
	cfg := core.DefaultConfig()
	cfg.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{gpu.DeviceID(n.machine.UUID(0))}}, NotOffered: "excluded"}}
	check.NoError(t, n.ApplyPolicy(t.Context(), cfg))
	at := time.Now()
	n.reading()
	eventually(t, func() bool { return l.Table().At.After(at) }, func() string { return "no reading" })
	if s := n.await(l, w, limit.Limited, ""); s.Driver.Hard != 20*gib || s.Pool == "" || n.setCount(group) != 1 {
		t.Errorf("%+v %q", s, n.sets)
	}
}

// After a reload to larger shares, those that do not fit beside work of before take no new work until that has ended, and the limit of that work stays.
func TestLargerShares(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	w, first, group := n.task(1)
	_, second, other := n.task(2)
	n.lists(first, second)
	n.group(group)
	n.group(other)
	n.reading()
	n.await(l, w, limit.Limited, "")
	cfg := core.DefaultConfig()
	cfg.API, cfg.Policy = inventory.Nomad, inventory.Policy{
		Limits: inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve},
		Rules: []inventory.Rule{{
			Select:  inventory.Selector{IDs: []gpu.DeviceID{gpu.DeviceID(n.machine.UUID(0))}},
			Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Memory: 30 * gib, Limit: inventory.LimitRequired},
		}},
	}
	check.NoError(t, n.ApplyPolicy(t.Context(), cfg))
	n.awaitShares("healthy", "unhealthy: held (the limits of running work are 40960 of 80535 MiB")
	if s := n.await(l, w, limit.Limited, ""); s.Driver.Hard != 20*gib {
		t.Errorf("%+v", s)
	}
	n.lists(first)
	check.NoError(t, os.RemoveAll(n.groups.Path(other)))
	n.reading()
	n.awaitShares("healthy", "healthy")
}

// awaitShares waits for the health of all shares with a limit.
func (n *node) awaitShares(want ...string) {
	n.t.Helper()
	var is []string
	eventually(n.t, func() bool {
		is = nil
		for u := range n.Current().Units() {
			if u.Memory > 0 && u.Health.Reason != health.ReasonWithdrawn {
				is = append(is, u.Health.String())
			}
		}
		return slices.EqualFunc(is, want, strings.HasPrefix)
	}, func() string { return fmt.Sprintf("%q, want %q", is, want) })
}

// fence 18, 19, 30: the limit of work that has ended ends before its group. One that is left on another group is ended at the next reading.
func TestEndedWork(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	w, record, group := n.task(0)
	n.group(group)
	n.lists(record)
	n.reading()
	n.await(l, w, limit.Limited, "")
	n.lists()
	n.reading()
	eventually(t, func() bool { return n.limitOf(group).Limit.Hard == gpu.NoMemoryLimit }, func() string { return fmt.Sprintf("%+v", n.limitOf(group)) })

	w, record, ended := n.task(1)
	n.after(group, ended) // which is the only other one in the readings
	n.lists(record)
	n.reading()
	n.await(l, w, limit.Limited, "")
	next, _, nextGroup := n.task(2)
	n.after(ended, "/next")
	ended = n.groups.Path(ended)
	check.NoError(t, os.RemoveAll(ended), os.Rename(n.groups.Path("/next"), n.groups.Path(nextGroup)))
	check.NoError(t, n.machine.ReuseGroup(ended, n.groups.Path(nextGroup)))
	if a := n.limitOf(nextGroup); a.Limit.Hard != 20*gib {
		t.Fatalf("%+v", a)
	}
	n.lists(holders.Record{Work: map[string]holders.Work{next.ID: next}})
	n.reading()
	eventually(t, func() bool { return n.limitOf(nextGroup).Limit.Hard == gpu.NoMemoryLimit }, func() string { return fmt.Sprintf("%+v", l.Table()) })
	eventually(t, func() bool { return l.Table().Counts.Stale == 1 }, func() string { return fmt.Sprintf("%+v", l.Table()) })

	// A container of a person has as much as a share, and the driver may have kept that of a share.
	const container = "/machine.slice/libpod-3a5f0c0d7b1e4f6a8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d.scope"
	n.group("/machine.slice")
	n.after(nextGroup, container)
	n.enter(container, 4711)
	q := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: n.groups.Path(container)}
	check.NoError(t, n.SetMemoryLimit(t.Context(), gpu.LimitChange{LimitQuery: q, Soft: 20 * gib, Hard: 20 * gib}))
	n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Group: container})
	n.await(l, holders.Work{}, limit.Foreign, "no policy")
	if a := n.limitOf(container); a.Limit.Hard != 20*gib {
		t.Errorf("%+v", a)
	}
}

// fence 21: driver 595 -> 615 -> 595 while the agent runs: the pool follows, with the versions in its cause. With 595 nothing is read.
func TestOtherDrivers(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	n.older.Store(true)
	w, record, group := n.task(0)
	n.group(group)
	n.enter(group, 4711)
	n.lists(record)
	n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: w, Group: group})
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNoLimit, "driver 595.71.05: want 615 or newer")
	if s := n.await(l, w, limit.Unlimited, "driver 595.71.05: want 615 or newer"); !s.Begun {
		t.Errorf("%+v", s)
	}
	if len(n.sets) > 0 || l.Table().Node.Unsupported == "" {
		t.Errorf("%q %+v", n.sets, l.Table())
	}
	for _, older := range []bool{false, true} {
		n.older.Store(older)
		n.reading()
		if older {
			n.awaitHealth(health.ReasonNoLimit, "driver 595.71.05")
		} else {
			n.awaitHealth(health.ReasonNone, "")
		}
	}
}

// C9: a driver that refuses a limit on an empty group has no share with a required limit, with its error in the cause.
func TestProbe(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	check.NoError(t, n.machine.Fail(simdriver.GPU(0), "nvmlDeviceSetMemoryLimits_v1", "NO_PERMISSION", simdriver.Always))
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNoLimit, "Insufficient Permissions")
	n.awaitProblem(l, problem.LimitUnsupported, "")
	if _, err := os.Stat(n.groups.Path("/tandem-limit-test-nomad")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("its group is left")
	}
}

// fence 26: the controller is enabled from the root to the slices of Nomad's tasks, and again after Nomad has written its list anew. If that can't be, no share
// takes work, and the cause names the group.
func TestControllers(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	control := n.groups.Path("/nomad.slice/share.slice/cgroup.subtree_control")
	enabled := func() bool {
		text, _ := os.ReadFile(control)
		return strings.Contains(string(text), "misc")
	}
	if !enabled() {
		t.Fatal("not enabled")
	}
	check.NoError(t, os.WriteFile(control, []byte("cpu memory"), 0o600))
	n.reading()
	check.Until(t, "enabled again", enabled)

	check.NoError(t, os.Remove(control), os.Mkdir(control, 0o700)) // it can't be read or written
	n.reading()
	n.awaitHealth(health.ReasonNoController, "/nomad.slice/share.slice")
}

// fence 34: the group of a pod is limited, on call, before its containers are there, with what all its claims have together, and both containers count to it. After
// an error of the driver the next pass sets the limit.
func TestPods(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		t.Run(string(b), func(t *testing.T) {
			n := start(t, holders.Kubernetes, b)
			l, stop := n.run(holders.Kubernetes)
			n.awaitHealth(health.ReasonNone, "")
			id := gpu.DeviceID(n.machine.UUID(0))
			w := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "train", ID: pod + "1", Claim: "a"}
			if err := l.LimitPod(t.Context(), w, id, 10*gib); err == nil || !strings.Contains(err.Error(), "group is not found") {
				t.Errorf("a pod without a group: %v, %+v", err, l.Table())
			}
			group := "/kubepods/burstable/pod" + pod + "1"
			n.group(group)
			second := w
			second.Claim = "b"
			check.NoError(t, l.LimitPod(t.Context(), w, id, 10*gib), l.LimitPod(t.Context(), w, id, 10*gib), l.LimitPod(t.Context(), second, id, 5*gib))
			if a := n.limitOf(group); a.Limit.Hard != 15*gib {
				t.Errorf("%+v", a)
			}
			for i, bytes := range []uint64{9 * gib, 7 * gib} {
				container := n.group(fmt.Sprintf("%s/%d", group, i))
				if _, err := n.machine.Allocate(0, container, bytes); (err == nil) != (i == 0) {
					t.Errorf("container %d: %v", i, err)
				}
			}
			n.reading()
			n.await(l, w, limit.Limited, "")
			stop()
			l, _ = n.run(holders.Kubernetes) // the record has it
			n.reading()
			n.await(l, second, limit.Limited, "")

			check.NoError(t, l.ReleasePod(t.Context(), w), l.ReleasePod(t.Context(), second), l.ReleasePod(t.Context(), second))
			if a := n.limitOf(group); a.Limit.Hard != gpu.NoMemoryLimit || len(l.Table().Shares) != 0 {
				t.Errorf("%+v %+v", a, l.Table())
			}
			check.NoError(t, n.machine.Fail(simdriver.GPU(0), "nvmlDeviceSetMemoryLimits_v1", "NO_PERMISSION", simdriver.Always))
			w.ID = pod + "2"
			n.group("/kubepods/burstable/pod" + w.ID)
			if err := l.LimitPod(t.Context(), w, id, gib); err == nil || !strings.Contains(err.Error(), "Insufficient Permissions") {
				t.Error(err)
			}
			check.NoError(t, n.machine.Heal())
			if s := n.await(l, w, limit.Limited, ""); s.Driver.Hard != gib {
				t.Errorf("%+v", s)
			}
		})
	}
}

// fence 23: a group is not limited through a symbolic link, nor one that is another by its inode.
func TestLocalSetter(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	_, _, group := n.task(0)
	n.group(group)
	g, err := n.groups.Read(group)
	check.NoError(t, err)
	s := limits.Local{Groups: n.groups, Driver: n.Monitor}
	q := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: n.groups.Path(group)}
	change := gpu.LimitChange{LimitQuery: q, Soft: gib, Hard: gib}
	check.NoError(t, s.SetMemoryLimit(t.Context(), g.ID, change))
	if err := s.SetMemoryLimit(t.Context(), cgroup.ID{Path: group, Inode: g.Inode + 1}, change); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another inode: %v", err)
	}
	check.NoError(t, os.Symlink(n.groups.Path(group), n.groups.Path("/nomad.slice/share.slice/link")))
	if err := s.SetMemoryLimit(t.Context(), cgroup.ID{Path: "/nomad.slice/share.slice/link", Inode: g.Inode}, change); err == nil {
		t.Error("set through a link")
	}
}

// fence 27, 28: the limit of a container that NVIDIA's hook has set is read, of a pod with a device plugin's device and of a task of docker. One that is another,
// because an image, a job or a person has overridden the variable, is set to that of the policy, and counted; what the container uses was counted from the beginning.
func TestContainers(t *testing.T) {
	const container = "3a5f0c0d7b1e4f6a8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d"
	for name, group := range map[string]string{
		"kubernetes": "/kubepods/burstable/pod" + pod + "1/" + container, "kubernetes, crun": "/kubepods/burstable/pod" + pod + "1/crio-" + container + ".scope/container",
		"nomad": "/docker/" + container,
	} {
		t.Run(name, func(t *testing.T) {
			orchestrator, _, _ := strings.Cut(name, ",")
			n := start(t, orchestrator, limit.Misc)
			n.group(path.Dir(group))
			w, record, _ := n.task(0)
			if orchestrator == holders.Kubernetes {
				w.Orchestrator, w.ID = orchestrator, pod+"1"
				record.Holders[0].Work, record.Holders[0].API = w, inventory.DevicePlugin
			}
			record.Tasks = map[holders.Work]holders.Task{w: {Driver: "docker", Running: true}}
			owner := holders.Work{Orchestrator: orchestrator, ID: w.ID}
			at := n.group(group)
			n.enter(group, 4711)
			eventually(t, func() bool { return n.State().Snapshot.Driver.State == gpu.DriverReady }, func() string { return "no driver" })
			q := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(0)), Group: at}
			check.NoError(t, n.SetMemoryLimit(t.Context(), gpu.LimitChange{LimitQuery: q, Soft: 60 * gib, Hard: 60 * gib}))
			if orchestrator == holders.Nomad {
				n.group("/nomad.slice/share.slice/" + w.ID + ".main.scope") // Nomad makes it for each task
			}
			_, err := n.machine.Allocate(0, at, 5*gib)
			check.NoError(t, err)
			l, _ := n.run(orchestrator)
			n.mu.Lock()
			n.record = holders.Record{Complete: true, Work: map[string]holders.Work{w.ID: owner}, Holders: record.Holders, Tasks: record.Tasks}
			n.mu.Unlock()
			n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: owner, Group: group})
			if s := n.await(l, w, limit.Limited, ""); s.Driver.Hard != 20*gib || s.Driver.Used != 5*gib || s.Way != limit.ByHook || s.Group != group {
				t.Errorf("%+v", s)
			}
			if c := l.Table().Counts; c.Overridden != 1 || c.Late != 0 || c.Set != 1 {
				t.Errorf("%+v", c)
			}
			if !slices.ContainsFunc(l.Problems(), func(p problem.Problem) bool {
				return p.Code == problem.LimitOverridden && p.Object == w.String() && strings.Contains(p.Text, "61440 MiB") && strings.Contains(p.Text, "20480 MiB")
			}) {
				t.Errorf("the work is not named: %+v", l.Problems())
			}
			if lines := strings.Count(n.logText(), "with a limit of 61440 MiB on"); lines != 1 {
				t.Errorf("%d lines of log have the limit that was found:\n%s", lines, n.logText())
			}
		})
	}
}

// On Kubernetes, an agent whose container has only its own control group names the component that mounts the node's, in a cause that is not cut.
func TestNoReader(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	own := []byte(fmt.Sprintln(os.Getpid()))
	check.NoError(t, os.WriteFile(n.groups.Path("/cgroup.procs"), own, 0o600), os.WriteFile(n.groups.Path("/cgroup.events"), []byte("populated 1\n"), 0o600))
	l, _ := n.run(holders.Kubernetes)
	n.awaitHealth(health.ReasonNoLimit, "add the component deploy/limits-reader, or memoryLimits.read: only the control group of this container")
	n.awaitProblem(l, problem.LimitUnsupported, "deploy/limits-reader")
}

// fence 12: the kubelet's list has a pod for which nothing was prepared, without the unit of its claim.
func TestPodWithoutACall(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	n.group("/kubepods/burstable/pod" + pod + "1")
	n.group("/kubepods/burstable/pod" + pod + "2")
	l, _ := n.run(holders.Kubernetes)
	n.awaitHealth(health.ReasonNone, "")
	id := gpu.DeviceID(n.machine.UUID(0))
	first := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "p", ID: pod + "1", Claim: "c"}
	n.reading()
	check.NoError(t, l.LimitPod(t.Context(), first, id, 20*gib))
	var listed holders.Record
	for i, name := range []string{"p", "q"} {
		w := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: name, Container: "main", ID: fmt.Sprint(pod, i+1), Claim: "c"}
		listed.Holders = append(listed.Holders, holders.Holder{Work: w, API: inventory.DRA, Device: id})
	}
	n.lists(listed)
	n.reading()
	if s := n.await(l, listed.Holders[1].Work, limit.Unlimited, "prepared for the pod p"); !s.Required || s.Want != 20*gib || s.Pool == "" {
		t.Errorf("%+v", s)
	}
	n.await(l, first, limit.Limited, "")
}

// Without its record an agent calls nothing limited of which it does not know when the limit was set, sets nothing and ends nothing. While the record is damaged, no
// share with a required limit takes work.
func TestRecordIsLost(t *testing.T) {
	for what, lose := range map[string]func(*node) error{
		"removed": func(n *node) error { return os.Remove(n.file) },
		"damaged": func(n *node) error { return os.WriteFile(n.file, []byte("{"), 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			n := start(t, holders.Nomad, limit.Misc)
			l, stop := n.run(holders.Nomad)
			w, record, group := n.task(0)
			n.group(group)
			n.reading()
			n.lists(record)
			n.reading()
			n.await(l, w, limit.Limited, "")
			n.enter(group, 4711)
			n.reading(use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: w, Group: group})
			n.await(l, w, limit.Limited, "")
			stop()
			check.NoError(t, lose(n))
			l, _ = n.run(holders.Nomad)
			if what == "damaged" {
				n.awaitHealth(health.ReasonNoLimit, "the record of limits can't be read")
				if !slices.ContainsFunc(l.Problems(), func(p problem.Problem) bool { return p.Code == problem.LimitState }) || len(l.Table().Shares) > 0 {
					t.Errorf("%+v %+v", l.Problems(), l.Table())
				}
				check.NoError(t, os.Remove(n.file))
			}
			n.await(l, w, limit.Late, "pid 4711 used the GPU before")
			if a := n.limitOf(group); a.Limit.Hard != 20*gib || n.setCount(group) != 1 {
				t.Errorf("%+v %q", a, n.sets)
			}
			n.awaitHealth(health.ReasonNone, "") // new work is taken
		})
	}
}
