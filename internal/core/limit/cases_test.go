package limit_test

import (
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// shows checks the state of work after a pass.
func (w *world) shows(t *testing.T, k *work, state limit.State, reason string) limit.Share {
	t.Helper()
	w.now = w.now.Add(3 * time.Second)
	w.passes.pass()
	s, ok := w.passes.table.Share(k.Work, k.GPU)
	if !ok || s.State != state || !strings.Contains(s.Reason, reason) || (s.Reason == "") != (reason == "") {
		t.Errorf("%+v, want %s (%s)", s, state, reason)
	}
	return s
}

func (w *world) has(t *testing.T, code problem.Code, want bool) {
	t.Helper()
	if got := slices.ContainsFunc(w.passes.table.Problems, func(p problem.Problem) bool { return p.Code == code }); got != want {
		t.Errorf("%s: %t, want %t: %+v", code, got, want, w.passes.table.Problems)
	}
}

// fence 13, 15: a task is limited if the limit was there before its first process. One whose process used the GPU before is late, which is counted once, until that
// process has ended. It is late, too, if the agent ended between the two.
func TestLate(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	early := w.start(limit.ByTask, zero, 20*gib, 1)
	w.shows(t, early, limit.Limited, "")
	w.charge(w.fork(early.groups[0], early.owner()), zero, gib)
	w.shows(t, early, limit.Limited, "")

	late := w.start(limit.ByTask, zero, 20*gib, 1)
	p := w.fork(late.groups[0], late.owner())
	w.charge(p, zero, 30*gib)
	w.shows(t, late, limit.Unknown, "not known so far")
	w.shows(t, late, limit.Late, "used the GPU before")
	idle := w.start(limit.ByTask, zero, 20*gib, 1)
	w.fork(idle.groups[0], idle.owner()) // it runs, and does not use the GPU
	w.shows(t, idle, limit.Unknown, "not known so far")
	w.shows(t, idle, limit.Limited, "")
	if c := w.passes.table.Counts; c.Late != 1 || c.Set != 3 || c.Failed != 0 {
		t.Errorf("%+v", c)
	}
	w.kill(p)
	w.charge(w.fork(late.groups[0], late.owner()), zero, gib)
	w.shows(t, late, limit.Limited, "") // what the new process has is counted

	killed := w.start(limit.ByTask, zero, 20*gib, 1)
	w.charge(w.fork(killed.groups[0], killed.owner()), zero, gib)
	first := limit.Next(w.passes.saved, w.passes.table, w.passes.read(nil))
	w.passes.saved = first.Saved
	for _, c := range first.Changes {
		w.set(c)
	}
	if err := w.passes.restart(); err != nil { // after the call, before the limit is read
		t.Fatal(err)
	}
	w.shows(t, killed, limit.Late, "used the GPU before")
}

// C1(d): what used the GPU before the limit is decided by a list of its processes that is newer than the limit, and not by one that was read before, or not at all.
func TestLateByAnOlderList(t *testing.T) {
	for name, listed := range map[string]func(*limit.Reading, time.Time){
		"read before the limit": func(r *limit.Reading, at time.Time) { r.Known[zero] = at },
		"not read":              func(r *limit.Reading, _ time.Time) { r.Known = nil },
		"of the other GPU":      func(r *limit.Reading, _ time.Time) { r.Known = map[gpu.DeviceID]time.Time{one: r.At} },
		"of another namespace":  func(r *limit.Reading, _ time.Time) { hide(r) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(limit.Misc, zero)
			k := w.start(limit.ByTask, zero, 20*gib, 1)
			at := w.now
			w.charge(w.fork(k.groups[0], k.owner()), zero, 15*gib)
			w.passes.edit = func(r *limit.Reading) { listed(r, at); r.Processes = nil }
			for range 4 {
				w.passes.pass()
				if s, _ := w.passes.table.Share(k.Work, zero); s.State != limit.Unknown {
					t.Errorf("%+v", s)
				}
			}
			w.passes.edit = nil
			w.shows(t, k, limit.Late, "used the GPU before")
		})
	}
}

// C1(b): a share is not limited while it is not known which processes use the GPU. Groups without processes need no list: the limit of a pod is set before it has one.
func TestUnseen(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.edit = func(r *limit.Reading) { r.Known = nil }
	w.shows(t, k, limit.Limited, "")
	w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
	if w.shows(t, k, limit.Unknown, "occupancy: off"); w.passes.last.Undecided {
		t.Error("a newer table is asked for, which has no processes, either")
	}
	w.passes.edit = hide
	if w.shows(t, k, limit.Unknown, "hostPID: true"); w.passes.last.Undecided {
		t.Error("a newer table is asked for, which has no processes, either")
	}
	w.passes.edit = nil
	w.shows(t, k, limit.Limited, "")
}

// hide has the processes in another PID namespace.
func hide(r *limit.Reading) {
	r.Processes = nil
	for p, g := range r.Groups {
		for i := range g.PIDs {
			g.PIDs[i] = 0
		}
		r.Groups[p] = g
	}
}

