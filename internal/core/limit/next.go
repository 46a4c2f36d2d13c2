package limit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
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
	d.await()
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
		s.Records, s.Pods, s.Leftovers = nil, nil, nil
	}
	d.ended()
	if s.Driver != "" && d.Driver != "" && s.Driver != d.Driver {
		for i := range s.Records {
			s.Records[i].Own = false
		}
		s.Leftovers = nil
	}
	durable.SetClock(times{s}, d.Boot, d.BootTime, d.At)
	if d.Driver != "" {
		s.Driver = d.Driver
	}
	if d.Node.Backend == Misc && !d.Partial {
		d.forgotten()
	}
}

// ended looks for groups that have ended. A driver with the backend misc keeps their limits.
func (d *decision) ended() {
	all := d.state.Records
	d.state.Records = nil
	for _, r := range all {
		g, there := d.Groups[r.Path]
		if there && g.Inode == r.Inode || !there && d.Partial {
			d.state.Records = append(d.state.Records, r)
			continue
		}
		if r.Inode != 0 && d.Node.Backend == Misc {
			d.state.leave(r)
		}
		if r.Way == ByTask && (!d.HoldersKnown || slices.ContainsFunc(d.Shares, r.of)) { // it may begin again
			d.state.Records = append(d.state.Records, Record{Path: r.Path, GPU: r.GPU, Work: r.Work, Hard: r.Hard, Pool: r.Pool, Way: r.Way})
		}
	}
	slices.SortFunc(d.state.Records, compareRecords)
}

// forgotten looks for GPUs on which the driver has forgotten all limits. One group without its limit shows nothing of the others. The limits of work that runs are
// those that it had.
func (d *decision) forgotten() {
	holds := map[gpu.DeviceID]bool{}
	for _, r := range d.state.Records {
		if r.Inode == 0 || r.Undecided {
			continue
		}
		if d.Groups[r.Path].answers(r.GPU).Group.State == gpu.NoLimit {
			d.lost[r.GPU] = true
		} else {
			holds[r.GPU] = true
		}
	}
	maps.DeleteFunc(d.lost, func(id gpu.DeviceID, _ bool) bool { return holds[id] })
	s := &d.state
	s.Leftovers = slices.DeleteFunc(s.Leftovers, func(l Leftover) bool { return d.lost[l.GPU] })
	s.Records = slices.DeleteFunc(s.Records, func(r Record) bool { return d.lost[r.GPU] && r.Way == "" })
	for i := range s.Records {
		if r := &s.Records[i]; d.lost[r.GPU] && r.Inode != 0 {
			*r = Record{Path: r.Path, Inode: r.Inode, GPU: r.GPU, Work: r.Work, Hard: r.Hard, Pool: r.Pool, Way: r.Way, Undecided: true}
		}
	}
}

// await has all GPUs wait until it is known which work ran when the driver was opened.
func (d *decision) await() {
	t := &d.out.Table
	if !d.Awaited || d.was.Opened == d.Opened {
		return
	}
	t.Opened = d.was.Opened
	for id := range d.GPUs {
		t.Waiting[id] = true
	}
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
	if d.was.Opened != d.Opened || d.lost[s.GPU] {
		return true
	}
	before, known := d.was.find(s)
	return d.was.Waiting[s.GPU] && known && before.Group == s.Group
}

