package limit

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// idleFor is for how long nothing is counted of processes that have more of a GPU than CUDA contexts need before their share is not called limited: the only sign
// that a driver counts nothing although a limit can be set and read.
const idleFor = time.Minute

// decision is one step. It changes only its own copy of the state.
type decision struct {
	Reading
	state   Saved
	was     Table
	out     Result
	targets map[target]bool       // limits that the policy has
	values  Saved                 // with the values of earlier decisions only
	lost    map[gpu.DeviceID]bool // GPUs on which the driver has forgotten all limits: they were reset
}

type target struct {
	path string
	gpu  gpu.DeviceID
}

// Next decides: which limits are to be set, and what the readings show. It is pure, and gives the same result for the same values.
//
// A share is limited only if, of its group, the backend's controller is on, all its processes with memory of the GPU are in the group or below it, the driver
// returned exactly the limit of the policy as the group's own, and that was so before a process of it used the GPU.
func Next(s Saved, was Table, r Reading) Result {
	d := &decision{Reading: r, state: s.clone(), was: was, targets: map[target]bool{}, lost: map[gpu.DeviceID]bool{}}
	d.out.Table = Table{At: r.At, Node: r.Node, Counts: was.Counts, Opened: r.Opened, Waiting: map[gpu.DeviceID]bool{}}
	d.follow()
	for _, v := range r.Hook {
		d.state.addValue(v)
	}
	d.values.Values = slices.Clone(d.state.Values)
	d.done()
	for _, h := range d.holdings() {
		d.share(h)
	}
	if !r.Partial {
		d.release()
		d.others()
		d.unlisted()
		d.totals()
	}
	if r.Node.CannotSet == "" {
		for _, p := range r.Parents {
			if !p.On {
				d.out.Enable = append(d.out.Enable, p.Path)
			}
		}
	}
	d.finish()
	return d.out
}

// follow forgets what ended with the boot, with the driver, or with a group.
func (d *decision) follow() {
	s := &d.state
	if s.Boot != "" && d.Boot != "" && s.Boot != d.Boot {
		s.Records, s.Pods, s.Values = nil, nil, nil
	}
	if s.Driver != "" && d.Driver != "" && s.Driver != d.Driver {
		for i := range s.Records {
			s.Records[i].Own = false
		}
		s.Values = nil
	}
	durable.SetClock(times{s}, d.Boot, d.BootTime, d.At)
	if d.Driver != "" {
		s.Driver = d.Driver
	}
	s.Records = slices.DeleteFunc(s.Records, func(r Record) bool {
		g, ok := d.Groups[r.Path]
		return ok && g.Inode != r.Inode || !ok && !d.Partial
	})
	for i := range s.Records {
		r := &s.Records[i]
		if d.Node.Backend == Misc && !r.Undecided && d.Groups[r.Path].answers(r.GPU).Group.State == gpu.NoLimit {
			d.lost[r.GPU] = true
		}
	}
	s.Values = slices.DeleteFunc(s.Values, func(v Value) bool { return d.lost[v.GPU] })
	s.Records = slices.DeleteFunc(s.Records, func(r Record) bool { return d.lost[r.GPU] })
}

// done counts the changes that were made.
func (d *decision) done() {
	c := &d.out.Table.Counts
	for _, one := range d.Done {
		switch {
		case one.Err != "":
			c.Failed++
		case one.Hard != gpu.NoMemoryLimit:
			c.Set++
		}
	}
}

// waits reports whether work whose limit is to be set was there when the driver was opened: new work on its GPU has to wait. Work that came later keeps nothing
// from the GPU, as its limit is set within milliseconds.
func (d *decision) waits(s Share) bool {
	if d.was.At.IsZero() || d.was.Opened != d.Opened || d.lost[s.GPU] {
		return true
	}
	before, known := d.was.find(s)
	return d.was.Waiting[s.GPU] && known && before.Group == s.Group
}

