package nomad

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/api"
)

// spec is what a group of a job asks for, beside devices.
type spec struct {
	job     jobName
	group   string
	version uint64

	datacenters []string // patterns
	pool        string
	constraints []*api.Constraint
	distinct    bool // no two allocations of the job on one node
	distinctIn  bool // nor of the group
	drivers     []string
	devices     []request
	hostVolumes []*api.VolumeRequest

	cpu, cores, memory, disk int64 // MHz, whole cores, MiB, MiB
	ports                    []int
	network                  string // mode; "" = none is asked for

	endsWithin time.Duration

	unknown string // what it has that this program can't look up: then no place is certain
}

// specOf returns what a group of a job asks for.
func specOf(j *api.Job, group string) (*spec, error) {
	i := slices.IndexFunc(j.TaskGroups, func(g *api.TaskGroup) bool { return g.Name != nil && *g.Name == group })
	if i < 0 {
		return nil, fmt.Errorf("a group that is not in version %d of the job", value(j.Version))
	}
	g := j.TaskGroups[i]
	s := &spec{
		job: jobName{value(j.Namespace), value(j.ID)}, group: group, version: value(j.Version), datacenters: j.Datacenters,
		pool: cmp.Or(value(j.NodePool), api.NodePoolDefault),
	}
	s.constrain(j.Constraints, &s.distinct)
	s.constrain(g.Constraints, &s.distinctIn)
	for _, t := range g.Tasks {
		s.addTask(t)
	}
	if g.EphemeralDisk != nil {
		s.disk += int64(value(g.EphemeralDisk.SizeMB))
	}
	s.addNetworks(g.Networks)
	s.addVolumes(g.Volumes)
	s.endsWithin = endsWithin(g)
	return s, nil
}

// value is that of a pointer; nil = the zero value.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// constrain adds constraints of a job, a group or a task.
func (s *spec) constrain(all []*api.Constraint, distinct *bool) {
	for _, c := range all {
		switch c.Operand {
		case api.ConstraintDistinctHosts:
			*distinct = *distinct || c.RTarget != "false"
		case api.ConstraintDistinctProperty:
			s.cantTell("a constraint distinct_property")
		default:
			s.constraints = append(s.constraints, c)
			if _, err := meetsNode(c, &api.Node{}); err != nil {
				s.cantTell(err.Error())
			}
		}
	}
}

func (s *spec) cantTell(what string) { s.unknown = cmp.Or(s.unknown, what) }

func (s *spec) addTask(t *api.Task) {
	s.constrain(t.Constraints, &s.distinctIn)
	if !slices.Contains(s.drivers, t.Driver) {
		s.drivers = append(s.drivers, t.Driver)
	}
	for _, secret := range t.Secrets {
		if secret.Provider != "nomad" && secret.Provider != "vault" {
			s.cantTell("secrets of provider " + secret.Provider)
		}
	}
	if t.Resources != nil {
		s.addResources(t.Resources)
	}
}

func (s *spec) addResources(r *api.Resources) {
	if cores := int64(value(r.Cores)); cores > 0 {
		s.cores += cores
	} else {
		s.cpu += int64(value(r.CPU))
	}
	s.memory += int64(value(r.MemoryMB))
	if r.NUMA != nil && r.NUMA.Affinity == "require" {
		s.cantTell("a NUMA affinity that it requires")
	}
	if len(r.Networks) > 0 {
		s.cantTell("a network of a task")
	}
	for _, d := range r.Devices {
		q := request{name: d.Name, constraints: d.Constraints, many: value(d.Count) > 1}
		s.devices = append(s.devices, q)
		for _, c := range d.Constraints {
			if _, err := meetsDevice(c, &api.NodeDeviceResource{}); err != nil {
				s.cantTell(err.Error())
			}
			if strings.Contains(c.LTarget+c.RTarget, "${device.ids}") {
				s.cantTell("a constraint on the IDs of devices") // of one device, and places are counted by group
			}
		}
	}
}

func (s *spec) addNetworks(all []*api.NetworkResource) {
	for _, n := range all {
		s.network = cmp.Or(n.Mode, "host")
		for _, p := range n.ReservedPorts {
			if !p.IgnoreCollision {
				s.ports = append(s.ports, p.Value)
			}
		}
		for _, p := range slices.Concat(n.ReservedPorts, n.DynamicPorts) {
			if p.HostNetwork != "" && p.HostNetwork != "default" {
				s.cantTell("a port in a host_network")
			}
		}
	}
}

func (s *spec) addVolumes(all map[string]*api.VolumeRequest) {
	for _, name := range keysInOrder(all) {
		v := all[name]
		if v.Type != "host" || v.Sticky || v.PerAlloc {
			s.cantTell("volume " + name + ", which is no host volume of the nodes' configuration")
			continue
		}
		s.hostVolumes = append(s.hostVolumes, v)
	}
}

// endsWithin is how long the tasks of a group take to end at most: they are told so after shutdown_delay, and killed after kill_timeout. The others are told
// when a leader has ended.
func endsWithin(g *api.TaskGroup) time.Duration {
	var leader, others time.Duration
	for _, t := range g.Tasks {
		ends := t.ShutdownDelay + value(t.KillTimeout)
		if t.Leader {
			leader = max(leader, ends)
		} else {
			others = max(others, ends)
		}
	}
	return value(g.ShutdownDelay) + leader + others
}

func (f *followed) endsWithin() (d time.Duration) {
	for _, s := range f.specs {
		d = max(d, s.endsWithin)
	}
	return d
}
