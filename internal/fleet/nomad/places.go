package nomad

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// poolOf names the nodes that may take the replacement of an allocation: they are those of its specs, and the node that it is on. unknown is what it has that
// can't be looked up, so that no node is certain.
func (t *translation) poolOf(f *followed, a *api.AllocationListStub) (name, unknown string) {
	var names []string
	for _, s := range f.specs {
		unknown = cmp.Or(unknown, s.unknown)
		names = append(names, fmt.Sprintf("%s/%s/%s version %d", s.job.namespace, s.job.id, s.group, s.version))
	}
	if len(f.specs) == 0 {
		unknown = cmp.Or(f.text, "a job that was not read yet")
		names = []string{groupName(a.Namespace, a.JobID, a.TaskGroup)}
	}
	return strings.Join(names, " and ") + " from node " + t.names[a.NodeID], unknown
}

// addPools adds the pools of all work that is followed. A node is in one only if it certainly takes the replacement.
func (t *translation) addPools(c *rescue.Cluster) {
	if len(t.followed) == 0 {
		return
	}
	p := &places{translation: t, use: map[string]*use{}, fits: map[*spec][]string{}, fixed: map[fixedKey]bool{}}
	for _, n := range t.nodes {
		if t.names[n.ID] != "" {
			p.use[n.ID] = &use{ports: map[int]bool{}, jobs: map[jobName]int{}, groups: map[string]int{}, held: map[gpu.DeviceID]int{}}
		}
	}
	for _, a := range t.allocs {
		if u := p.use[a.NodeID]; u != nil && t.phase(a) != rescue.Ended {
			u.add(a)
		}
	}
	for _, n := range t.nodes {
		if u := p.use[n.ID]; u != nil {
			u.free = u.freeUnits(t.devices[n.ID])
		}
	}
	p.sortAsks()
	for i := range c.Work {
		w := &c.Work[i]
		f := t.followed[w.ID]
		if _, done := c.Pools[w.Pool]; w.Pool != "" && !done && f != nil && w.PoolUnknown == "" {
			c.Pools[w.Pool] = p.pool(f)
		}
	}
}

// places finds the nodes that take replacements.
type places struct {
	*translation
	use   map[string]*use // by node ID
	asks  [3][]int64      // of all that is followed, the greatest first: CPU, memory, disk
	fits  map[*spec][]string
	fixed map[fixedKey]bool
}

type fixedKey struct {
	spec *spec
	node string
}

// use is what the allocations of a node use.
type use struct {
	cpu, memory, disk int64
	cores             int64
	allocs            int
	ports             map[int]bool
	jobs              map[jobName]int
	groups            map[string]int
	held              map[gpu.DeviceID]int
	free              int // healthy units of devices
}

func (u *use) add(a *api.AllocationListStub) {
	u.allocs++
	u.jobs[jobName{a.Namespace, a.JobID}]++
	u.groups[groupName(a.Namespace, a.JobID, a.TaskGroup)]++
	r := a.AllocatedResources
	if r == nil {
		return
	}
	u.disk += r.Shared.DiskMB
	u.addPorts(r.Shared.Networks)
	for _, p := range r.Shared.Ports {
		u.ports[p.Value] = true
	}
	for _, t := range r.Tasks {
		u.cpu += t.Cpu.CpuShares
		u.cores += int64(len(t.Cpu.ReservedCores))
		u.memory += t.Memory.MemoryMB
		u.addPorts(t.Networks)
		for _, d := range t.Devices {
			for _, id := range d.DeviceIDs {
				u.held[deviceOf(id)]++
			}
		}
	}
}

func groupName(namespace, job, group string) string { return namespace + "/" + job + "/" + group }

func (u *use) addPorts(all []*api.NetworkResource) {
	for _, n := range all {
		for _, p := range slices.Concat(n.ReservedPorts, n.DynamicPorts) {
			u.ports[p.Value] = true
		}
	}
}

// freeUnits is how many units of healthy devices of a node no allocation has.
func (u *use) freeUnits(devices []rescue.Device) (n int) {
	for _, d := range devices {
		if d.Healthy {
			n += max(max(d.Units, 1)-u.held[d.ID], 0)
		}
	}
	return n
}

