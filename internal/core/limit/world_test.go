package limit_test

import (
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

// world is a node in memory: control groups, a driver with the rules of memacct.c (section 4 of the contract), work, and an agent that makes passes.
type world struct {
	backend limit.Backend
	gpus    map[gpu.DeviceID]uint64
	groups  map[string]*cgroup
	entries map[gpu.DeviceID]map[int]*entry // misc: by address of the group. dmem: the same, removed with the group
	procs   map[int]*proc
	free    []int // addresses of groups that have ended
	nextID  int
	off     map[string]bool // groups in which the controller is off

	work   []*work
	passes *agent
	now    time.Time
	mig    map[gpu.DeviceID]bool
	hooks  bool // by the policy NVIDIA's hook sets 20 GiB
}

type cgroup struct {
	path    string
	inode   uint64
	address int
}

type entry struct{ soft, hard, used uint64 }

type proc struct {
	pid   int
	group *cgroup
	owner holders.Work
	used  map[gpu.DeviceID]uint64
	// charged is to which groups' entries its memory is charged.
	charged map[gpu.DeviceID]map[int]uint64
}

type work struct {
	limit.Holding
	groups []*cgroup
	root   string // of ByPod and ByHook: the pod's group
}

func newWorld(b limit.Backend, gpus ...gpu.DeviceID) *world {
	w := &world{
		backend: b, gpus: map[gpu.DeviceID]uint64{}, groups: map[string]*cgroup{}, entries: map[gpu.DeviceID]map[int]*entry{}, procs: map[int]*proc{},
		off: map[string]bool{}, now: time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC), mig: map[gpu.DeviceID]bool{},
	}
	for _, g := range gpus {
		w.gpus[g], w.entries[g] = 80<<30, map[int]*entry{}
	}
	for _, g := range []string{"/", "/nomad.slice", "/nomad.slice/share.slice", "/kubepods", "/system.slice"} {
		w.mkdir(g)
	}
	w.passes = &agent{world: w}
	return w
}

func (w *world) id() int { w.nextID++; return w.nextID }

func (w *world) mkdir(p string) *cgroup {
	address := w.id()
	if len(w.free) > 0 { // the kernel uses the address of a group that has ended
		address, w.free = w.free[len(w.free)-1], w.free[:len(w.free)-1]
	}
	w.groups[p] = &cgroup{p, uint64(w.id()), address}
	return w.groups[p]
}

func (w *world) rmdir(p string) {
	g := w.groups[p]
	if w.backend == limit.DMem {
		for _, of := range w.entries {
			delete(of, g.address)
		}
	}
	delete(w.groups, p)
	w.free = append(w.free, g.address)
}

// up are the groups from one up to the root.
func (w *world) up(p string) (all []*cgroup) {
	for ; ; p = path.Dir(p) {
		all = append(all, w.groups[p])
		if p == "/" {
			return all
		}
	}
}

// charge allocates memory; it reports whether the driver did that.
func (w *world) charge(p *proc, id gpu.DeviceID, size uint64) bool {
	to := map[int]uint64{}
	up := w.up(p.group.path)
	if w.backend == limit.DMem {
		for _, g := range up {
			if e := w.entries[id][g.address]; e != nil && e.used+size > e.hard {
				return false
			}
		}
		for _, g := range up[:len(up)-1] {
			e := w.entries[id][g.address]
			if e == nil {
				e = &entry{hard: gpu.NoMemoryLimit}
				w.entries[id][g.address] = e
			}
			e.used += size
			to[g.address] += size
		}
	} else {
		for len(up) > 1 && w.off[up[0].path] { // the nearest group in which the controller is on
			up = up[1:]
		}
		for _, g := range up {
			e := w.entries[id][g.address]
			if e == nil {
				continue
			}
			if e.used+size > e.hard {
				return false
			}
			e.used += size
			to[g.address] += size
			break
		}
	}
	if !w.mig[id] && w.total(id)+size > w.gpus[id] {
		for address, n := range to {
			w.entries[id][address].used -= n
		}
		return false
	}
	p.used[id] += size
	if p.charged[id] == nil {
		p.charged[id] = map[int]uint64{}
	}
	for address, n := range to {
		p.charged[id][address] += n
	}
	return true
}