// set has a limit set. What is set is in the state before, so that it is recognised on another group later.
func (d *decision) set(g Group, id gpu.DeviceID, hard uint64) {
	c := Change{Path: g.Path, Inode: g.Inode, GPU: id, Hard: hard}
	if hard != gpu.NoMemoryLimit {
		c.Soft = softOf(d.Node.Backend, hard)
		d.state.addValue(Value{id, hard})
	}
	if d.Node.CannotSet == "" {
		d.out.Changes = append(d.out.Changes, c)
	}
}

// failed is why the latest change of a group failed; "" = it did not.
func (d *decision) failed(g Group, id gpu.DeviceID) string {
	for _, one := range d.Done {
		if one.Path == g.Path && one.Inode == g.Inode && one.GPU == id {
			return one.Err
		}
	}
	return ""
}

// holdings are the shares of the reading, and the pods of the state in the place of those of their claims.
func (d *decision) holdings() []Holding {
	var all []Holding
	if d.Partial {
		return d.Shares
	}
	type key struct {
		id  string
		gpu gpu.DeviceID
	}
	pods := map[key][]string{} // groups
	for _, h := range d.Shares {
		if h.Way == ByPod && d.state.Pod(h.Work.ID, h.GPU) > 0 {
			pods[key{h.Work.ID, h.GPU}] = h.Groups
			continue
		}
		all = append(all, h)
	}
	for _, p := range d.state.Pods {
		h := Holding{Work: p.Work, GPU: p.GPU, Pool: p.Pool, Way: ByPod, Required: true, Bytes: d.state.Pod(p.Work.ID, p.GPU), Groups: pods[key{p.Work.ID, p.GPU}]}
		all = append(all, h)
	}
	slices.SortStableFunc(all, func(a, b Holding) int { return compareShares(a.share(), b.share()) })
	return all
}

func (h Holding) share() Share {
	return Share{Work: h.Work, GPU: h.GPU, Pool: h.Pool, Way: h.Way, Required: h.Required, Want: h.Bytes, State: Unknown}
}

// release ends the limits of groups whose work has ended, while the group is there: a driver with the backend misc keeps them.
func (d *decision) release() {
	d.state.Records = slices.DeleteFunc(d.state.Records, func(r Record) bool {
		g := d.Groups[r.Path]
		ended := !d.targets[target{r.Path, r.GPU}] && (d.HoldersKnown || r.Way == ByPod) && len(g.PIDs) == 0
		if r.Way == ByHook || r.Way == "" || !ended {
			return false
		}
		a := g.answers(r.GPU)
		if r.exact(d.Node.Backend, a) {
			d.set(g, r.GPU, gpu.NoMemoryLimit)
			return false
		}
		return a.Group.State != gpu.LimitFailed
	})
}

// exact reports whether an answer is the limit of the policy.
func (r *Record) exact(b Backend, a Answers) bool {
	l := a.Group.Limit
	return a.Group.State == gpu.LimitRead && l.Hard == r.Hard && l.Soft == softOf(b, r.Hard)
}

// others looks at the groups for which the policy has no limit: one that this agent has set for another group is ended, and one of another program is shown.
func (d *decision) others() {
	for _, p := range slices.Sorted(maps.Keys(d.Groups)) {
		g := d.Groups[p]
		for _, id := range slices.Sorted(maps.Keys(g.Limits)) {
			a := g.answers(id)
			if a.Group.State != gpu.LimitRead || a.Group.Limit.Hard == gpu.NoMemoryLimit || d.belowTarget(p, id) {
				continue
			}
			if d.isStale(g, id) {
				d.stale(g, id)
				continue
			}
			d.foreign(g, id)
		}
	}
}

// belowTarget reports whether a group has a limit by the policy, or is in one that has.
func (d *decision) belowTarget(path string, id gpu.DeviceID) bool {
	if d.targets[target{path, id}] {
		return true
	}
	for _, p := range above(path) {
		if d.targets[target{p, id}] {
			return true
		}
	}
	return slices.ContainsFunc(d.state.Records, func(r Record) bool { return r.GPU == id && below(path, r.Path) })
}