// fence 28: which limit of a container NVIDIA's hook has set, and which one the agent that has lost its record: what the driver counts shows it.
func TestContainerWithoutARecord(t *testing.T) {
	for name, c := range map[string]struct {
		has            uint64 // by the list of processes
		counted, later uint64 // before and after the list
		state          limit.State
		reason         string
	}{
		"by the hook, only a context":    {gib / 2, 0, 0, limit.Limited, ""},
		"by the hook":                    {12*gib + gib/2, 12 * gib, 0, limit.Limited, ""},
		"by the hook, it allocates":      {17*gib + gib/2, 12 * gib, 5 * gib, limit.Unknown, "not known so far"},
		"late":                           {30 * gib, 0, 0, limit.Late, "used the GPU before"},
		"late, and allocates since":      {15 * gib, 10 * gib, 0, limit.Late, "used the GPU before"},
		"late, and allocates since then": {15 * gib, 0, 15 * gib, limit.Unknown, "not known so far"},
		"what it has is not known":       {0, 10 * gib, 0, limit.Late, "used the GPU before"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(limit.Misc, zero)
			k := w.start(limit.ByHook, zero, 20*gib, 1)
			w.hook(k.groups[0], zero, 20*gib)
			p := w.fork(k.groups[0], k.owner())
			w.charge(p, zero, c.counted)
			p.used[zero] = max(c.has, 1)
			listed, has := w.now, c.has
			w.passes.edit = func(r *limit.Reading) {
				r.Known[zero] = listed
				for i := range r.Processes {
					r.Processes[i].Memory = has
				}
			}
			w.shows(t, k, limit.Unknown, "not known so far")
			w.charge(p, zero, c.later)
			listed = w.now.Add(time.Millisecond)
			w.shows(t, k, c.state, c.reason)
			if c.state == limit.Unknown { // it allocates nothing more
				listed = w.now.Add(time.Millisecond)
				want, why := limit.Limited, ""
				if c.counted == 0 {
					has, want, why = has+c.later, limit.Late, "used the GPU before"
				}
				w.shows(t, k, want, why)
			}
		})
	}
}

// A container that the hook has limited stays limited if the group of its pod has got the address, with the same limit, of one that ended.
func TestContainerBelowALeftover(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByHook, zero, 20*gib, 1)
	w.hook(w.groups[k.root], zero, 20*gib)
	w.hook(k.groups[0], zero, 20*gib)
	p := w.fork(k.groups[0], k.owner())
	p.used[zero] = gib / 4 // its context
	w.passes.pass()
	w.shows(t, k, limit.Limited, "")
	w.charge(p, zero, 5*gib)
	w.shows(t, k, limit.Limited, "")
}

// Work has begun if it has processes that use the GPU, or may: not a container that is idle, or whose image is pulled.
func TestBegun(t *testing.T) {
	for name, c := range map[string]struct {
		way  limit.Way
		do   func(*world, *work)
		want bool
	}{
		"a group without processes":              {limit.ByTask, func(*world, *work) {}, false},
		"a task that the record has as started":  {limit.ByTask, func(_ *world, k *work) { k.Runs, k.Groups = true, nil }, true},
		"a task with a process":                  {limit.ByTask, func(w *world, k *work) { w.fork(k.groups[0], k.owner()) }, true},
		"a process outside of its group":         {limit.ByTask, func(w *world, k *work) { w.charge(w.fork(w.groups["/system.slice"], k.owner()), zero, gib) }, true},
		"a container that does not use the GPU":  {limit.ByHook, func(w *world, k *work) { w.fork(k.groups[0], k.owner()); k.Runs = true }, false},
		"a container whose group is not known":   {limit.ByHook, func(_ *world, k *work) { k.Groups = nil }, false},
		"a container that uses the GPU":          {limit.ByHook, func(w *world, k *work) { w.charge(w.fork(k.groups[0], k.owner()), zero, gib) }, true},
		"a container with a limit and a process": {limit.ByHook, func(w *world, k *work) { w.hook(k.groups[0], zero, 20*gib); w.fork(k.groups[0], k.owner()) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(limit.Misc, zero)
			k := w.start(c.way, zero, 20*gib, 1)
			c.do(w, k)
			w.passes.pass()
			if s, ok := w.passes.table.Share(k.Work, zero); !ok || s.Begun != c.want {
				t.Errorf("%+v", s)
			}
		})
	}
}

// fence 14, 31: a task that raw_exec restarts stays in its group, and nothing is set. One that exec restarts has a new group of the same path, which has no
// limit before the agent sets it.
func TestRestartInPlace(t *testing.T) {
	for range 200 {
		w := newWorld(limit.Misc, zero)
		k := w.start(limit.ByTask, zero, 20*gib, 1)
		p := w.fork(k.groups[0], k.owner())
		w.shows(t, k, limit.Unknown, "not known so far")
		w.shows(t, k, limit.Limited, "")
		w.kill(p)
		w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
		if w.shows(t, k, limit.Limited, ""); w.passes.table.Counts.Set != 1 {
			t.Errorf("raw_exec: %+v", w.passes.table.Counts)
		}
		w.passes.pass()
		for _, p := range w.sorted() {
			w.kill(p)
		}
		w.rmdir(k.groups[0].path)
		w.free = nil // another address
		k.groups[0] = w.mkdir(k.groups[0].path)
		w.passes.pass()
		w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
		if w.shows(t, k, limit.Limited, ""); w.passes.table.Counts.Set != 2 {
			t.Errorf("exec: %+v", w.passes.table.Counts)
		}
	}
}

