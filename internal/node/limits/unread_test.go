package limits_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// While no limit can be read nothing is called limited, from the first reading that fails; after some seconds a share whose limit is required takes no work. When
// they are read again it does, and the log has no line about each share.
func TestUnread(t *testing.T) {
	n, l, w, _ := limited(t)
	n.unreadable.Store(true)
	n.reading()
	if s := n.await(l, w, limit.Unknown, "limits of device memory can't be read: the driver does not answer"); s.Read || s.Driver != (gpu.MemoryLimit{}) {
		t.Errorf("%+v", s)
	}
	if h := n.healthOf(); h.Reason != health.ReasonNone {
		t.Errorf("one reading has failed, and the share takes no work: %+v", h)
	}
	n.awaitHealth(health.ReasonNoLimit, "limits of device memory can't be read")
	n.unreadable.Store(false)
	n.await(l, w, limit.Limited, "")
	n.awaitHealth(health.ReasonNone, "")
	if lines := strings.Count(n.logText(), "state=limited"); lines != 1 {
		t.Errorf("%d lines:\n%s", lines, n.logText())
	}
}

// A group that can't be read has not ended: nothing is known until it is read again, and its limit is not set anew.
func TestGroupIsNotRead(t *testing.T) {
	n, l, w, group := limited(t)
	procs, loop, anew := n.groups.Path(group+"/cgroup.procs"), n.groups.Path("/loop"), n.groups.Path("/anew")
	check.NoError(t, os.Symlink("cgroup.procs", loop), os.WriteFile(anew, nil, 0o600))
	check.NoError(t, os.Rename(loop, procs)) // at once: for a pass in between the group would have ended
	n.reading()
	n.await(l, w, limit.Unknown, "control group "+group)
	check.NoError(t, os.Rename(anew, procs))
	n.await(l, w, limit.Limited, "")
	if c := l.Table().Counts; c.Set != 1 || c.Late != 0 {
		t.Errorf("%+v", c)
	}
}

// While it can't be read by which controller the driver limits, nothing is called limited and nothing is set: a limit for the other controller would stay in the groups
// above.
func TestBackendIsNotRead(t *testing.T) {
	n, l, w, _ := limited(t)
	capacity := n.groups.Path("/dmem.capacity")
	check.NoError(t, os.Mkdir(capacity, 0o700)) // which is no file to read
	n.reading()
	n.await(l, w, limit.Unknown, "dmem.capacity")
	check.NoError(t, os.Remove(capacity))
	n.await(l, w, limit.Limited, "")
	if c := l.Table().Counts; c.Set != 1 || c.Late != 0 {
		t.Errorf("%+v", c)
	}
}

// The limit of a new task that could not be read is looked at again within a second or so, without another event.
func TestNewTaskIsNotRead(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	w, record, group := n.task(0)
	first := true
	n.mu.Lock()
	n.asks = func(q gpu.LimitQuery) {
		if strings.HasSuffix(q.Group, group) {
			n.unreadable.Store(first)
			first = false
		}
	}
	n.mu.Unlock()
	n.lists(record)
	n.group(group)
	n.await(l, w, limit.Limited, "")
}

// While the driver is released nothing is called limited: a GPU may be reset meanwhile, with which all limits end.
func TestTableWhileReleased(t *testing.T) {
	n, l, w, _ := limited(t)
	check.NoError(t, n.Quiesce(t.Context(), time.Time{}), n.machine.Reset(0))
	n.await(l, w, limit.Unknown, "the driver is not open")
	check.NoError(t, n.Resume(t.Context()))
	n.await(l, w, limit.Limited, "")
	if c := l.Table().Counts; c.Late != 0 {
		t.Errorf("%+v", c)
	}
}

// A driver that took a limit at the try and refuses one since has no share with a required limit, until another try. The failure is logged once.
func TestSetFails(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	check.NoError(t, n.machine.Fail(simdriver.GPU(0), "nvmlDeviceSetMemoryLimits_v1", "UNKNOWN", simdriver.Always))
	w, record, group := n.task(0)
	n.lists(record)
	n.group(group)
	n.reading()
	n.await(l, w, limit.Unlimited, "can't be set")
	n.awaitHealth(health.ReasonNoLimit, "a limit could not be set: ")
	eventually(t, func() bool { return l.Table().Counts.Failed >= 3 }, func() string { return "not tried again" })
	if lines := strings.Count(n.logText(), `msg="limit of device memory not set"`); lines != 1 {
		t.Errorf("%d lines:\n%s", lines, n.logText())
	}
}