func (w *world) total(id gpu.DeviceID) (sum uint64) {
	for _, p := range w.procs {
		sum += p.used[id]
	}
	return sum
}

func (w *world) kill(p *proc) {
	for id, to := range p.charged {
		for address, n := range to {
			if e := w.entries[id][address]; e != nil {
				e.used -= min(n, e.used)
			}
		}
	}
	delete(w.procs, p.pid)
}

// reset removes a GPU and adds it again.
func (w *world) reset(id gpu.DeviceID) {
	for _, p := range w.sorted() {
		if p.used[id] > 0 {
			w.kill(p)
		}
	}
	w.entries[id] = map[int]*entry{}
}

func (w *world) sorted() (all []*proc) {
	for _, pid := range slices.Sorted(maps.Keys(w.procs)) {
		all = append(all, w.procs[pid])
	}
	return all
}

func (w *world) set(c limit.Change) string {
	g := w.groups[c.Path]
	if g == nil || g.inode != c.Inode {
		return "the group has ended"
	}
	if c.Path == "/" {
		return "NOT_SUPPORTED"
	}
	e := w.entries[c.GPU][g.address]
	if w.backend == limit.DMem {
		if w.off[c.Path] {
			return "NOT_FOUND"
		}
		if e == nil {
			e = &entry{hard: gpu.NoMemoryLimit}
			w.entries[c.GPU][g.address] = e
		}
		if e.soft = c.Soft; c.Hard >= e.used { // else the kernel ignores it in silence
			e.hard = c.Hard
		}
		return ""
	}
	switch {
	case e == nil:
		w.entries[c.GPU][g.address] = &entry{soft: c.Soft, hard: c.Hard}
	case e.used > c.Hard:
		return "INVALID_ARGUMENT"
	default:
		e.soft, e.hard = c.Soft, c.Hard
	}
	return ""
}

func (w *world) get(p string, id gpu.DeviceID) gpu.LimitAnswer {
	q := gpu.LimitQuery{GPU: id, Group: p}
	up := w.up(p)
	if w.backend == limit.DMem {
		if p == "/" || w.off[p] {
			return gpu.LimitAnswer{LimitQuery: q, State: gpu.NoLimit}
		}
		e := w.entries[id][up[0].address]
		if e == nil {
			e = &entry{hard: gpu.NoMemoryLimit}
		}
		return gpu.LimitAnswer{LimitQuery: q, Limit: gpu.MemoryLimit{Soft: e.soft, Hard: e.hard, Used: e.used}}
	}
	for _, g := range up {
		if e := w.entries[id][g.address]; e != nil {
			return gpu.LimitAnswer{LimitQuery: q, Limit: gpu.MemoryLimit{Soft: e.soft, Hard: e.hard, Used: e.used}}
		}
	}
	return gpu.LimitAnswer{LimitQuery: q, State: gpu.NoLimit}
}

// fork starts a process in a group.
func (w *world) fork(g *cgroup, owner holders.Work) *proc {
	p := &proc{pid: w.id(), group: g, owner: owner, used: map[gpu.DeviceID]uint64{}, charged: map[gpu.DeviceID]map[int]uint64{}}
	w.procs[p.pid] = p
	return p
}

func (w *world) pidsBelow(p string) (pids []int) {
	for _, one := range w.sorted() {
		if one.group.path == p || strings.HasPrefix(one.group.path, p+"/") {
			pids = append(pids, one.pid)
		}
	}
	return pids
}