// fence 14, 31: a task that exec restarts in place while the orchestrator's record can't be read has its limit again, and is shown, also after a restart of the agent.
// One that has ended meanwhile leaves nothing once the record is read.
func TestRestartWithoutTheRecord(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k, ended := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 20*gib, 1)
	w.shows(t, k, limit.Limited, "")
	w.passes.unread = true
	w.shows(t, k, limit.Limited, "")
	w.rmdir(k.groups[0].path)
	w.end(ended)
	w.passes.pass() // crashed: it begins again a second later
	if err := w.passes.restart(); err != nil {
		t.Fatal(err)
	}
	w.passes.pass()
	if len(w.passes.table.Shares) > 0 {
		t.Errorf("%+v", w.passes.table.Shares)
	}
	w.free = nil
	k.groups[0] = w.mkdir(k.groups[0].path)
	if s := w.shows(t, k, limit.Limited, ""); s.Driver.Hard != 20*gib || s.Want != 20*gib || s.Pool != k.Pool || w.passes.table.Counts.Set != 1 {
		t.Errorf("%+v %+v", s, w.passes.table.Counts)
	}
	w.passes.unread = false
	w.shows(t, k, limit.Limited, "")
	if all := w.passes.saved.Records; len(all) != 1 || all[0].Work != k.Work {
		t.Errorf("%+v", all)
	}
}

// fence 16: after a reset the limits of running work are set again, and until then its GPU waits.
func TestReset(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.shows(t, k, limit.Limited, "")
	w.reset(zero)
	first := limit.Next(w.passes.saved, w.passes.table, w.passes.read(nil))
	if len(first.Changes) != 1 || !first.Table.Waiting[zero] {
		t.Errorf("%+v", first)
	}
	if w.shows(t, k, limit.Limited, ""); w.passes.table.Waiting[zero] {
		t.Error("it waits")
	}
}

// fence 16: the driver has forgotten all limits of a GPU only if it has that of no group. One group without its limit, as one in the place of a group that has just
// ended, changes nothing for the others.
func TestOneGroupWithoutItsLimit(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k, other, ended := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.pass()
	w.end(ended)
	w.free = nil
	w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
	w.shows(t, k, limit.Limited, "")
	r := w.passes.read(nil)
	r.Groups[other.groups[0].path].Limits[zero] = limit.Answers{Group: gpu.LimitAnswer{State: gpu.NoLimit}, Parent: gpu.LimitAnswer{State: gpu.NoLimit}}
	out := limit.Next(w.passes.saved, w.passes.table, r)
	if s, _ := out.Table.Share(k.Work, zero); s.State != limit.Limited || len(out.Table.Waiting) > 0 || len(out.Saved.Leftovers) != 1 {
		t.Errorf("%+v", out)
	}
	if len(out.Changes) != 1 || out.Changes[0].Path != other.groups[0].path {
		t.Errorf("%+v", out.Changes)
	}
}

// fence 16: a GPU waits only for work that it had when the driver was opened, as at the start of the agent, and only until the limits of that were set once. Work
// that comes later does not keep others from the GPU, whether its limit is not set so far, can't be set, or its work is not known: Nomad fails an allocation
// whose device is refused.
func TestWaiting(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	for range 2 {
		w.passes.fails = true
		for range 3 {
			if w.passes.pass(); !w.passes.table.Waiting[zero] {
				t.Fatal("it does not wait for running work")
			}
		}
		w.passes.fails = false
		if w.shows(t, k, limit.Limited, ""); w.passes.table.Waiting[zero] {
			t.Fatal("it waits, and all work is limited")
		}
		listed := w.start(limit.ByTask, zero, 20*gib, 1) // in the record before it has a group
		group, at := listed.groups[0], listed.Groups
		listed.Groups = nil
		w.rmdir(group.path)
		w.shows(t, listed, limit.Unknown, "not found so far")
		listed.groups[0], listed.Groups = w.mkdir(group.path), at
		w.mkdir("/nomad.slice/share.slice/ffffffff-0000-0000-0000-000000000000.main.scope") // of an allocation that Nomad has forgotten
		w.passes.fails = true
		for range 2 {
			if first := limit.Next(w.passes.saved, w.passes.table, w.passes.read(nil)); len(first.Changes) != 1 || first.Table.Waiting[zero] {
				t.Errorf("others wait for new work: %+v", first)
			}
			if w.shows(t, listed, limit.Unlimited, "NO_PERMISSION"); w.passes.table.Waiting[zero] {
				t.Errorf("others wait for work whose limit can't be set: %+v", w.passes.table)
			}
		}
		w.passes.fails = false
		w.shows(t, listed, limit.Limited, "")
		w.end(listed)
		w.reset(zero) // by quiesce
		w.passes.opens++
	}
}