// Without the record of allocations nothing can find out which task has which share: none with a required limit takes work, and the cause has the remedy. While the
// record is only missing so far, as at the start of Nomad, they do.
func TestAllocationsAreNotRead(t *testing.T) {
	for name, c := range map[string]struct {
		record holders.Record
		detail string // "" = it takes work
	}{
		"by the settings": {holders.Record{Never: true, Missing: "occupancy is off", Remedy: "set occupancy to report or withhold"}, "set occupancy to report or withhold: occupancy is off"},
		"hidden":          {holders.Record{Missing: "the ACL token does not show the allocations of every namespace"}, "the ACL token does not show"},
		"not so far":      {holders.Record{Never: true, Missing: "the Nomad agent has not answered yet"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, holders.Nomad, limit.Misc)
			l, _ := n.run(holders.Nomad, func(o *limits.Options) {
				o.Holders = func(context.Context, *inventory.Allocatable) (holders.Record, error) { return c.record, nil }
			})
			if c.detail == "" {
				n.awaitHealth(health.ReasonNone, "")
				return
			}
			n.awaitHealth(health.ReasonNoLimit, "the allocations are not read: "+c.detail)
			n.awaitProblem(l, problem.LimitUnsupported, c.detail)
		})
	}
}

// A task with a process on a GPU whose shares have limits, and whose allocation is not shown, is in the table.
func TestHiddenAllocation(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	w, _, group := n.task(0)
	n.group(group)
	n.enter(group, 4711)
	p := use.Process{Process: gpu.Process{PID: 4711, Started: 5}, Owner: w, Group: group}
	n.reading(p)
	if s := n.await(l, w, limit.Unlimited, "its allocation is not shown"); !s.Required || s.Want != 20*gib || s.Pool == "" || !s.Begun || s.Group != group {
		t.Errorf("%+v", s)
	}
	n.mu.Lock()
	n.record.Complete, n.record.Missing = false, "hidden"
	n.mu.Unlock()
	n.reading(p)
	n.await(l, w, limit.Unknown, "its allocation is not shown")
}

// A pod whose call has failed is kept while its claim is prepared, and no longer, on disk neither.
func TestFailedPodIsNotOnDisk(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	l, stop := n.run(holders.Kubernetes)
	n.awaitHealth(health.ReasonNone, "")
	id := gpu.DeviceID(n.machine.UUID(0))
	one := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "one", ID: pod + "1", Claim: "a"}
	other := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "other", ID: pod + "2", Claim: "b"}
	n.group("/kubepods/burstable/pod" + one.ID)
	n.group("/kubepods/burstable/pod" + other.ID)
	check.NoError(t, l.LimitPod(t.Context(), other, id, gib))
	n.unreadable.Store(true)
	if err := l.LimitPod(t.Context(), one, id, 10*gib); err == nil {
		t.Fatal("no error")
	}
	n.await(l, other, limit.Unknown, "can't be read")
	n.prepare(limit.Pod{Work: other, GPU: id, Bytes: gib})
	n.unreadable.Store(false)
	n.reading()
	n.await(l, other, limit.Limited, "")
	eventually(t, func() bool { // the pass after one that had begun before the claim was prepared
		_, kept := l.Table().Share(one, id)
		return !kept
	}, func() string { return "the pod whose call has failed is kept" })
	stop()
	if text, err := os.ReadFile(n.file); err != nil || strings.Contains(string(text), one.ID) || !strings.Contains(string(text), other.ID) {
		t.Errorf("%v %s", err, text)
	}
}

// What an agent that was killed has left of a try is ended on all GPUs before another one: a try on one GPU removes the group, and the driver keeps the limits of the
// others for whichever group gets its address.
func TestTryIsLeft(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	eventually(t, func() bool { return n.State().Snapshot.Driver.State == gpu.DriverReady }, func() string { return "no driver" })
	at := n.group("/tandem-limit-test-nomad")
	left := gpu.LimitQuery{GPU: gpu.DeviceID(n.machine.UUID(5)), Group: at}
	check.NoError(t, n.SetMemoryLimit(t.Context(), gpu.LimitChange{LimitQuery: left, Soft: 3 << 20, Hard: 3 << 20}))
	n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	next := n.group("/next.slice")
	check.NoError(t, n.machine.ReuseGroup(at, next))
	answers, err := n.MemoryLimits(t.Context(), []gpu.LimitQuery{{GPU: left.GPU, Group: next}})
	check.NoError(t, err)
	if a := answers[0]; a.State != gpu.LimitRead || a.Limit.Hard != gpu.NoMemoryLimit {
		t.Errorf("%+v", a)
	}
}
