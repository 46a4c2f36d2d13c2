package limits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
)

// seen is what does not change during a pass.
type seen struct {
	state   core.State
	inv     *inventory.Allocatable
	node    limit.Node
	support limit.Support
	limits  bool // the policy has some
}

// see reads what the node can do; open is false while the driver is not. After an error that is not known.
func (l *Limiter) see(ctx context.Context) (n seen, open bool, err error) {
	n.state = l.monitor.State()
	n.inv = n.state.Allocatable
	n.limits = hasLimits(n.inv)
	var known bool
	if n.node.Unsupported, known = l.monitor.LimitsUnsupported(); !known || n.state.Snapshot.Driver.State != gpu.DriverReady {
		return n, false, nil
	}
	n.node.Foreign = !n.limits
	if n.limits || len(l.saved.Records)+len(l.saved.Pods) > 0 || l.opts.Setter == nil {
		n.node.CannotSet = l.cannotSet(ctx)
	}
	if unusable := l.opts.Groups.Check(); unusable != nil {
		n.node.Unsupported = cmp.Or(n.node.Unsupported, l.withComponent(unusable))
	} else if n.node.Backend, err = Backend(l.opts.Groups); err == nil && n.node.Backend == limit.NoBackend {
		n.node.Unsupported = cmp.Or(n.node.Unsupported, limit.WithoutBackend)
	}
	if n.node.Unsupported != "" { // nothing is set
		err = nil
	}
	n.support.Node = n.node
	return n, true, err
}

// withComponent is why control groups can't be read. It begins with what is missing in the agent's container, because the cause of a pool has room for little more.
func (l *Limiter) withComponent(err error) string {
	if l.opts.Orchestrator == holders.Kubernetes && (errors.Is(err, cgroup.ErrOwnOnly) || errors.Is(err, fs.ErrNotExist)) {
		return "add the component deploy/limits-reader, or memoryLimits.read: " + err.Error()
	}
	return err.Error()
}

// cannotSet is why no limit can be set; "" if one can.
func (l *Limiter) cannotSet(ctx context.Context) string {
	if l.opts.Setter == nil {
		if l.opts.CannotSet != "" {
			return l.opts.CannotSet
		}
		return "this agent only reads limits"
	}
	if r, is := l.opts.Setter.(Readier); is {
		if err := r.Ready(ctx); err != nil {
			return err.Error()
		}
	}
	return ""
}

