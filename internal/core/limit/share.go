package limit

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// share decides about the work of a holding, and adds it to the table. Work without a limit is in it only if it has one.
func (d *decision) share(h Holding) {
	s := h.share()
	groups := d.groupsOf(h)
	if h.Bytes == 0 {
		return
	}
	s.Begun = d.begun(h, groups)
	if d.Node.Unsupported != "" {
		d.out.Table.Shares = append(d.out.Table.Shares, s.as(Unlimited, d.Node.Unsupported))
		return
	}
	s.State, s.Reason = Unknown, "its control group is not found so far"
	if h.Way == ByHook {
		s.Reason = "its control group is not known before a process of it uses the GPU"
	}
	if h.Way == ByTask && h.Runs && len(groups) == 0 {
		s.State, s.Reason = Unlimited, "it has no control group of its own"
		if before, _ := d.was.find(s); before.Group != "" { // the orchestrator's record is behind, or the task begins again
			s.Group, s.State, s.Reason = before.Group, Unknown, "its control group has ended"
		}
	}
	if h.Way == ByPod && d.state.Pod(h.Work.ID, h.GPU) == 0 {
		groups, s.State, s.Reason = nil, Unlimited, d.unprepared(h)
	}
	for i, g := range groups {
		one := d.inGroup(h, g)
		one.Begun = s.Begun
		if r, _ := d.state.Of(g.Path, g.Inode, h.GPU); r.Found > 0 {
			d.wasOverridden(h, r)
		}
		if d.changes(g, h.GPU) && d.waits(one) {
			d.out.Table.Waiting[h.GPU] = true
		}
		if i == 0 || rank[one.State] > rank[s.State] {
			s = one
		}
	}
	if outside := d.outside(h, groups); outside != "" && s.State == Limited {
		s.State, s.Reason = Unlimited, outside
	}
	d.out.Table.Shares = append(d.out.Table.Shares, s)
}

// begun reports whether the work has processes that use the GPU, or may use it.
func (d *decision) begun(h Holding, groups []Group) bool {
	return h.Runs && h.Way != ByHook || slices.ContainsFunc(groups, func(g Group) bool { return len(g.PIDs) > 0 }) ||
		slices.ContainsFunc(d.Processes, func(p Process) bool { return p.GPU == h.GPU && sameWork(p.Work, h.Work, h.Way) })
}

// unprepared is why a pod that has a claim has no limit. The kubelet makes no call for another pod that gets a prepared claim.
func (d *decision) unprepared(h Holding) string {
	of := slices.IndexFunc(d.state.Pods, func(p Pod) bool {
		return p.GPU == h.GPU && p.Work.Namespace == h.Work.Namespace && p.Work.Claim == h.Work.Claim && p.Work.ID != h.Work.ID
	})
	if of < 0 {
		return "its claim was prepared without a limit"
	}
	first := d.state.Pods[of].Work.Name
	d.problem(problem.LimitUnsupported, h.Work.String(), fmt.Sprintf("%s is not limited on %s: its claim was prepared for the pod %s, and the kubelet makes no call for another", h.Work, h.GPU, first),
		"end the pod, and give each pod a claim of its own (resourceClaimTemplateName)")
	return "its claim was prepared for the pod " + first + ", and not for this one"
}

// rank orders states: that of work with several groups is the last of them.
var rank = map[State]int{Limited: 0, Foreign: 1, Unknown: 2, Late: 3, Unlimited: 4}

func (d *decision) changes(g Group, id gpu.DeviceID) bool {
	return slices.ContainsFunc(d.out.Changes, func(c Change) bool { return c.Path == g.Path && c.GPU == id })
}

// groupsOf are the groups of a holding that are to have its limit. Of the containers of a pod it is those that use the GPU or have a limit.
func (d *decision) groupsOf(h Holding) (groups []Group) {
	for _, p := range h.Groups {
		g, ok := d.Groups[p]
		if !ok {
			continue
		}
		a := g.answers(h.GPU)
		if h.Way != ByHook || len(d.users(g, h.GPU)) > 0 || d.wasHard(g, h.GPU) > 0 || a.own(d.Node.Backend) && a.Group.Limit.Hard != gpu.NoMemoryLimit {
			groups = append(groups, g)
		}
	}
	return groups
}