// fence 16: while the orchestrator's first record is awaited it is not known which work runs, so all GPUs wait; then they wait for the limits of that.
func TestWaitingForTheRecord(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.fails = true
	for range 2 {
		r := w.passes.read(nil)
		r.Awaited, r.HoldersKnown, r.Shares, r.Listed = true, false, nil, nil
		out := limit.Next(w.passes.saved, w.passes.table, r)
		if w.passes.saved, w.passes.table = out.Saved, out.Table; !out.Table.Waiting[zero] {
			t.Fatalf("new work is taken: %+v", out.Table)
		}
	}
	if w.shows(t, k, limit.Unlimited, "NO_PERMISSION"); !w.passes.table.Waiting[zero] {
		t.Errorf("new work is taken, and running work has no limit: %+v", w.passes.table)
	}
	w.passes.fails = false
	if w.shows(t, k, limit.Limited, ""); w.passes.table.Waiting[zero] {
		t.Errorf("%+v", w.passes.table)
	}
}

// A task whose group has ended is not one that never had any, although the record of the orchestrator has it still.
func TestEndedGroup(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k, other := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 20*gib, 1)
	w.rmdir(other.groups[0].path)
	w.shows(t, k, limit.Limited, "")
	k.Runs, other.Runs = true, true
	w.rmdir(k.groups[0].path)
	for range 2 {
		w.shows(t, k, limit.Unknown, "its control group has ended")
		w.shows(t, other, limit.Unlimited, "no control group of its own")
	}
}

// fence 17: a limit that another program has changed is reported and not overwritten, also one of a group without a limit by the policy.
func TestForeign(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k, other := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 0, 1)
	w.shows(t, k, limit.Limited, "")
	w.hook(k.groups[0], zero, 30*gib)
	w.hook(other.groups[0], zero, 5*gib)
	for range 3 {
		if s := w.shows(t, k, limit.Unlimited, "another program has changed it"); s.Driver.Hard != 30*gib {
			t.Errorf("%+v", s)
		}
		if s := w.shows(t, other, limit.Foreign, "no policy"); s.Driver.Hard != 5*gib {
			t.Errorf("%+v", s)
		}
	}
	w.has(t, problem.LimitOverridden, true)
	w.has(t, problem.StaleLimit, false)
	w.hook(k.groups[0], zero, 20*gib) // as it was
	w.shows(t, k, limit.Limited, "")
	w.has(t, problem.LimitOverridden, true) // what has changed it may do that again
	if c := w.passes.table.Counts; c.Overridden != 0 {
		t.Errorf("the agent has corrected nothing: %+v", c)
	}
}

// fence 18, 30: the limit of a task ends before its group. One that is left, because the group ended first, is ended on the next group with its address.
func TestStale(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.shows(t, k, limit.Limited, "")
	w.work = nil // the allocation has ended, its group is there
	w.passes.pass()
	if a := w.get(k.groups[0].path, zero); a.Limit.Hard != gpu.NoMemoryLimit || len(w.passes.saved.Records) != 0 {
		t.Errorf("%+v %+v", a, w.passes.saved)
	}
	w.rmdir(k.groups[0].path)

	gone := w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.pass()
	w.end(gone)
	next := w.start(limit.ByTask, zero, 0, 1)
	if a := w.get(next.groups[0].path, zero); a.Limit.Hard != 20*gib {
		t.Fatalf("the driver has forgotten it: %+v", a)
	}
	w.passes.hides = map[holders.Work]bool{next.Work: true} // the record is behind
	w.passes.pass()
	if a := w.get(next.groups[0].path, zero); a.Limit.Hard != 20*gib {
		t.Errorf("ended before it is known whose it is: %+v", a)
	}
	w.passes.hides = nil
	w.passes.pass()
	if a := w.get(next.groups[0].path, zero); a.Limit.Hard != gpu.NoMemoryLimit || w.passes.table.Counts.Stale != 1 {
		t.Errorf("%+v %+v", a, w.passes.table)
	}
	w.passes.pass()
	w.has(t, problem.StaleLimit, false)
}

// fence 19: a group that has the path and the address of another one has its own limit.
func TestPathUsedAgain(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.pass()
	w.rmdir(k.groups[0].path)
	k.groups[0], k.Bytes = w.mkdir(k.groups[0].path), 10*gib
	if s := w.shows(t, k, limit.Limited, ""); s.Driver.Hard != 10*gib || s.Want != 10*gib {
		t.Errorf("%+v", s)
	}
}

// fence 26: without the controller in the group nothing is limited, whatever is set and read. Enabling it mends that: the agent does so for tasks of Nomad, and the kubelet
// and the container runtime for pods.
func TestControllerOff(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		w := newWorld(b, zero)
		k := w.start(limit.ByTask, zero, 20*gib, 1)
		w.off[k.groups[0].path] = true
		w.shows(t, k, limit.Unlimited, "the controller "+string(b)+" is off")
		w.mendedBy(t, problem.LimitController, "this agent enables it")
		w.off = map[string]bool{}
		w.passes.pass()
		w.shows(t, k, limit.Limited, "")
		w.has(t, problem.LimitController, false)

		k = w.start(limit.ByHook, zero, 20*gib, 1)
		w.off[k.groups[0].path] = true
		w.hook(k.groups[0], zero, 20*gib)
		w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
		w.shows(t, k, limit.Unlimited, "the controller "+string(b)+" is off")
		w.mendedBy(t, problem.LimitController, "start the pod again")
	}
}