// Backend returns by which controller the driver limits memory: see limit.BackendOf. A file that can't be read is an error: a limit for the other controller would
// stay in the groups above.
func Backend(groups cgroup.FS) (limit.Backend, error) {
	capacity, err := os.ReadFile(filepath.Join(groups.Mount, "dmem.capacity"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // without that controller it is missing
		return limit.NoBackend, err
	}
	root, err := groups.Read("/")
	if err != nil {
		return limit.NoBackend, err
	}
	return limit.BackendOf(string(capacity), root.Controllers), nil
}

// read makes a reading.
func (l *Limiter) read(ctx context.Context, n seen, done []limit.Done) (limit.Reading, error) {
	r := l.begin(n, done)
	record, err := l.record(ctx, n.inv)
	unread := err != nil
	r.HoldersKnown = !unread && record.Complete
	r.Awaited = !unread && record.Work == nil && record.Missing == "" // by the client of Nomad's agent before its first answer
	r.Listed = map[string]bool{}
	for id := range record.Work {
		r.Listed[id] = true
	}
	pods := map[string]string{}
	if l.opts.Orchestrator == holders.Kubernetes && n.node.Unsupported == "" {
		if pods, err = l.opts.Groups.Pods(); err != nil {
			return r, err
		}
	}
	l.addProcesses(&r, pods)
	all := limit.WithPods(limit.Holdings(record, n.inv), l.saved.Pods, n.inv)
	if n.node.Unsupported != "" {
		r.Shares = all
		return r, nil
	}
	paths := map[string]bool{}
	for _, h := range all {
		if h.Groups, err = l.groupsOf(h, &r, pods); err != nil {
			return r, err
		}
		if unread && len(h.Groups) == 0 {
			continue // by the record before, of work that may have ended
		}
		r.Shares = append(r.Shares, h)
		add(paths, h.Groups...)
		if at, ok := pods[h.Work.ID]; ok {
			add(paths, at)
		}
	}
	for _, p := range l.saved.Pods {
		if at, ok := pods[p.Work.ID]; ok {
			children, err := l.childrenOf(at)
			if err != nil {
				return r, err
			}
			add(paths, children...)
		}
	}
	for _, one := range l.saved.Records {
		add(paths, one.Path)
	}
	tasks, err := l.taskGroups(n)
	if err != nil {
		return r, err
	}
	add(paths, tasks...)
	for _, p := range r.Processes {
		addBetween(paths, p.Group)
	}
	return r, l.addGroups(ctx, n, &r, paths)
}

// taskGroups are the groups of all tasks of Nomad, if one of them may have the limit of one that has ended.
func (l *Limiter) taskGroups(n seen) ([]string, error) {
	if l.opts.Orchestrator != holders.Nomad || !n.limits && len(l.saved.Records)+len(l.saved.Leftovers) == 0 {
		return nil, nil
	}
	return l.opts.Groups.Tasks()
}

// addBetween adds the group of a process, and those between it and that of its work: each can have a limit that a group which ended has left.
func addBetween(paths map[string]bool, group string) {
	if group == "" || group == "/" {
		return
	}
	between := []string{group}
	for at := group; at != "/"; at = path.Dir(at) {
		if paths[at] {
			add(paths, between...)
			return
		}
		between = append(between, at)
	}
	add(paths, group)
}

func add(paths map[string]bool, more ...string) {
	for _, p := range more {
		paths[p] = true
	}
}

// begin is a reading without groups and work.
func (l *Limiter) begin(n seen, done []limit.Done) limit.Reading {
	r := limit.Reading{At: time.Now(), Node: n.node, Done: done, GPUs: map[gpu.DeviceID]limit.GPU{}, Groups: map[string]limit.Group{}, Known: map[gpu.DeviceID]time.Time{}}
	if l.opts.Boot != nil {
		r.Boot, r.BootTime = l.opts.Boot()
	}
	r.Opened = strconv.Itoa(n.state.Incarnation)
	if l.opts.Load != nil {
		r.Driver = l.opts.Load()
	}
	for _, d := range n.state.Snapshot.Devices {
		if d.At == gpu.WholeGPU(d.ID) {
			r.GPUs[d.ID] = limit.GPU{Memory: d.Memory, MIG: d.MIG}
		}
	}
	for u := range n.inv.Devices() {
		if g, full := r.GPUs[u.Device.ID]; full && u.Memory > 0 {
			g.Share, g.Pool, g.Required = u.Memory, u.Pool, u.Sharing.Limit == inventory.LimitRequired
			r.GPUs[u.Device.ID] = g
		}
	}
	r.Parents = l.parents(n)
	r.Reserve = max(n.inv.LimitPolicy().Reserve, inventory.DefaultReserve) // a file may have none
	for _, bytes := range n.inv.HookLimits() {
		for u := range n.inv.Devices() {
			if u.Memory > 0 {
				r.Hook = append(r.Hook, limit.Value{GPU: u.Device.ID, Hard: bytes})
			}
		}
	}
	return r
}

// record is the orchestrator's, with the allocations that were looked up and that it does not show so far. With an error it is the one before, because Nomad's
// clients restart tasks in place while their servers do not answer.
func (l *Limiter) record(ctx context.Context, inv *inventory.Allocatable) (holders.Record, error) {
	if l.opts.Holders == nil {
		return holders.Record{}, errors.New("no record")
	}
	r, err := l.opts.Holders(ctx, inv)
	if err == nil {
		l.listed = r
	}
	return l.tasks.with(l.listed), err
}

// addProcesses adds the processes of the latest table of use.
func (l *Limiter) addProcesses(r *limit.Reading, pods map[string]string) {
	if l.opts.Use == nil {
		return
	}
	table := l.opts.Use()
	for i := range table.Devices {
		d := &table.Devices[i]
		if _, full := r.GPUs[d.ID]; !full || d.Processes == nil {
			continue
		}
		if at := d.Usage.At; !at.IsZero() { // else they are those of the table before
			r.Known[d.ID] = at
		}
		for _, p := range d.Processes {
			r.Processes = append(r.Processes, processOf(p, pods))
		}
	}
}

func processOf(p use.Process, pods map[string]string) limit.Process {
	memory := uint64(0)
	if p.Memory.OK {
		memory = p.Memory.Value
	}
	return limit.Process{PID: p.PID, Started: p.Started, GPU: p.At.GPU, Memory: memory, Work: p.Owner, Group: cgroup.Resolve(p.Group, pods)}
}

// groupsOf are the groups in which the work of a holding is: its task's, its pod's, or those of containers.
func (l *Limiter) groupsOf(h limit.Holding, r *limit.Reading, pods map[string]string) (groups []string, err error) {
	switch {
	case h.Way == limit.ByTask:
		groups = l.groupsOfTask(h.Work)
	case pods[h.Work.ID] == "":
		for _, p := range r.Processes { // docker, podman
			if p.Work.ID == h.Work.ID && p.Work.Orchestrator == h.Work.Orchestrator && (p.Work.Container == "" || p.Work.Container == h.Work.Container) && p.Group != "" && p.Group != "/" {
				groups = append(groups, p.Group)
			}
		}
		slices.Sort(groups)
		groups = slices.Compact(groups)
	case h.Way == limit.ByPod:
		groups = []string{pods[h.Work.ID]}
	default:
		children, err := l.childrenOf(pods[h.Work.ID])
		if err != nil {
			return nil, err
		}
		for _, at := range children {
			groups = append(groups, l.containerIn(at))
		}
	}
	return groups, nil
}

// groupsOfTask are the groups that Nomad has for a task of exec, java or raw_exec: one at most.
func (l *Limiter) groupsOfTask(w holders.Work) (groups []string) {
	for _, slice := range cgroup.NomadSlices {
		at := slice + "/" + w.ID + "." + w.Container + ".scope"
		if _, err := os.Lstat(l.opts.Groups.Path(at)); err == nil {
			groups = append(groups, at)
		}
	}
	return groups
}

// containerIn is the group in which a runtime has a container, by that which is the child of the pod's: crun makes one in it (crun(1), run.oci.systemd.subgroup).
func (l *Limiter) containerIn(group string) string {
	inner := path.Join(group, "container")
	if _, err := os.Lstat(l.opts.Groups.Path(inner)); err == nil {
		return inner
	}
	return group
}

// childrenOf returns the groups directly below a group: none below one that has ended.
func (l *Limiter) childrenOf(group string) (paths []string, err error) {
	names, err := l.opts.Groups.Children(group)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, name := range names {
		paths = append(paths, path.Join(group, name))
	}
	return paths, nil
}

// addGroups adds groups to a reading, with what the driver returns for them. One that has ended, or that is none, is left out.
func (l *Limiter) addGroups(ctx context.Context, n seen, r *limit.Reading, paths map[string]bool) error {
	ids := l.gpusOf(n, r)
	var queries []gpu.LimitQuery
	ask := func(group string, id gpu.DeviceID) {
		queries = append(queries, gpu.LimitQuery{GPU: id, Group: l.opts.Groups.Path(group)})
	}
	for p := range paths {
		g, err := l.group(n, r, p)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, cgroup.ErrPath) {
			continue
		}
		if err != nil { // its limit can't be taken for one that has ended
			return fmt.Errorf("control group %s: %w", p, err)
		}
		r.Groups[p] = g
		for _, id := range ids {
			ask(p, id)
			if parent := path.Dir(p); parent != "/" {
				ask(parent, id)
			}
		}
	}
	own := ""
	if !r.Partial {
		own = ownGroup()
	}
	for u := range n.inv.Devices() {
		if _, full := r.GPUs[u.Device.ID]; full && own != "" {
			ask(own, u.Device.ID)
		}
	}
	if len(queries) == 0 {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, driverAtMost)
	defer cancel()
	var answers []gpu.LimitAnswer
	for some := range slices.Chunk(queries, readAtOnce) {
		if !r.Partial && r.Done == nil && l.newer() { // what was set is read back
			return errNewTasks
		}
		more, err := l.monitor.MemoryLimits(limited, some)
		if err != nil {
			return err
		}
		answers = append(answers, more...)
	}
	l.addAnswers(r, answers, own)
	l.dropReplaced(n, r)
	r.At = time.Now()
	return nil
}