// users are the processes with memory of a GPU in a group or below it.
func (d *decision) users(g Group, id gpu.DeviceID) (found []Process) {
	for _, p := range d.Processes {
		if p.GPU == id && p.Group != "" && below(p.Group, g.Path) {
			found = append(found, p)
		}
	}
	return found
}

// outside returns that a process of the work uses the GPU outside of its groups; "" if none does.
func (d *decision) outside(h Holding, groups []Group) string {
	for _, p := range d.Processes {
		if p.GPU != h.GPU || !sameWork(p.Work, h.Work, h.Way) || slices.ContainsFunc(groups, func(g Group) bool { return below(p.Group, g.Path) }) {
			continue
		}
		return fmt.Sprintf("pid %d of it is in the control group %s", p.PID, cmp.Or(p.Group, "?"))
	}
	return ""
}

// sameWork reports whether a process is of the work of a holding: the control group of a container of a pod does not show which container it is.
func sameWork(p, h holders.Work, way Way) bool {
	return p.ID != "" && p.Orchestrator == h.Orchestrator && p.ID == h.ID && (way == ByPod || p.Container == "" || h.Container == "" || p.Container == h.Container)
}

// inGroup decides about the limit of a group.
func (d *decision) inGroup(h Holding, g Group) Share {
	s, b := h.share(), d.Node.Backend
	s.Group = g.Path
	d.targets[target{g.Path, h.GPU}] = true
	a := g.answers(h.GPU)
	s.Read, s.Driver = a.Group.State == gpu.LimitRead, a.Group.Limit
	was, known := d.state.Of(g.Path, g.Inode, h.GPU)
	r := Record{Path: g.Path, Inode: g.Inode, GPU: h.GPU, Hard: h.Bytes, Pool: h.Pool, Way: h.Way}
	if known {
		r = was
		if h.Way == ByPod && r.Hard != h.Bytes && s.Driver.Used <= h.Bytes { // another claim of the pod
			r.Hard = h.Bytes
		}
		s.Want, s.Pool = r.Hard, cmp.Or(s.Pool, r.Pool)
	}
	r.Work = h.Work
	switch {
	case d.GPUs[h.GPU].MIG:
		return s.as(Unlimited, "the MIG mode of the GPU is on: the driver counts nothing")
	case a.Group.State == gpu.LimitFailed:
		return s.as(Unknown, cmp.Or(a.Group.Err, "its limit is not read so far"))
	case d.ambiguous(h):
		return d.oneOf(h, g, s)
	case !r.exact(b, a):
		return d.differs(h, g, r, known, s)
	case !a.own(b) && !r.Own && !d.wasSet(g, h.GPU):
		d.setOn(g, r)
		return s.as(Unlimited, "a control group above it has the same limit, which others share")
	case !g.Controller:
		d.controllerOff(h, g)
		return s.as(Unlimited, "the controller "+string(b)+" is off in its control group: the driver counts nothing")
	}
	r.Own = r.Own || a.own(b) || d.wasSet(g, h.GPU)
	d.found(h, g, &r, known)
	return d.holds(h, g, r, s)
}

// as returns a share in a state.
func (s Share) as(state State, reason string) Share {
	s.State, s.Reason = state, reason
	return s
}

// wasSet reports whether the reading follows a change of a group that was made.
func (d *decision) wasSet(g Group, id gpu.DeviceID) bool {
	return slices.ContainsFunc(d.Done, func(one Done) bool {
		return one.Err == "" && one.Path == g.Path && one.Inode == g.Inode && one.GPU == id && one.Hard != gpu.NoMemoryLimit
	})
}

func (d *decision) controllerOff(h Holding, g Group) {
	remedy := d.orRemedy("this agent enables it; start the work again if that does not help")
	if h.Work.Orchestrator == holders.Kubernetes {
		remedy = "the kubelet and the container runtime enable it for new pods, if the groups above have it: start the pod again"
	}
	d.problem(problem.LimitController, h.Work.String(), fmt.Sprintf("the controller %s is off in the control group %s, so the driver does not limit %s", d.Node.Backend, g.Path, h.Work),
		remedy)
}