// mendedBy checks the remedy of the problem.
func (w *world) mendedBy(t *testing.T, code problem.Code, remedy string) {
	t.Helper()
	if !slices.ContainsFunc(w.passes.table.Problems, func(p problem.Problem) bool { return p.Code == code && strings.Contains(p.Remedy, remedy) }) {
		t.Errorf("%s: want %q: %+v", code, remedy, w.passes.table.Problems)
	}
}

// The controller is enabled from the root, in each group whose children lack it.
func TestEnable(t *testing.T) {
	r := newWorld(limit.Misc, zero).passes.read(nil)
	r.Parents = []limit.Parent{{Path: "/", On: true}, {Path: "/nomad.slice"}, {Path: "/nomad.slice/share.slice"}}
	if got := limit.Next(limit.Saved{}, limit.Table{}, r).Enable; !slices.Equal(got, []string{"/nomad.slice", "/nomad.slice/share.slice"}) {
		t.Errorf("%q", got)
	}
	if r.Node.CannotSet = "no rights"; limit.Next(limit.Saved{}, limit.Table{}, r).Enable != nil {
		t.Error("enabled without the rights")
	}
}

// fence 27, 28: a container that was started with another limit gets that of the policy, and that is reported. What it uses was counted from its beginning.
func TestOverridden(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		w := newWorld(b, zero)
		k := w.start(limit.ByHook, zero, 20*gib, 1)
		w.hook(k.groups[0], zero, 80*gib)
		w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
		first := limit.Next(w.passes.saved, w.passes.table, w.passes.read(nil))
		if s, _ := first.Table.Share(k.Work, zero); s.State != limit.Unlimited || len(first.Changes) != 1 {
			t.Errorf("%+v", first)
		}
		if len(first.Table.Problems) != 1 || first.Table.Problems[0].Code != problem.LimitOverridden {
			t.Errorf("%+v", first.Table.Problems)
		}
		w.shows(t, k, limit.Limited, "")
		if err := w.passes.restart(); err != nil {
			t.Fatal(err)
		}
		w.shows(t, k, limit.Limited, "")
		if p := w.passes.table.Problems; len(p) != 1 || p[0] != first.Table.Problems[0] || !strings.Contains(p[0].Text, "a limit of 81920 MiB on GPU-0, and the policy has 20480 MiB") {
			t.Errorf("until the container ends: %+v", p)
		}
		w.end(k)
		w.free = nil // no group gets its address
		w.passes.pass()
		w.has(t, problem.LimitOverridden, false)

		none := w.start(limit.ByHook, zero, 20*gib, 1) // the hook did nothing
		w.charge(w.fork(none.groups[0], none.owner()), zero, gib)
		w.passes.pass()
		want, why := limit.Late, "used the GPU before"
		if b == limit.DMem {
			want, why = limit.Limited, ""
		}
		w.shows(t, none, want, why)
	}
}

// fence 27: a limit that was overridden is counted when it is corrected, once, however often that fails before.
func TestOverriddenCount(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		w := newWorld(b, zero)
		k := w.start(limit.ByHook, zero, 20*gib, 1)
		w.hook(k.groups[0], zero, 60*gib)
		p := w.fork(k.groups[0], k.owner())
		w.charge(p, zero, 30*gib) // below which no limit can be set
		for _, c := range []struct {
			fails bool
			used  uint64
			count uint64
		}{{false, 30, 0}, {true, 10, 0}, {true, 10, 0}, {false, 10, 1}, {false, 10, 1}} {
			if w.passes.fails = c.fails; p.used[zero] != c.used*gib {
				w.kill(p)
				p = w.fork(k.groups[0], k.owner())
				w.charge(p, zero, c.used*gib)
			}
			w.now = w.now.Add(time.Second)
			w.passes.pass()
			w.has(t, problem.LimitOverridden, true)
			if got := w.passes.table.Counts.Overridden; got != c.count {
				t.Errorf("%s, %+v: counted %d", b, c, got)
			}
		}
		w.shows(t, k, limit.Limited, "")
	}
}

// Containers of a pod with several limits are reported and not mended: which container a group is of is not known.
func TestAmbiguousContainers(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByHook, zero, 20*gib, 2)
	second := *k
	second.Work.Container, second.Bytes = "second", 10*gib
	w.work = append(w.work, &second)
	w.hook(k.groups[0], zero, 80*gib)
	w.shows(t, k, limit.Unlimited, "no container of the pod")
	w.hook(k.groups[0], zero, 10*gib)
	w.shows(t, k, limit.Unknown, "several limits")
	if c := w.passes.table.Counts; c.Set != 0 {
		t.Errorf("%+v", c)
	}
	second.Bytes = 20 * gib // all have the same
	w.passes.pass()
	w.shows(t, k, limit.Limited, "")
}