// dropReplaced drops groups that have ended while the driver was asked. One in the place of such a group, as exec makes it for a task that it restarts, has no
// answers: they may be of either.
func (l *Limiter) dropReplaced(n seen, r *limit.Reading) {
	for p, g := range r.Groups {
		if id, err := l.opts.Groups.ID(p); err == nil && id.Inode == g.Inode {
			continue
		}
		if g, err := l.group(n, r, p); err == nil {
			r.Groups[p] = g
		} else {
			delete(r.Groups, p)
		}
	}
}

// addAnswers adds the driver's answers to the groups of a reading.
func (l *Limiter) addAnswers(r *limit.Reading, answers []gpu.LimitAnswer, own string) {
	by := map[gpu.LimitQuery]gpu.LimitAnswer{}
	for _, a := range answers {
		by[a.LimitQuery] = a
	}
	of := func(group string, id gpu.DeviceID) gpu.LimitAnswer {
		a, asked := by[gpu.LimitQuery{GPU: id, Group: l.opts.Groups.Path(group)}]
		if !asked {
			a.State = gpu.NoLimit
		}
		return a
	}
	for p, g := range r.Groups {
		for id := range r.GPUs {
			if _, asked := by[gpu.LimitQuery{GPU: id, Group: l.opts.Groups.Path(p)}]; asked {
				g.Limits[id] = limit.Answers{Group: of(p, id), Parent: of(path.Dir(p), id)}
			}
		}
	}
	for id, g := range r.GPUs {
		if own != "" {
			g.Own = of(own, id)
			r.GPUs[id] = g
		}
	}
}