// isStale reports whether a group has a limit that this agent has set, for another group: the record of the orchestrator lists its work without a limit, or it is
// of no work and has processes: a group that only contains others has none. A limit with a value that this agent has not set is of another program.
func (d *decision) isStale(g Group, id gpu.DeviceID) bool {
	a := g.answers(id)
	set := d.Node.Backend == Misc && a.own(d.Node.Backend) && d.values.has(Value{id, a.Group.Limit.Hard}) && a.Group.Limit.Soft == softOf(d.Node.Backend, a.Group.Limit.Hard)
	if g.Work != (holders.Work{}) {
		return set && d.HoldersKnown && d.Listed[g.Work.ID]
	}
	return set && d.HoldersKnown && g.Path != "/" && slices.ContainsFunc(d.Processes, func(p Process) bool { return p.Group == g.Path })
}

// stale ends a limit that a group has got with the address of one that has ended.
func (d *decision) stale(g Group, id gpu.DeviceID) {
	if !slices.ContainsFunc(d.was.Problems, func(p problem.Problem) bool { return p.Code == problem.StaleLimit && p.Object == g.Path }) {
		d.out.Table.Counts.Stale++
	}
	d.problem(problem.StaleLimit, g.Path, fmt.Sprintf("the control group %s has a limit of %d MiB on %s, which the driver has kept of a group that ended", g.Path,
		g.answers(id).Group.Limit.Hard>>20, id), d.orRemedy("this agent ends it"))
	d.set(g, id, gpu.NoMemoryLimit)
}

// orRemedy is a remedy, or what keeps the agent from it.
func (d *decision) orRemedy(does string) string {
	if d.Node.CannotSet != "" {
		return d.Node.CannotSet
	}
	return does
}

// foreign shows the limit of another program: of each work in the group, or of the group.
func (d *decision) foreign(g Group, id gpu.DeviceID) {
	a := g.answers(id)
	s := Share{GPU: id, Group: g.Path, Read: true, Driver: a.Group.Limit, State: Foreign, Reason: "no policy of this node has a limit for it"}
	if !a.own(d.Node.Backend) {
		s.Reason = "a control group above it has this limit"
	}
	works := map[holders.Work]bool{}
	for _, p := range d.Processes {
		if p.Group == g.Path && p.GPU == id {
			works[p.Work] = true
		}
	}
	for _, h := range d.Shares {
		if h.GPU == id && slices.Contains(h.Groups, g.Path) {
			works[h.Work] = true
		}
	}
	if len(works) == 0 {
		works[holders.Work{}] = true
	}
	for w := range works {
		s.Work = w
		d.out.Table.Shares = append(d.out.Table.Shares, s)
	}
}

// totals reports that the agent's own group has a limit: then the driver shows that as the memory of a GPU.
func (d *decision) totals() {
	for _, id := range slices.Sorted(maps.Keys(d.GPUs)) {
		if own := d.GPUs[id].Own; own.Group != "" && own.State == gpu.LimitRead && own.Limit.Hard != gpu.NoMemoryLimit {
			d.problem(problem.MemoryTotal, string(id), fmt.Sprintf("this agent is in the control group %s, which has a limit of %d MiB on %s: the driver may show that as its memory",
				own.Group, own.Limit.Hard>>20, id), "run the agent in a control group without a limit of device memory")
		}
	}
}

func (d *decision) problem(code problem.Code, object, text, remedy string) {
	d.out.Table.Problems = append(d.out.Table.Problems, problem.Problem{Code: code, Object: object, Text: text, Remedy: remedy})
}

// finish sorts, and continues since when shares are in their states.
func (d *decision) finish() {
	t := &d.out.Table
	slices.SortStableFunc(t.Shares, compareShares)
	t.Problems = slices.Compact(slices.SortedFunc(slices.Values(t.Problems), compareProblems))
	for i := range t.Shares {
		s := &t.Shares[i]
		s.Since = d.At
		was, known := d.was.find(*s)
		if known && was.State == s.State {
			s.Since = was.Since
		}
		if s.State == Late && (!known || was.State != Late) {
			t.Counts.Late++
		}
	}
	if len(d.state.Records)+len(d.state.Pods)+len(d.state.Values) == 0 { // no limit was set or found
		d.state = Saved{}
	}
	d.out.Saved = d.state
}
