package nomad

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// reading is what the servers have answered. It is not changed.
type reading struct {
	at      time.Time // before the first question
	nodes   []*api.NodeListStub
	allocs  []*api.AllocationListStub
	details map[string]*api.Node // by ID, of the nodes with GPUs

	followed map[string]*followed // by ID of the allocation
	preempts api.PreemptionConfig
	names    map[string]string // of nodes by ID, where they are given; else they are made
}

// followed is an allocation whose places and replacements are needed.
type followed struct {
	alloc *api.AllocationListStub // as it was last seen
	gone  bool                    // it is not in the latest list: it has ended, or its record was removed
	specs []*spec                 // of the job that it is of, and of the present one, whose replacement it gets; nil = not known
	text  string                  // why they are not known, as what the work has

	stopIndex uint64                    // of the latest change by the servers; 0 = not read
	siblings  []*api.AllocationListStub // allocations of its job, also those that have ended; read when it has to be replaced
}

// translation makes a rescue.Cluster of a reading.
type translation struct {
	*reading
	byID     map[string]*api.NodeListStub
	names    map[string]string // of the nodes with GPUs
	requests []request         // for devices, by work that is followed
	oneGroup bool              // no node has two groups of GPUs
	devices  map[string][]rescue.Device
	replaces map[string]string // by ID of the replacement
}

// translate returns the cluster that a reading shows.
func translate(r *reading, name string, mode rescue.Mode) rescue.Cluster {
	t := &translation{reading: r, byID: map[string]*api.NodeListStub{}, devices: map[string][]rescue.Device{}}
	for _, n := range r.nodes {
		t.byID[n.ID] = n
	}
	t.names, t.requests, t.replaces, t.oneGroup = r.nodeNames(), r.deviceRequests(), r.replacements(), r.hasOneGroup()
	c := rescue.Cluster{Name: name, Mode: mode, ReadAt: r.at, Replacements: true, Marks: true, Pools: map[string][]string{}}
	for _, n := range r.nodes {
		if hasGPUs(n) {
			c.Nodes = append(c.Nodes, t.node(n))
		}
	}
	for _, a := range r.allocs {
		if w, ok := t.work(a); ok {
			c.Work = append(c.Work, w)
		}
	}
	t.addEnded(&c)
	t.addPools(&c)
	return c
}

// node translates a node. What the list lacks is in its details.
func (t *translation) node(n *api.NodeListStub) rescue.Node {
	node := rescue.Node{
		Name: t.names[n.ID], Ready: n.Status == api.NodeStatusReady, Draining: n.Drain,
		Schedulable: n.SchedulingEligibility == api.NodeSchedulingEligible && !n.Drain,
	}
	if d := t.details[n.ID]; d != nil {
		node.Hardware = d.Attributes["unique.hostname"]
		node.Mark, node.MarkIsOurs = markOf(d.Meta)
		node.ChangedIndex = changedIndex(d.Events)
	}
	node.Devices, node.Faults = t.devicesOf(n, node.Name)
	t.devices[n.ID] = node.Devices
	return node
}

// nodeNames names the nodes with GPUs. If several have one name, the others than the newest have their ID in it: such as one that was installed again and
// is down under its old ID.
func (r *reading) nodeNames() map[string]string {
	if r.names != nil {
		return r.names
	}
	newest := map[string]*api.NodeListStub{}
	for _, n := range r.nodes {
		if other := newest[n.Name]; hasGPUs(n) && (other == nil || cmp.Or(cmp.Compare(other.CreateIndex, n.CreateIndex), cmp.Compare(other.ID, n.ID)) < 0) {
			newest[n.Name] = n
		}
	}
	names := map[string]string{}
	for _, n := range r.nodes {
		if !hasGPUs(n) {
			continue
		}
		if names[n.ID] = n.Name; newest[n.Name] != n {
			names[n.ID] = n.Name + " (" + shortID(n.ID) + ")"
		}
	}
	return names
}