// differs decides about a group that has not the limit of the policy.
func (d *decision) differs(h Holding, g Group, r Record, known bool, s Share) Share {
	b, a := d.Node.Backend, g.answers(h.GPU)
	own := a.own(b) && a.Group.Limit.Hard != gpu.NoMemoryLimit
	has := fmt.Sprintf("its limit is %d MiB", a.Group.Limit.Hard>>20)
	if known && !r.Undecided && own && r.Hard == d.wasHard(g, h.GPU) {
		d.state.record(g, h.GPU).Found = a.Group.Limit.Hard
		return s.as(Unlimited, has+": another program has changed it")
	}
	if !g.Controller {
		d.controllerOff(h, g)
		if b == DMem {
			return s.as(Unlimited, "the controller "+string(b)+" is off in its control group: it can't have a limit")
		}
	}
	if own && h.Way == ByHook && (!known || r.Found > 0) {
		r.Found, r.mending = a.Group.Limit.Hard, true
		d.expect(g, r)
	}
	if used := a.Group.Limit.Used; a.own(b) && used > r.Hard {
		if b == DMem {
			return s.as(Late, fmt.Sprintf("it used %d MiB before the limit was set", used>>20))
		}
		return s.as(Unlimited, fmt.Sprintf("%s, and it uses %d MiB: the driver sets no limit below that", has, used>>20))
	}
	d.setOn(g, r)
	switch why := d.failed(g, h.GPU); {
	case d.Node.CannotSet != "":
		return s.as(Unlimited, d.Node.CannotSet)
	case why != "":
		return s.as(Unlimited, "its limit can't be set: "+why)
	case own:
		return s.as(Unlimited, has)
	}
	return s.as(Unlimited, "its limit is not set so far")
}

// setOn has the limit of a record set.
func (d *decision) setOn(g Group, r Record) {
	d.expect(g, r)
	d.set(g, r.GPU, r.Hard)
}

// expect keeps that a group is to have the limit of a record. When it is read, it is to be found out whether a process used the GPU before, unless another limit was
// there from the beginning of the group.
func (d *decision) expect(g Group, r Record) {
	if was := d.wasHard(g, r.GPU); was == 0 || was == r.Hard { // else a claim of the pod was added, or has ended
		*d.state.record(g, r.GPU) = Record{
			Path: r.Path, Inode: r.Inode, GPU: r.GPU, Work: r.Work, Hard: r.Hard, Pool: r.Pool, Way: r.Way, Undecided: true, Found: r.Found, mending: r.mending,
		}
	}
}

// wasHard is the limit by the record of a group; 0 = it has none.
func (d *decision) wasHard(g Group, id gpu.DeviceID) uint64 {
	r, _ := d.state.Of(g.Path, g.Inode, id)
	return r.Hard
}

// wasOverridden reports that a group has had another limit than that of the policy. It stays until the group ends: also if the agent has set that of the policy, what
// the work is started from has the other one.
func (d *decision) wasOverridden(h Holding, r Record) {
	why, remedy := "another program has changed it", "end the work, or set the limit again"
	if r.Way == ByHook {
		why, remedy = "its container was started with another one, or another program has changed it", "leave NVIDIA_GPU_MEMORY_LIMIT out of images and jobs"
	}
	d.problem(problem.LimitOverridden, h.Work.String(), fmt.Sprintf("%s was found with a limit of %d MiB on %s, and the policy has %d MiB: %s", h.Work, r.Found>>20, h.GPU, r.Hard>>20,
		why), remedy)
}

func (d *decision) overridden(h Holding, g Group, why, remedy string) {
	d.problem(problem.LimitOverridden, h.Work.String(), fmt.Sprintf("%s has a limit of %d MiB on %s, and the policy has %d MiB: %s", h.Work,
		g.answers(h.GPU).Group.Limit.Hard>>20, h.GPU, h.Bytes>>20, why), remedy)
}

// ambiguous reports whether the containers of a pod have several limits on a GPU, so that it is not known which is that of a group.
func (d *decision) ambiguous(h Holding) bool {
	return h.Way == ByHook && slices.ContainsFunc(d.Shares, func(o Holding) bool {
		return o.Way == ByHook && o.GPU == h.GPU && o.Work.Orchestrator == h.Work.Orchestrator && o.Work.ID == h.Work.ID && o.Bytes != h.Bytes && slices.Equal(o.Groups, h.Groups)
	})
}