// start starts work with a limit (0 = none) in one way. by sets the hook's limit.
func (w *world) start(way limit.Way, id gpu.DeviceID, bytes uint64, containers int) *work {
	n := w.id()
	k := &work{Holding: limit.Holding{GPU: id, Way: way, Bytes: bytes, Required: bytes > 0, Runs: false}}
	if bytes > 0 {
		k.Pool = "limited"
	}
	uid := fmt.Sprintf("%08x-0000-0000-0000-000000000000", n)
	switch way {
	case limit.ByTask:
		k.Work = holders.Work{Orchestrator: holders.Nomad, Name: fmt.Sprint("job", n), Container: "main", ID: uid}
		k.groups = []*cgroup{w.mkdir("/nomad.slice/share.slice/" + uid + ".main.scope")}
		k.Groups = []string{k.groups[0].path}
	case limit.ByPod, limit.ByHook:
		k.Work = holders.Work{Orchestrator: holders.Kubernetes, Name: fmt.Sprint("pod", n), ID: uid}
		k.root = w.mkdir("/kubepods/pod" + uid).path
		if way == limit.ByPod {
			k.Work.Claim, k.Groups = "c", []string{k.root}
		} else {
			k.Work.Container, w.hooks = "main", true
		}
		for i := range containers {
			g := w.mkdir(fmt.Sprintf("%s/%d", k.root, i))
			k.groups = append(k.groups, g)
			if way == limit.ByHook {
				k.Groups = append(k.Groups, g.path)
			}
		}
	}
	w.work = append(w.work, k)
	return k
}

// owner is the work of its processes, as their control group shows it.
func (k *work) owner() holders.Work {
	o := holders.Work{Orchestrator: k.Work.Orchestrator, ID: k.Work.ID}
	if k.Way == limit.ByTask {
		o.Container = k.Work.Container
	}
	return o
}

// has reports whether a group is of the work.
func (k *work) has(p string) bool {
	return k.root != "" && (p == k.root || strings.HasPrefix(p, k.root+"/")) || k.root == "" && k.groups[0].path == p
}

func (w *world) hook(g *cgroup, id gpu.DeviceID, bytes uint64) {
	soft := bytes
	if w.backend == limit.DMem {
		soft = 0
	}
	w.set(limit.Change{Path: g.path, Inode: g.inode, GPU: id, Soft: soft, Hard: bytes})
}

// end ends work with its groups.
func (w *world) end(k *work) {
	for _, p := range w.sorted() {
		if p.owner == k.owner() {
			w.kill(p)
		}
	}
	for _, g := range k.groups {
		if k.root == "" && w.groups[g.path] == g {
			w.rmdir(g.path)
		}
	}
	if k.root != "" {
		for _, p := range slices.Backward(slices.Sorted(maps.Keys(w.groups))) {
			if p == k.root || strings.HasPrefix(p, k.root+"/") {
				w.rmdir(p)
			}
		}
	}
	w.work = slices.DeleteFunc(w.work, func(o *work) bool { return o == k })
}

// agent makes passes as the shell does: read, decide, write, set, read, decide.
type agent struct {
	world *world
	saved limit.Saved
	table limit.Table
	last  limit.Result
	hides map[holders.Work]bool // work that the record does not list so far
	opens int                   // how often it has opened the driver

	fails  bool                 // limits can't be set
	unread bool                 // the orchestrator's record can't be read
	edit   func(*limit.Reading) // what it reads
}

func (a *agent) pass() {
	first := limit.Next(a.saved, a.table, a.read(nil))
	a.saved, a.table = first.Saved, first.Table
	var done []limit.Done
	for _, c := range first.Changes {
		err := "NO_PERMISSION"
		if !a.fails {
			err = a.world.set(c)
		}
		done = append(done, limit.Done{Change: c, Err: err})
	}
	for _, p := range first.Enable {
		a.enable(p)
	}
	a.world.now = a.world.now.Add(time.Millisecond)
	a.last = limit.Next(a.saved, a.table, a.read(done))
	a.saved, a.table = a.last.Saved, a.last.Table
}