// shortID is the beginning of an ID, as Nomad's own commands show it.
func shortID(id string) string { return id[:min(len(id), 8)] }

// Metadata of a node that is marked for repair.
const (
	markKey = "gpu_repair"
	byKey   = "gpu_repair_by"
	byUs    = "gpu-fleet"
)

// markOf returns the repair that a node is marked for. A mark that is no repair is of another program or person.
func markOf(meta map[string]string) (mark health.Repair, ours bool) {
	text, ok := meta[markKey]
	if !ok {
		return health.NoRepair, false
	}
	if mark.UnmarshalText([]byte(text)) != nil || mark == health.NoRepair {
		return health.Replace, false
	}
	return mark, meta[byKey] == byUs
}

// maxEvents is how many events of a node the servers keep.
const maxEvents = 10

// changedIndex is the index of the latest change of a node's eligibility or drain. If older events are gone, there may have been one among them.
func changedIndex(events []*api.NodeEvent) (index uint64) {
	oldest := ^uint64(0)
	for _, e := range events {
		oldest = min(oldest, e.CreateIndex)
		if e.Subsystem == "Drain" || e.Subsystem == "Cluster" && strings.Contains(e.Message, "eligible for scheduling") {
			index = max(index, e.CreateIndex)
		}
	}
	if len(events) >= maxEvents {
		index = max(index, oldest)
	}
	return index
}

// work translates an allocation. It reports false for one that has no GPU and replaces none, and for one that has ended.
func (t *translation) work(a *api.AllocationListStub) (w rescue.Work, ok bool) {
	w = rescue.Work{
		ID: a.ID, Namespace: a.Namespace, Name: a.Name, Controller: controllerOf(a.JobType), Phase: t.phase(a),
		Preempts: preemptsFor(t.preempts, a.JobType), Replaces: t.replaces[a.ID],
	}
	if w.Node = t.names[a.NodeID]; w.Node == "" && a.NodeID != "" {
		w.Node = cmp.Or(a.NodeName, a.NodeID) // not one of those with GPUs
	}
	t.addHolds(&w, a)
	f := t.followed[a.ID]
	if w.Phase == rescue.Ended && w.Replaces == "" || len(w.Holds) == 0 && w.Replaces == "" && f == nil {
		return w, false
	}
	if f != nil {
		w.EndsWithin = f.endsWithin()
		w.Pool, w.PoolUnknown = t.poolOf(f, a)
	}
	return w, true
}

// phase is where an allocation is in its life. Whether one that is lost with its node still runs is not known when the node is back, until the node reports it.
func (t *translation) phase(a *api.AllocationListStub) rescue.Phase {
	switch a.ClientStatus {
	case api.AllocClientStatusComplete, api.AllocClientStatusFailed:
		return rescue.Ended
	case api.AllocClientStatusLost:
		if n := t.byID[a.NodeID]; n != nil && n.Status == api.NodeStatusReady {
			return rescue.Unknown
		}
		return rescue.Ended
	case api.AllocClientStatusPending, api.AllocClientStatusRunning:
	default:
		return rescue.Unknown
	}
	switch {
	case a.DesiredStatus != api.AllocDesiredStatusRun:
		return rescue.Ending
	case a.ClientStatus == api.AllocClientStatusPending:
		return rescue.Pending
	}
	return rescue.Running
}

func controllerOf(jobType string) rescue.Controller {
	switch jobType {
	case api.JobTypeService:
		return rescue.Service
	case api.JobTypeBatch:
		return rescue.Batch
	case api.JobTypeSystem:
		return rescue.System
	case api.JobTypeSysbatch:
		return rescue.SystemBatch
	}
	return rescue.Unmanaged
}

// preemptsAll is the configuration of servers that don't tell it.
var preemptsAll = api.PreemptionConfig{SystemSchedulerEnabled: true, SysBatchSchedulerEnabled: true, BatchSchedulerEnabled: true, ServiceSchedulerEnabled: true}