// fence 33: with dmem a limit below what is used is not taken, although the call succeeds.
func TestBelowUse(t *testing.T) {
	w := newWorld(limit.DMem, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	p := w.fork(k.groups[0], k.owner())
	w.charge(p, zero, 30*gib)
	w.shows(t, k, limit.Late, "it used 30720 MiB")
	w.kill(p)
	w.shows(t, k, limit.Limited, "")

	w = newWorld(limit.Misc, zero) // never below use, where the driver counts
	k = w.start(limit.ByHook, zero, 20*gib, 1)
	w.hook(k.groups[0], zero, 80*gib)
	w.charge(w.fork(k.groups[0], k.owner()), zero, 30*gib)
	if w.shows(t, k, limit.Unlimited, "it uses 30720 MiB"); w.passes.table.Counts != (limit.Counts{}) {
		t.Errorf("%+v", w.passes.table.Counts)
	}
}

// fence 34: the containers of a pod have its limit together. With misc one that has a limit of its own, left by a group that ended, has more.
func TestPod(t *testing.T) {
	for _, b := range []limit.Backend{limit.Misc, limit.DMem} {
		w := newWorld(b, zero)
		k := w.start(limit.ByPod, zero, 20*gib, 2)
		w.shows(t, k, limit.Unlimited, "prepared without a limit")
		w.has(t, problem.LimitUnsupported, false)
		w.passes.saved = w.passes.saved.WithPod(limit.Pod{Work: k.Work, GPU: zero, Bytes: 20 * gib})
		w.shows(t, k, limit.Limited, "")
		for i, g := range k.groups {
			if ok := w.charge(w.fork(g, k.owner()), zero, 12*gib); ok != (i == 0) {
				t.Errorf("container %d: %t", i, ok)
			}
		}
		w.shows(t, k, limit.Limited, "")
		w.passes.saved = w.passes.saved.WithPod(limit.Pod{Work: another(k.Work, "d"), GPU: zero, Bytes: 10 * gib}) // another claim
		if s := w.shows(t, k, limit.Limited, ""); s.Driver.Hard != 30*gib {
			t.Errorf("%+v", s)
		}
	}
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByPod, zero, 20*gib, 2)
	k.Required = false
	w.passes.saved = w.passes.saved.WithPod(limit.Pod{Work: k.Work, GPU: zero, Bytes: 20 * gib})
	if s := w.shows(t, k, limit.Limited, ""); s.Required || s.Pool != k.Pool {
		t.Errorf("a pod of a pool whose limit is best-effort: %+v", s)
	}
	w.hook(k.groups[1], zero, 60*gib)
	w.shows(t, k, limit.Unlimited, "has a limit of its own, 61440 MiB")
	w.has(t, problem.LimitOverridden, true)
	w.hook(k.groups[1], zero, gpu.NoMemoryLimit) // as an ended limit of a group that had its address
	w.charge(w.fork(k.groups[1], k.owner()), zero, gib)
	w.passes.pass()
	w.shows(t, k, limit.Limited, "") // the container has the limit of the pod
	p := w.fork(k.groups[0], k.owner())
	w.charge(p, zero, 2*gib)
	w.passes.pass()
	w.shows(t, k, limit.Unlimited, "have limits of their own")
	w.charge(p, zero, 9*gib)
	w.charge(w.procs[w.pidsBelow(k.groups[1].path)[0]], zero, 10*gib) // both use 11 GiB
	w.shows(t, k, limit.Unlimited, "of their own")                    // by the record of that group
	w.passes.saved.Records = slices.DeleteFunc(slices.Clone(w.passes.saved.Records), func(r limit.Record) bool { return r.Way == "" })
	w.shows(t, k, limit.Unlimited, "does not count all of it")
}

// Table: what else keeps a share from being limited.
func TestNotLimited(t *testing.T) {
	for name, c := range map[string]struct {
		do     func(*world, *work)
		state  limit.State
		reason string
	}{
		"case 36: MIG mode":                      {func(w *world, _ *work) { w.mig[zero] = true }, limit.Unlimited, "MIG mode"},
		"C1(b): a process outside of the group":  {func(w *world, k *work) { w.charge(w.fork(w.groups["/system.slice"], k.owner()), zero, gib) }, limit.Unlimited, "of it is in the control group /system.slice"},
		"C14: the task runs, its group is empty": {func(_ *world, k *work) { k.Runs = true }, limit.Unknown, "no process is in its control group"},
		"T10: the group has ended": {func(w *world, k *work) {
			w.rmdir(k.groups[0].path)
		}, limit.Unknown, "not found so far"},
	} {
		w := newWorld(limit.Misc, zero)
		k := w.start(limit.ByTask, zero, 20*gib, 1)
		w.shows(t, k, limit.Limited, "")
		c.do(w, k)
		t.Run(name, func(t *testing.T) { w.shows(t, k, c.state, c.reason) })
	}
}