func (a *agent) enable(p string) {
	for g := range a.world.off {
		if path.Dir(g) == p {
			delete(a.world.off, g)
		}
	}
}

// restart is a new process of the agent, which has what is on disk.
func (a *agent) restart() error {
	text, err := a.saved.Encode()
	if err != nil {
		return err
	}
	if a.saved, err = limit.Parse(text); err != nil {
		return err
	}
	a.table, a.last = limit.Table{}, limit.Result{}
	return nil
}

func (a *agent) read(done []limit.Done) limit.Reading {
	r := a.world.read(done, a)
	if a.edit != nil {
		a.edit(&r)
	}
	return r
}

func (w *world) read(done []limit.Done, a *agent) limit.Reading {
	r := limit.Reading{
		At: w.now, Boot: "boot", Driver: "one", Opened: fmt.Sprint(a.opens), Node: limit.Node{Backend: w.backend}, GPUs: map[gpu.DeviceID]limit.GPU{}, Groups: map[string]limit.Group{},
		Known: map[gpu.DeviceID]time.Time{}, HoldersKnown: true, Reserve: 1 << 30, Listed: map[string]bool{}, Done: done,
	}
	if w.hooks {
		r.Hook = []limit.Value{{GPU: "GPU-0", Hard: 20 << 30}}
	}
	for id, memory := range w.gpus {
		r.GPUs[id], r.Known[id] = limit.GPU{Memory: memory, MIG: w.mig[id]}, w.now
	}
	for _, p := range w.sorted() {
		for id := range w.gpus {
			if p.used[id] > 0 {
				r.Processes = append(r.Processes, limit.Process{PID: p.pid, GPU: id, Memory: p.used[id], Work: p.owner, Group: p.group.path})
			}
		}
	}
	for p, g := range w.groups {
		if p == "/" || p == "/kubepods" {
			continue
		}
		one := limit.Group{
			Path: p, Inode: g.inode, Container: strings.Contains(p, "docker-"), Controller: !w.off[p], PIDs: w.pidsBelow(p), Limits: map[gpu.DeviceID]limit.Answers{},
		}
		for id := range w.gpus {
			one.Limits[id] = limit.Answers{Group: w.get(p, id), Parent: w.get(path.Dir(p), id)}
		}
		for _, k := range w.work {
			if k.has(p) {
				one.Work = k.owner()
			}
		}
		r.Groups[p] = one
	}
	if r.HoldersKnown = !a.unread; a.unread {
		return r
	}
	for _, k := range w.work {
		if !a.hides[k.Work] {
			r.Shares, r.Listed[k.Work.ID] = append(r.Shares, k.Holding), true
		}
	}
	return r
}

// truth returns why a share is not limited: "" = the driver refuses what is beyond the limit, for each process of the work together.
func (w *world) truth(k *work) string {
	for _, p := range w.sorted() {
		if p.owner != k.owner() || p.used[k.GPU] == 0 {
			continue
		}
		counted := uint64(0)
		for address, n := range p.charged[k.GPU] {
			for _, g := range append(slices.Clone(k.groups), w.groups[k.root]) {
				if e := w.entries[k.GPU][address]; g != nil && g.address == address && e != nil && e.hard == k.Bytes {
					counted += n
				}
			}
		}
		if counted < p.used[k.GPU] {
			return fmt.Sprintf("pid %d has %d MiB, of which %d count", p.pid, p.used[k.GPU]>>20, counted>>20)
		}
	}
	if sum := w.usedBy(k); sum > k.Bytes {
		return fmt.Sprintf("it has %d MiB of %d", sum>>20, k.Bytes>>20)
	}
	return ""
}

func (w *world) usedBy(k *work) (sum uint64) {
	for _, p := range w.procs {
		if p.owner == k.owner() {
			sum += p.used[k.GPU]
		}
	}
	return sum
}

const maximum = uint64(math.MaxUint64)

// another is the work of another claim of a pod.
func another(w holders.Work, claim string) holders.Work { w.Claim = claim; return w }