func preemptsFor(c api.PreemptionConfig, jobType string) bool {
	switch jobType {
	case api.JobTypeService:
		return c.ServiceSchedulerEnabled
	case api.JobTypeBatch:
		return c.BatchSchedulerEnabled
	}
	return true
}

// addHolds adds the devices that an allocation has, and what it asks for: as many of the same kind.
func (t *translation) addHolds(w *rescue.Work, a *api.AllocationListStub) {
	if a.AllocatedResources == nil {
		return
	}
	for _, task := range keysInOrder(a.AllocatedResources.Tasks) {
		for _, d := range a.AllocatedResources.Tasks[task].Devices {
			if d.Vendor == vendor {
				t.addGroup(w, a.NodeID, d)
			}
		}
	}
}

func (t *translation) addGroup(w *rescue.Work, node string, d *api.AllocatedDeviceResource) {
	kind := d.Vendor + "/" + d.Type + "/" + d.Name
	for _, unit := range d.DeviceIDs {
		id := deviceOf(unit)
		shown := rescue.NotShown
		if i := slices.IndexFunc(t.devices[node], func(dev rescue.Device) bool { return dev.ID == id }); i >= 0 {
			kind, shown = t.devices[node][i].Kind, rescue.ShownUnhealthy
			if t.devices[node][i].Healthy {
				shown = rescue.ShownHealthy
			}
		}
		if i := slices.IndexFunc(w.Holds, func(h rescue.Hold) bool { return h.Device == id }); i >= 0 {
			w.Holds[i].Units++
		} else {
			w.Holds = append(w.Holds, rescue.Hold{Device: id, Units: 1, Shown: shown})
		}
	}
	if i := slices.IndexFunc(w.Needs, func(n rescue.Need) bool { return n.Kind == kind }); i >= 0 {
		w.Needs[i].Units += len(d.DeviceIDs)
	} else {
		w.Needs = append(w.Needs, rescue.Need{Kind: kind, Units: len(d.DeviceIDs)})
	}
}

// replacements are which allocation replaces which. The servers do not name it for canaries, and after a lost connection: then it is the first one of the same
// job, group and name that was made with the stop or after it.
func (r *reading) replacements() map[string]string {
	all := map[string]string{}
	for _, a := range r.allocs {
		if a.NextAllocation != "" {
			all[a.NextAllocation] = a.ID
		}
	}
	for _, id := range keysInOrder(r.followed) {
		f := r.followed[id]
		for _, s := range f.siblings {
			if s.ID == f.alloc.NextAllocation {
				all[s.ID] = id
			}
		}
		if next := f.next(); next != "" && f.alloc.NextAllocation == "" && all[next] == "" {
			all[next] = id
		}
	}
	return all
}

func (f *followed) next() string {
	var next *api.AllocationListStub
	for _, s := range f.siblings {
		if s.ID != f.alloc.ID && s.Name == f.alloc.Name && s.TaskGroup == f.alloc.TaskGroup && f.stopIndex > 0 && s.CreateIndex >= f.stopIndex &&
			(next == nil || s.CreateIndex < next.CreateIndex) {
			next = s
		}
	}
	if next == nil {
		return ""
	}
	return next.ID
}

// addEnded adds replacements that have ended already, and so are not in the list of all allocations.
func (t *translation) addEnded(c *rescue.Cluster) {
	have := map[string]bool{}
	for i := range c.Work {
		have[c.Work[i].ID] = true
	}
	for _, id := range keysInOrder(t.followed) {
		for _, s := range t.followed[id].siblings {
			if t.replaces[s.ID] == "" || have[s.ID] {
				continue
			}
			if w, ok := t.work(s); ok {
				have[s.ID] = true
				c.Work = append(c.Work, w)
			}
		}
	}
}