// sortAsks sorts what the work that is followed asks for: several of its replacements may get places on one node.
func (p *places) sortAsks() {
	for _, f := range p.followed {
		var most [3]int64
		for _, s := range f.specs {
			most = [3]int64{max(most[0], s.cpu), max(most[1], s.memory), max(most[2], s.disk)}
		}
		for i := range most {
			p.asks[i] = append(p.asks[i], most[i])
		}
	}
	for i := range p.asks {
		slices.SortFunc(p.asks[i], func(a, b int64) int { return cmp.Compare(b, a) })
	}
}

// others is the most that n other replacements ask for of CPU, memory or disk.
func (p *places) others(kind, n int) (sum int64) {
	for _, one := range p.asks[kind][:min(max(n, 0), len(p.asks[kind])-1)] {
		sum += one
	}
	return sum
}

// pool returns the nodes that take the replacement of an allocation, also if others that can't be on one node with it come first.
func (p *places) pool(f *followed) []string {
	nodes := p.nodesOf(f)
	if len(nodes) <= p.rivals(f) {
		return nil
	}
	return nodes
}

// rivals is how many replacements that may come before that of an allocation keep their node from it: of work that was stopped, and of what has a smaller ID.
func (p *places) rivals(f *followed) (n int) {
	if !slices.ContainsFunc(f.specs, func(s *spec) bool { return s.distinct || s.distinctIn || len(s.ports) > 0 }) {
		return 0
	}
	replaced := map[string]bool{}
	for _, id := range p.replaces {
		replaced[id] = true
	}
	for id, o := range p.followed {
		first := id < f.alloc.ID || o.gone || o.alloc.DesiredStatus != api.AllocDesiredStatusRun
		if o != f && first && !replaced[id] && slices.ContainsFunc(f.specs, func(s *spec) bool { return slices.ContainsFunc(o.specs, s.excludes) }) {
			n++
		}
	}
	return n
}

// excludes reports whether work of two specs can't be on one node.
func (s *spec) excludes(o *spec) bool {
	return s.job == o.job && (s.distinct || s.distinctIn && s.group == o.group) || slices.ContainsFunc(s.ports, func(port int) bool { return slices.Contains(o.ports, port) })
}

// nodesOf returns the nodes that all specs of an allocation may use, and the node that it is on, where what it uses gets free.
func (p *places) nodesOf(f *followed) (nodes []string) {
	for i, s := range f.specs {
		if p.fits[s] == nil {
			p.fits[s] = p.nodesFor(s)
		}
		if i == 0 {
			nodes = slices.Clone(p.fits[s])
			continue
		}
		nodes = slices.DeleteFunc(nodes, func(n string) bool { return !slices.Contains(p.fits[s], n) })
	}
	home := f.alloc.NodeID
	if p.names[home] == "" || slices.Contains(nodes, p.names[home]) {
		return nodes
	}
	for _, s := range f.specs {
		if n := p.byID[home]; n == nil || !p.mayUse(s, n) || s.version != f.specs[0].version {
			return nodes
		}
	}
	return append(nodes, p.names[home])
}

func (p *places) nodesFor(s *spec) []string {
	nodes := []string{}
	for _, n := range p.nodes {
		if u := p.use[n.ID]; u != nil && u.free > 0 && p.hasRoom(s, n, u) && p.mayUse(s, n) {
			nodes = append(nodes, p.names[n.ID])
		}
	}
	return nodes
}