// set has a limit set.
func (d *decision) set(g Group, id gpu.DeviceID, hard uint64) {
	c := Change{Path: g.Path, Inode: g.Inode, GPU: id, Hard: hard}
	if hard != gpu.NoMemoryLimit {
		c.Soft = softOf(d.Node.Backend, hard)
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

// holdings are the shares of the reading, with the limits that work keeps, and the pods of the state in the place of those of their claims.
func (d *decision) holdings() []Holding {
	d.Shares = slices.Clone(d.Shares)
	for i := range d.Shares {
		d.keep(&d.Shares[i])
	}
	if d.Partial {
		return d.Shares
	}
	type key struct {
		id  string
		gpu gpu.DeviceID
	}
	var all []Holding
	pods := map[key]Holding{} // by the record
	for _, h := range d.Shares {
		k := key{h.Work.ID, h.GPU}
		if h.Way != ByPod || d.state.Pod(h.Work.ID, h.GPU) == 0 {
			all = append(all, h)
		} else if pods[k].Pool == "" {
			pods[k] = h
		}
	}
	for _, p := range d.state.Pods {
		h := pods[key{p.Work.ID, p.GPU}]
		h.Work, h.GPU, h.Way, h.Bytes = p.Work, p.GPU, ByPod, d.state.Pod(p.Work.ID, p.GPU)
		all = append(all, h)
	}
	all = append(all, d.ofRecords()...)
	slices.SortStableFunc(all, func(a, b Holding) int { return compareShares(a.share(), b.share()) })
	return all
}

// keep has work whose units are not offered any more, or have no limit any more, keep that which it had. The limit of a pod is in the state. A container that has not
// used its GPU has no record.
func (d *decision) keep(h *Holding) {
	if h.Bytes > 0 || h.Way == ByPod {
		return
	}
	was, known := d.was.find(h.share())
	if i := slices.IndexFunc(d.state.Records, func(r Record) bool { return r.of(*h) }); i >= 0 {
		h.Bytes, h.Pool = d.state.Records[i].Hard, cmp.Or(h.Pool, d.state.Records[i].Pool)
	} else if known && h.Way == ByHook && was.Way == ByHook {
		h.Bytes, h.Pool = was.Want, cmp.Or(h.Pool, was.Pool)
	}
}

// given adds up what the work of the reading has of each GPU. The table is sorted.
func (d *decision) given() {
	all := map[gpu.DeviceID]Given{}
	for _, h := range d.Shares {
		s, _ := d.out.Table.find(h.share())
		g := all[h.GPU]
		if g.Bytes += s.Want; g.Units == nil {
			g.Units = map[inventory.UnitID]uint64{}
		}
		for _, id := range h.Units {
			g.Units[id] += s.Want / uint64(len(h.Units))
		}
		all[h.GPU] = g
	}
	if !d.HoldersKnown {
		for id, was := range d.was.Given {
			if was.Bytes > all[id].Bytes {
				all[id] = was
			}
		}
	}
	d.out.Table.Given = all
}

// ofRecords are the holdings of work with a record that the orchestrator's may lack, while its groups are there.
func (d *decision) ofRecords() (all []Holding) {
	if d.HoldersKnown {
		return nil
	}
	for _, r := range d.state.Records {
		g, there := d.Groups[r.Path]
		if !there || r.Way == ByPod || r.Way == "" || r.Work.ID == "" || slices.ContainsFunc(d.Shares, r.of) {
			continue
		}
		if i := slices.IndexFunc(all, r.of); i >= 0 {
			all[i].Groups = append(all[i].Groups, g.Path)
			continue
		}
		all = append(all, Holding{Work: r.Work, GPU: r.GPU, Pool: r.Pool, Way: r.Way, Bytes: r.Hard, Groups: []string{g.Path}})
	}
	return all
}

func (h Holding) share() Share {
	return Share{Work: h.Work, GPU: h.GPU, Pool: h.Pool, Way: h.Way, Required: h.Required, Want: h.Bytes, State: Unknown}
}

// release ends the limits of groups whose work has ended, while the group is there: a driver with the backend misc keeps them.
func (d *decision) release() {
	d.state.Records = slices.DeleteFunc(d.state.Records, func(r Record) bool {
		g := d.Groups[r.Path]
		ended := !d.targets[target{r.Path, r.GPU}] && (d.HoldersKnown || r.Way == ByPod) && len(g.PIDs) == 0 && g.Inode == r.Inode
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

// isStale reports whether a group has got the limit of one that has ended. A limit of another program is never taken for one: where another program may have set
// the same, as that of a container or of the work of another orchestrator, it is foreign.
func (d *decision) isStale(g Group, id gpu.DeviceID) bool {
	a := g.answers(id)
	limit := a.Group.Limit
	if d.Node.Backend != Misc || !a.own(Misc) || limit.Soft != softOf(Misc, limit.Hard) || !d.HoldersKnown {
		return false
	}
	left := d.state.left(g, id, limit.Hard)
	if g.Work == (holders.Work{}) { // a group that only contains others has no processes
		return left && !g.Container && g.Path != "/" && slices.ContainsFunc(d.Processes, func(p Process) bool { return p.Group == g.Path })
	}
	return d.Listed[g.Work.ID] && !d.asks(g, id) && (left || slices.Contains(d.Hook, Value{id, limit.Hard}))
}

// asks reports whether a group is of a container that has the GPU: NVIDIA's hook sets what its environment asks for.
func (d *decision) asks(g Group, id gpu.DeviceID) bool {
	return slices.ContainsFunc(d.Shares, func(h Holding) bool {
		of := h.Way == ByHook && slices.Contains(h.Groups, g.Path) ||
			h.Way == ByPod && slices.ContainsFunc(h.Groups, func(pod string) bool { return g.Path != pod && below(g.Path, pod) })
		return of && h.GPU == id
	})
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
	d.given()
	if !d.Partial { // else one may be newer than the end of another one
		for _, g := range d.Groups {
			d.state.newest = max(d.state.newest, g.Inode)
		}
	}
	if len(d.state.Records)+len(d.state.Pods)+len(d.state.Leftovers) == 0 { // no limit was set or found
		d.state = Saved{}
	}
	d.out.Saved = d.state
}