// T4: the limit of a group above, which others share, is not the group's own.
func TestLimitOfAGroupAbove(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	w.hook(w.groups["/nomad.slice/share.slice"], zero, 20*gib)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	first := limit.Next(w.passes.saved, w.passes.table, w.passes.read(nil))
	if s, _ := first.Table.Share(k.Work, zero); s.State != limit.Unlimited || !strings.Contains(s.Reason, "above") || len(first.Changes) != 1 {
		t.Errorf("%+v", first)
	}
	w.shows(t, k, limit.Limited, "")
}

// T5: a share of whose memory nothing is counted for a minute while its processes have more than CUDA contexts need is not limited. An idle notebook has only its
// context, which the driver may not count.
func TestNothingIsCounted(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.passes.pass()
	p := w.fork(k.groups[0], k.owner())
	p.used[zero] = gib // which no entry has
	w.shows(t, k, limit.Limited, "")
	w.now = w.now.Add(time.Hour)
	w.shows(t, k, limit.Limited, "")
	p.used[zero] = gib + 1
	w.shows(t, k, limit.Limited, "")
	w.now = w.now.Add(time.Minute)
	w.shows(t, k, limit.Unlimited, "counts nothing")
	w.has(t, problem.LimitNotCounted, true)
}

// fence 24: an agent whose own group has a limit reports it, as the driver may show that as the memory of a GPU.
func TestOwnGroup(t *testing.T) {
	r := newWorld(limit.Misc, zero).passes.read(nil)
	for _, own := range []gpu.LimitAnswer{
		{LimitQuery: gpu.LimitQuery{GPU: zero, Group: "/system.slice/nomad.service"}, Limit: gpu.MemoryLimit{Hard: gib}},
		{LimitQuery: gpu.LimitQuery{GPU: zero, Group: "/system.slice/nomad.service"}, Limit: gpu.MemoryLimit{Hard: gpu.NoMemoryLimit}},
		{LimitQuery: gpu.LimitQuery{GPU: zero, Group: "/system.slice/nomad.service"}, State: gpu.NoLimit},
		{},
	} {
		r.GPUs[zero] = limit.GPU{Memory: 80 * gib, Own: own}
		found := limit.Next(limit.Saved{}, limit.Table{}, r).Table.Problems
		if want := own.Limit.Hard == gib; (len(found) == 1 && found[0].Code == problem.MemoryTotal && found[0].Object == string(zero)) != want || len(found) > 1 {
			t.Errorf("%+v: %+v", own, found)
		}
	}
}

// Work that runs keeps its limit when the policy has another one, or none any more, also if it has no process while raw_exec or exec restarts it, and after a reset
// (fence 16). It ends with the work.
func TestPolicyChanges(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	pool := k.Pool
	keeps := func(what string) {
		t.Helper()
		if s := w.shows(t, k, limit.Limited, ""); s.Want != 20*gib || s.Driver.Hard != 20*gib || s.Pool != pool {
			t.Errorf("%s: %+v", what, s)
		}
	}
	keeps("new")
	for _, k.Bytes = range []uint64{10 * gib, 0} {
		keeps("another policy")
	}
	k.Pool = ""
	w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
	keeps("not offered")
	w.kill(w.sorted()[0])
	keeps("no process")
	w.reset(zero)
	w.passes.opens++
	if w.passes.pass(); w.passes.table.Counts.Set != 2 {
		t.Errorf("after a reset: %+v", w.passes.table.Counts)
	}
	keeps("after a reset")
	w.rmdir(k.groups[0].path)
	w.passes.pass()
	w.free = nil
	k.groups[0] = w.mkdir(k.groups[0].path)
	keeps("in another group")
	w.work = nil
	w.passes.pass()
	if a := w.get(k.groups[0].path, zero); a.Limit.Hard != gpu.NoMemoryLimit || len(w.passes.saved.Records) > 0 {
		t.Errorf("%+v %+v", a, w.passes.saved)
	}
}