// oneOf decides about a container of a pod whose containers have several limits: nothing is set.
func (d *decision) oneOf(h Holding, g Group, s Share) Share {
	s.State, s.Reason = Unknown, "the containers of the pod have several limits, and which container this is is not known"
	ofAnother := slices.ContainsFunc(d.Shares, func(o Holding) bool { return o.GPU == h.GPU && o.Work.ID == h.Work.ID && o.Bytes == s.Driver.Hard })
	if !s.Read || !ofAnother {
		d.overridden(h, g, "which container of the pod has which limit is not known", "give the containers of a pod shares with the same limit")
		s.State, s.Reason = Unlimited, fmt.Sprintf("its limit is %d MiB, which no container of the pod is to have", s.Driver.Hard>>20)
		if !s.Read {
			s.Reason = "it has no limit"
		}
	}
	return s
}

// found records that a group has the limit of the policy. Processes that are there may have used the GPU before; with dmem what they have is counted, too.
func (d *decision) found(h Holding, g Group, r *Record, known bool) {
	r.Undecided = r.Undecided || !known
	seen := d.unseen(h, g) == ""
	switch {
	case !r.Undecided && seen:
		r.Uncounted = slices.DeleteFunc(r.Uncounted, func(u Uncounted) bool {
			return !slices.ContainsFunc(d.users(g, h.GPU), func(p Process) bool { return p.PID == u.PID && p.Started == u.Started })
		})
	case !r.Undecided:
	case d.Node.Backend == DMem || r.mending || len(g.PIDs) == 0:
		if r.mending {
			d.out.Table.Counts.Overridden++
		}
		r.Undecided, r.mending = false, false
	case r.read.IsZero():
		if r.read, r.used = d.At, g.answers(h.GPU).Group.Limit.Used; d.wasSet(g, h.GPU) && !slices.Contains(g.PIDs, 0) {
			r.before = g.PIDs
		}
	case seen && d.Known[h.GPU].After(r.read):
		d.decide(g, r)
	}
	d.out.Undecided = d.out.Undecided || r.Undecided && seen
	*d.state.record(g, h.GPU) = *r
}

// decide finds out which processes used the GPU before the limit was read, by a list of all that is newer. A limit that NVIDIA's hook has set was there before all of
// them. That it was the hook shows in what the driver counts, from before the list to after it: all that the processes have but CUDA contexts. While they allocate that
// is not known.
func (d *decision) decide(g Group, r *Record) {
	users, used := d.users(g, r.GPU), g.answers(r.GPU).Group.Limit.Used
	if r.Way == ByHook {
		has := memoryOf(users)
		known := !slices.ContainsFunc(users, func(p Process) bool { return p.Memory == 0 })
		switch {
		case known && has < min(r.used, used)+d.Reserve:
			users = nil
		case known && has < max(r.used, used)+d.Reserve:
			r.read, r.used = d.At, used
			return
		}
	}
	for _, p := range users {
		if r.before == nil || slices.Contains(r.before, p.PID) {
			r.Uncounted = append(r.Uncounted, Uncounted{p.PID, p.Started})
		}
	}
	r.Undecided, r.before = false, nil
}

// unseen is why it is not known what uses the GPU in a group, with the remedy; "" if it is.
func (d *decision) unseen(h Holding, g Group) string {
	if slices.Contains(g.PIDs, 0) {
		return "this agent does not see its processes: run it in the PID namespace of the node (hostPID: true in its pod)"
	}
	if _, known := d.Known[h.GPU]; !known && len(g.PIDs) > 0 {
		return "which processes use the GPU is not known: with occupancy: off it is not read"
	}
	return ""
}