// mayUse reports whether a node meets all that does not change with the work on it.
func (p *places) mayUse(s *spec, n *api.NodeListStub) bool {
	key := fixedKey{s, n.ID}
	ok, known := p.fixed[key]
	if !known {
		d := p.details[n.ID]
		ok = d != nil && n.Status == api.NodeStatusReady && n.SchedulingEligibility == api.NodeSchedulingEligible && !n.Drain &&
			(s.pool == api.NodePoolAll || s.pool == cmp.Or(n.NodePool, api.NodePoolDefault)) &&
			slices.ContainsFunc(s.datacenters, func(pattern string) bool { ok, _ := path.Match(pattern, n.Datacenter); return ok }) &&
			!slices.ContainsFunc(s.constraints, func(c *api.Constraint) bool { ok, err := meetsNode(c, d); return err != nil || !ok }) &&
			!slices.ContainsFunc(s.drivers, func(name string) bool { return !hasDriver(n, d, name) }) &&
			!slices.ContainsFunc(s.devices, func(q request) bool { return !slices.ContainsFunc(n.NodeResources.Devices, q.accepts) }) &&
			!slices.ContainsFunc(s.hostVolumes, func(v *api.VolumeRequest) bool { return !hasVolume(d, v) }) && hasNetwork(n, s.network)
		p.fixed[key] = ok
	}
	return ok
}

func hasDriver(n *api.NodeListStub, d *api.Node, name string) bool {
	if info, ok := n.Drivers[name]; ok {
		return info != nil && info.Detected && info.Healthy
	}
	ok, err := strconv.ParseBool(d.Attributes["driver."+name])
	return err == nil && ok
}

func hasVolume(d *api.Node, v *api.VolumeRequest) bool {
	have := d.HostVolumes[v.Source]
	return have != nil && have.ID == "" && (v.ReadOnly || !have.ReadOnly)
}

func hasNetwork(n *api.NodeListStub, mode string) bool {
	return mode == "" || mode == "none" ||
		slices.ContainsFunc(n.NodeResources.Networks, func(one *api.NetworkResource) bool { return cmp.Or(one.Mode, "host") == mode })
}

// hasRoom reports whether a node has what a replacement uses, also if other replacements get all other free devices of the node.
func (p *places) hasRoom(s *spec, n *api.NodeListStub, u *use) bool {
	r, taken := n.NodeResources, reserved(n)
	others := u.free - 1
	cpu, cores := s.cpu, int64(len(r.Cpu.ReservableCpuCores))
	if s.cores > 0 {
		if cores == 0 || r.Cpu.TotalCpuCores == 0 || cores-u.cores < s.cores*int64(u.free) {
			return false
		}
		cpu += s.cores * (r.Cpu.CpuShares/int64(r.Cpu.TotalCpuCores) + 1)
	}
	if max := p.maxAllocs(n.ID); max > 0 && u.allocs+u.free > max {
		return false
	}
	return r.Cpu.CpuShares-taken.cpu-u.cpu >= cpu+p.others(0, others) && r.Memory.MemoryMB-taken.memory-u.memory >= s.memory+p.others(1, others) &&
		r.Disk.DiskMB-taken.disk-u.disk >= s.disk+p.others(2, others) &&
		!slices.ContainsFunc(s.ports, func(port int) bool { return u.ports[port] || taken.ports[port] }) &&
		(!s.distinct || u.jobs[s.job] == 0) && (!s.distinctIn || u.groups[groupName(s.job.namespace, s.job.id, s.group)] == 0)
}

func (p *places) maxAllocs(node string) int {
	if d := p.details[node]; d != nil {
		return d.NodeMaxAllocs
	}
	return 0
}

// reserved is what a node keeps for itself.
func reserved(n *api.NodeListStub) use {
	r := n.ReservedResources
	if r == nil {
		return use{}
	}
	return use{
		cpu: int64(r.Cpu.CpuShares), memory: int64(r.Memory.MemoryMB), disk: int64(r.Disk.DiskMB), //nolint:gosec // of a node
		ports: portsOf(r.Networks.ReservedHostPorts),
	}
}

// portsOf reads a list of ports and ranges: "22,80,8000-8010".
func portsOf(text string) map[int]bool {
	all := map[int]bool{}
	for _, one := range list(text) {
		first, last, isRange := strings.Cut(one, "-")
		from, err := strconv.Atoi(first)
		if err != nil {
			continue
		}
		to := from
		if isRange {
			to, _ = strconv.Atoi(last)
		}
		for port := from; port <= min(to, 65535); port++ {
			all[port] = true
		}
	}
	return all
}

// keysInOrder are those of a map.
func keysInOrder[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