// group reads one group.
func (l *Limiter) group(n seen, r *limit.Reading, at string) (limit.Group, error) {
	g, err := l.opts.Groups.Read(at)
	if err != nil {
		return limit.Group{}, err
	}
	pids, err := l.opts.Groups.ProcessesBelow(at)
	if err != nil {
		return limit.Group{}, err
	}
	member := cgroup.MemberOf(at)
	of := limit.Group{
		Path: at, Inode: g.Inode, Work: member.Work, Container: member.Container, Controller: g.Has(n.node.Backend.Controller()), PIDs: pids,
		Limits: map[gpu.DeviceID]limit.Answers{},
	}
	for _, p := range r.Processes {
		if p.Group == at && of.Work == (holders.Work{}) {
			of.Work = p.Work
		}
	}
	return of, nil
}

// gpusOf are the GPUs on which limits of work are read: those whose shares have one, those of which limits are known, and those that processes use.
func (l *Limiter) gpusOf(n seen, r *limit.Reading) (ids []gpu.DeviceID) {
	used := map[gpu.DeviceID]bool{}
	for _, h := range r.Shares {
		used[h.GPU] = used[h.GPU] || r.Partial
	}
	if !r.Partial {
		for u := range n.inv.Devices() {
			used[u.Device.ID] = used[u.Device.ID] || u.Memory > 0
		}
		for _, one := range l.saved.Records {
			used[one.GPU] = true
		}
		for _, one := range l.saved.Pods {
			used[one.GPU] = true
		}
		for _, one := range l.saved.Leftovers {
			used[one.GPU] = true
		}
		for _, p := range r.Processes {
			used[p.GPU] = true
		}
	}
	for _, id := range slices.Sorted(maps.Keys(r.GPUs)) {
		if used[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// ownGroup is the control group of this process, as far as it is not the root of its namespace; "" = not known.
func ownGroup() string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && p != "/" && !strings.HasPrefix(p, "/..") {
			return p
		}
	}
	return ""
}