// holds decides about a group that has the limit of the policy, and the controller of the backend.
func (d *decision) holds(h Holding, g Group, r Record, s Share) Share {
	a, users := g.answers(h.GPU), d.users(g, h.GPU)
	shadow, unseen := d.shadow(h, g), d.unseen(h, g)
	idle := d.Node.Backend == Misc && memoryOf(users) > d.Reserve && a.Group.Limit.Used == 0 && unseen == ""
	at := &d.state.record(g, h.GPU).idle
	switch {
	case !idle:
		*at = time.Time{}
	case at.IsZero():
		*at = d.At
	}
	switch {
	case len(r.Uncounted) > 0:
		return s.as(Late, fmt.Sprintf("pid %d used the GPU before the limit was set: what it had then is not counted", r.Uncounted[0].PID))
	case d.Node.Backend == DMem && a.Group.Limit.Used > a.Group.Limit.Hard:
		return s.as(Late, fmt.Sprintf("it used %d MiB when the limit was set", a.Group.Limit.Used>>20))
	case shadow != "":
		return s.as(Unlimited, shadow)
	case unseen != "":
		return s.as(Unknown, unseen)
	case r.Undecided:
		return s.as(Unknown, "it is not known so far whether a process used the GPU before the limit was set")
	case memoryOf(users) > a.Group.Limit.Hard+d.Reserve: // where what two groups use is the same, the driver's answers do not show that each has a limit
		return s.as(Unlimited, fmt.Sprintf("its processes have %d MiB: the driver does not count all of it", memoryOf(users)>>20))
	case idle && d.At.Sub(*at) >= idleFor:
		d.problem(problem.LimitNotCounted, h.Work.String(), fmt.Sprintf("the driver counts no memory of %s on %s, of which its processes have %d MiB: it does not limit it", h.Work, h.GPU,
			memoryOf(users)>>20),
			"report this with the versions of the driver and the kernel; no limit holds on this node meanwhile")
		return s.as(Unlimited, fmt.Sprintf("its processes have %d MiB, and the driver counts nothing", memoryOf(users)>>20))
	case h.Way == ByTask && h.Runs && len(g.PIDs) == 0:
		return s.as(Unknown, "it runs, and no process is in its control group")
	}
	return s.as(Limited, "")
}

// memoryOf is what processes have of a GPU together, as far as that is known.
func memoryOf(all []Process) (sum uint64) {
	for _, p := range all {
		sum += p.Memory
	}
	return sum
}

// shadow returns that groups below one with a limit have limits of their own, which count in the place of it; "" if none has. Only the backend misc has that: the
// driver keeps the limits of groups that have ended, also those that were ended, for others with their address. Such a group gets the limit of the work, which
// holds while no process of the work uses the GPU outside of it. The use of a group and the one above it is read one after the other, so that it differs counts
// at the second reading.
func (d *decision) shadow(h Holding, g Group) string {
	if d.Node.Backend != Misc {
		return ""
	}
	var own []Group // of the same limit
	for _, p := range d.pathsBelow(g.Path) {
		below := d.Groups[p]
		a := below.answers(h.GPU)
		limit, want := a.Group.Limit, g.answers(h.GPU).Group.Limit.Hard
		_, set := d.state.Of(p, below.Inode, h.GPU)
		switch {
		case !set && !a.own(Misc) && a.Group.Limit == a.Parent.Limit:
		case limit.Hard == want:
			own = append(own, below)
		case (limit.Hard == gpu.NoMemoryLimit || d.state.left(below, h.GPU, limit.Hard) || slices.Contains(d.Hook, Value{h.GPU, limit.Hard})) && limit.Used <= want:
			d.set(below, h.GPU, want)
			*d.state.record(below, h.GPU) = Record{Path: p, Inode: below.Inode, GPU: h.GPU, Hard: want}
			return "the control group " + p + " in it has the limit of a group that ended"
		default:
			d.overridden(h, below, "a control group in that of the work has a limit of its own", "end the work")
			return fmt.Sprintf("the control group %s in it has a limit of its own, %d MiB", p, limit.Hard>>20)
		}
	}
	parts := map[string]bool{} // of the work that uses the GPU, by whose limit it counts to
	for _, p := range d.users(g, h.GPU) {
		at := g.Path
		for _, o := range own {
			if below(p.Group, o.Path) {
				at = o.Path
			}
		}
		parts[at] = true
	}
	r := d.state.record(g, h.GPU)
	several := len(parts) > 1
	again := r.shadowed && several
	if r.shadowed = several; again {
		return "control groups in it have limits of their own, each as much as the work may have"
	}
	return ""
}