// Table: a limit is ended only if the driver may have kept it of a group that ended: it has the value of one, and the group is newer, and no other program sets such
// limits there, as podman for a container, or another agent for its work (fence 17).
func TestLeftovers(t *testing.T) {
	task := func(orchestrator string) holders.Work { return holders.Work{Orchestrator: orchestrator, ID: "another"} }
	for name, c := range map[string]struct {
		path  string
		work  holders.Work
		bytes uint64
		has   limit.Way // by which it has the GPU, without a limit
		older bool
		ends  bool
	}{
		"a session":                                {"/user.slice/session-1.scope", holders.Work{}, 20 * gib, "", false, true},
		"a session, another value":                 {"/user.slice/session-1.scope", holders.Work{}, 10 * gib, "", false, false},
		"a session, a value of the hook":           {"/user.slice/session-1.scope", holders.Work{}, 40 * gib, "", false, false},
		"a session that was there before":          {"/user.slice/session-1.scope", holders.Work{}, 20 * gib, "", true, false},
		"a container of no work":                   {"/machine.slice/docker-1.scope", holders.Work{}, 20 * gib, "", false, false},
		"work of another orchestrator":             {"/kubepods/podanother", task(holders.Kubernetes), 20 * gib, "", false, false},
		"a task that has the GPU":                  {"/nomad.slice/share.slice/another.main.scope", task(holders.Nomad), 20 * gib, limit.ByTask, false, true},
		"a task, another value":                    {"/nomad.slice/share.slice/another.main.scope", task(holders.Nomad), 5 * gib, limit.ByTask, false, false},
		"a task that was there before":             {"/nomad.slice/share.slice/another.main.scope", task(holders.Nomad), 20 * gib, limit.ByTask, true, false},
		"a task's container that has the GPU":      {"/machine.slice/docker-1.scope", task(holders.Nomad), 20 * gib, limit.ByHook, false, false},
		"a task's container that has not the GPU":  {"/machine.slice/docker-1.scope", task(holders.Nomad), 20 * gib, "", false, true},
		"the same, by a container that was unread": {"/machine.slice/docker-1.scope", task(holders.Nomad), 40 * gib, "", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(limit.Misc, zero)
			k, stays := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 20*gib, 1)
			if dir := path.Dir(c.path); w.groups[dir] == nil {
				w.mkdir(dir)
			}
			if c.older {
				w.mkdir(c.path)
			}
			w.passes.pass()
			w.end(k)
			w.free = nil
			w.passes.pass()
			if !c.older {
				w.mkdir(c.path)
			}
			w.hook(w.groups[c.path], zero, c.bytes)
			p := w.fork(w.groups[c.path], c.work)
			w.charge(p, zero, gib)
			r := w.passes.read(nil)
			g := r.Groups[c.path]
			g.Work = c.work
			r.Groups[c.path], r.Hook = g, []limit.Value{{GPU: zero, Hard: 40 * gib}}
			r.Listed["another"] = c.work.Orchestrator == holders.Nomad
			if c.has != "" {
				r.Shares = append(r.Shares, limit.Holding{Work: c.work, GPU: zero, Way: c.has, Groups: []string{c.path}})
			}
			out := limit.Next(w.passes.saved, w.passes.table, r)
			ended := slices.ContainsFunc(out.Changes, func(one limit.Change) bool { return one.Path == c.path && one.Hard == gpu.NoMemoryLimit })
			foreign := slices.ContainsFunc(out.Table.Shares, func(s limit.Share) bool { return s.Group == c.path && s.State == limit.Foreign })
			if ended != c.ends || foreign == c.ends || len(out.Changes) > 1 {
				t.Errorf("ended %t, foreign %t: %+v", ended, foreign, out.Changes)
			}
			w.shows(t, stays, limit.Limited, "")
		})
	}
}

// A boot ends all that was set, a reload of the driver what it had kept.
func TestBootAndReload(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k, ended := w.start(limit.ByTask, zero, 20*gib, 1), w.start(limit.ByTask, zero, 10*gib, 1)
	w.passes.pass()
	w.end(ended)
	w.passes.pass()
	if got := w.passes.saved.Leftovers; len(got) != 1 || got[0].GPU != zero || got[0].Hard != 10*gib {
		t.Errorf("%+v", got)
	}
	r := w.passes.read(nil)
	if r.Driver = "two"; limit.Next(w.passes.saved, w.passes.table, r).Saved.Leftovers != nil {
		t.Error("a limit of another driver is kept")
	}
	w.end(k)
	r = w.passes.read(nil)
	if r.Boot = "other"; !reflect.DeepEqual(limit.Next(w.passes.saved, w.passes.table, r).Saved, limit.Saved{}) {
		t.Error("something is left after a boot")
	}
}

// Nothing is known of a node on which nothing was read, and nothing is in the way of a driver that can't.
func TestUnsupported(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	r := w.passes.read(nil)
	r.Node.Unsupported = "driver 595.71: want 615 or newer"
	r.Groups = nil // none is read
	got := limit.Next(limit.Saved{}, limit.Table{}, r)
	if s, _ := got.Table.Share(k.Work, zero); s.State != limit.Unlimited || s.Reason != r.Node.Unsupported || len(got.Changes) != 0 {
		t.Errorf("%+v", got)
	}
	if got := limit.Next(limit.Saved{}, limit.Table{}, limit.Reading{}); len(got.Table.Shares)+len(got.Changes) != 0 || !reflect.DeepEqual(got.Saved, limit.Saved{}) {
		t.Errorf("%+v", got)
	}
}

// fence 12: another pod that gets a prepared claim later, for which the kubelet makes no call, is not limited, and that is a problem; the first one is as before.
func TestAnotherPodOfAClaim(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	first, second := w.start(limit.ByPod, zero, 20*gib, 1), w.start(limit.ByPod, zero, 20*gib, 1)
	w.passes.saved = w.passes.saved.WithPod(limit.Pod{Work: first.Work, GPU: zero, Bytes: 20 * gib})
	w.shows(t, first, limit.Limited, "")
	w.shows(t, second, limit.Unlimited, "its claim was prepared for the pod "+first.Work.Name+", and not for this one")
	w.has(t, problem.LimitUnsupported, true)
	w.passes.saved = w.passes.saved.WithoutPod(first.Work)
	w.shows(t, second, limit.Unlimited, "its claim was prepared without a limit")
}
