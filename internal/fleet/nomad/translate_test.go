package nomad

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/check"
)

const xid95 = "XID_95 unhealthy: XID 95 uncontained memory error since 2026-11-27T09:00Z; action: reset the GPU; cleared by: reset seen"

// region is a reading that tests change.
type region struct{ reading }

func newRegion(nodes, gpus int) *region {
	r := &region{reading{
		at: time.Date(2026, 11, 27, 9, 10, 0, 0, time.UTC), details: map[string]*api.Node{}, followed: map[string]*followed{},
	}}
	for n := range nodes {
		r.addNode(n, gpus)
	}
	return r
}

func (r *region) addNode(n, gpus int) {
	group := &api.NodeDeviceResource{Vendor: "nvidia", Type: "gpu", Name: "H100"}
	for g := range gpus {
		group.Instances = append(group.Instances, &api.NodeDevice{ID: gpuID(n, g), Healthy: true, Locality: &api.NodeDeviceLocality{PciBusID: fmt.Sprintf("0000:%02x:00.0", g)}})
	}
	id := nodeID(n)
	node := &api.Node{
		ID: id, Name: fmt.Sprintf("node-%d", n), Datacenter: "dc1", NodePool: "default", Status: "ready", SchedulingEligibility: "eligible",
		Attributes: map[string]string{"unique.hostname": fmt.Sprintf("host-%d", n), "kernel.name": "linux"}, Meta: map[string]string{},
		Drivers: map[string]*api.DriverInfo{"docker": {Detected: true, Healthy: true}}, CreateIndex: uint64(100 + n),
		NodeResources: &api.NodeResources{
			Cpu: api.NodeCpuResources{CpuShares: 64000, TotalCpuCores: 64}, Memory: api.NodeMemoryResources{MemoryMB: 512000}, Disk: api.NodeDiskResources{DiskMB: 1000000},
			Networks: []*api.NetworkResource{{Mode: "host"}, {Mode: "bridge"}}, Devices: []*api.NodeDeviceResource{group},
		},
	}
	r.nodes = append(r.nodes, stubOf(node))
	r.details[id] = node
}

func nodeID(n int) string   { return fmt.Sprintf("%08d-0000-4000-8000-000000000000", n) }
func gpuID(n, g int) string { return fmt.Sprintf("GPU-%08d-0000-4000-8000-%012d", n, g) }

// instance is a GPU of a node.
func (r *region) instance(n, g int) *api.NodeDevice {
	return r.nodes[n].NodeResources.Devices[0].Instances[g]
}

func (r *region) fail(n, g int, text string) {
	r.instance(n, g).Healthy, r.instance(n, g).HealthDescription = false, text
}

// run adds an allocation that runs with GPUs of a node.
func (r *region) run(id, jobType string, n int, gpus ...int) *api.AllocationListStub {
	var ids []string
	for _, g := range gpus {
		ids = append(ids, gpuID(n, g))
	}
	a := &api.AllocationListStub{
		ID: id, Name: id + ".g[0]", Namespace: "default", NodeID: nodeID(n), NodeName: fmt.Sprintf("node-%d", n), JobID: id, JobType: jobType, TaskGroup: "g",
		DesiredStatus: "run", ClientStatus: "running", CreateIndex: 1000,
		AllocatedResources: &api.AllocatedResources{Tasks: map[string]*api.AllocatedTaskResources{"t": {
			Cpu: api.AllocatedCpuResources{CpuShares: 1000}, Memory: api.AllocatedMemoryResources{MemoryMB: 1000},
			Devices: []*api.AllocatedDeviceResource{{Vendor: "nvidia", Type: "gpu", Name: "H100", DeviceIDs: ids}},
		}}},
	}
	r.allocs = append(r.allocs, a)
	return a
}

// job is the job of an allocation: one group of one task.
func job(a *api.AllocationListStub, gpus uint64) *api.Job {
	none, cpu, memory, kill := uint64(0), 1000, 1000, 5*time.Second
	return &api.Job{
		ID: &a.JobID, Namespace: &a.Namespace, Type: &a.JobType, Version: &none, Datacenters: []string{"dc*"},
		TaskGroups: []*api.TaskGroup{{Name: &a.TaskGroup, Tasks: []*api.Task{{
			Name: "t", Driver: "docker", KillTimeout: &kill, Resources: &api.Resources{
				CPU: &cpu, MemoryMB: &memory, Devices: []*api.RequestedDevice{{Name: "nvidia/gpu", Count: &gpus}},
			},
		}}}},
	}
}

// follow follows an allocation, with its job changed.
func (r *region) follow(t *testing.T, a *api.AllocationListStub, change func(*api.Job)) {
	t.Helper()
	j := job(a, uint64(len(a.AllocatedResources.Tasks["t"].Devices[0].DeviceIDs)))
	if change != nil {
		change(j)
	}
	s, err := specOf(j, a.TaskGroup)
	check.NoError(t, err)
	r.followed[a.ID] = &followed{alloc: a, specs: []*spec{s}}
}

func (r *region) cluster() rescue.Cluster {
	return translate(&r.reading, "dc1", rescue.ModeAct)
}

// work returns work of a cluster; nil = it has none of that ID.
func work(c rescue.Cluster, id string) *rescue.Work {
	for i := range c.Work {
		if c.Work[i].ID == id {
			return &c.Work[i]
		}
	}
	return nil
}

// A node, its GPUs and an allocation are what the servers have.
func TestTranslate(t *testing.T) {
	r := newRegion(1, 2)
	r.fail(0, 1, xid95)
	a := r.run("web", "service", 0, 1)
	r.follow(t, a, func(j *api.Job) {
		delay := 3 * time.Second
		j.TaskGroups[0].ShutdownDelay = &delay
	})
	c := r.cluster()
	n := c.Nodes[0]
	if n.Name != "node-0" || n.Hardware != "host-0" || !n.Ready || n.Draining || !n.Schedulable || len(n.Devices) != 2 || n.Devices[1].Healthy || !n.Devices[0].Healthy {
		t.Errorf("node %+v", n)
	}
	want := rescue.Fault{
		At: gpu.WholeGPU(gpu.DeviceID(gpuID(0, 1))), State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Since: time.Date(2026, 11, 27, 9, 0, 59, 0, time.UTC),
	}
	if len(n.Faults) != 1 || fmt.Sprint(n.Faults[0]) != fmt.Sprint(want) {
		t.Errorf("faults %+v, want %+v", n.Faults, want)
	}
	w := work(c, "web")
	if w.Node != "node-0" || w.Controller != rescue.Service || w.Phase != rescue.Running || w.EndsWithin != 8*time.Second || w.Preempts || w.Pool == "" ||
		!slices.Equal(w.Holds, []rescue.Hold{{Device: gpu.DeviceID(gpuID(0, 1)), Units: 1, Shown: rescue.ShownUnhealthy}}) ||
		!slices.Equal(w.Needs, []rescue.Need{{Kind: "nvidia/gpu", Units: 1}}) {
		t.Errorf("work %+v", w)
	}
	if got := c.Pools[w.Pool]; !slices.Equal(got, []string{"node-0"}) {
		t.Errorf("pool %q: %v", w.Pool, got)
	}
}

// The status of an allocation at its servers, by its client and by its node is one phase.
func TestPhases(t *testing.T) {
	for _, tc := range []struct {
		desired, client, node string
		want                  rescue.Phase
	}{
		{"run", "running", "ready", rescue.Running},
		{"run", "pending", "ready", rescue.Pending},
		{"run", "unknown", "disconnected", rescue.Unknown},
		{"stop", "running", "ready", rescue.Ending},
		{"evict", "pending", "ready", rescue.Ending},
		{"stop", "unknown", "disconnected", rescue.Unknown},
		{"stop", "lost", "ready", rescue.Unknown},
		{"stop", "lost", "down", rescue.Ended},
		{"stop", "complete", "ready", rescue.Ended},
		{"run", "failed", "ready", rescue.Ended},
		{"run", "a status of tomorrow", "ready", rescue.Unknown},
	} {
		r := newRegion(1, 1)
		r.nodes[0].Status = tc.node
		a := r.run("web", "service", 0, 0)
		a.DesiredStatus, a.ClientStatus = tc.desired, tc.client
		got := rescue.Ended
		if w := work(r.cluster(), "web"); w != nil {
			got = w.Phase
		}
		if got != tc.want {
			t.Errorf("desired %s, client %s, node %s: %s, want %s", tc.desired, tc.client, tc.node, got, tc.want)
		}
	}
}

// A device that is unhealthy by a text of another form has a fault that does not count, and is no place.
func TestUnknownFault(t *testing.T) {
	for _, text := range []string{"", "healthy", "some other plugin's words", "unhealthy: XID 95 uncontained memory error"} {
		r := newRegion(1, 1)
		r.fail(0, 0, text)
		n := r.cluster().Nodes[0]
		if len(n.Faults) != 1 || n.Faults[0].Repair != health.NoRepair || n.Faults[0].Cause != causeUnknown || n.Devices[0].Healthy {
			t.Errorf("%q: %+v", text, n)
		}
	}
}

// MIG instances of one PCI address are of one GPU, and a fault of one of them is not of the others. Replicas are one device.
func TestSharedDevices(t *testing.T) {
	r := newRegion(1, 1)
	n := r.nodes[0].NodeResources
	at := func(pci string) *api.NodeDeviceLocality { return &api.NodeDeviceLocality{PciBusID: pci} }
	n.Devices = append(n.Devices,
		&api.NodeDeviceResource{Vendor: "nvidia", Type: "gpu", Name: "H100 MIG 1g.10gb", Instances: []*api.NodeDevice{
			{ID: "MIG-b", Healthy: true, Locality: at("0000:aa:00.0")}, {ID: "MIG-a", HealthDescription: xid95, Locality: at("0000:aa:00.0")},
			{ID: "MIG-c", Healthy: true, Locality: at("0000:bb:00.0")}, {ID: "MIG-d", Healthy: true},
		}},
		&api.NodeDeviceResource{Vendor: "nvidia", Type: "gpu-shared", Name: "L4", Instances: []*api.NodeDevice{
			{ID: "GPU-x::0", HealthDescription: xid95, Locality: at("0000:cc:00.0")}, {ID: "GPU-x::1", HealthDescription: xid95, Locality: at("0000:cc:00.0")},
		}},
		&api.NodeDeviceResource{Vendor: "amd", Type: "gpu", Name: "MI300", Instances: []*api.NodeDevice{{ID: "0"}}})
	node := r.cluster().Nodes[0]
	got := map[gpu.DeviceID]rescue.Device{}
	for _, d := range node.Devices {
		got[d.ID] = d
	}
	if len(got) != 6 || len(node.Devices) != 6 || len(node.Faults) != 2 {
		t.Fatalf("%d devices, %d faults: %+v", len(node.Devices), len(node.Faults), node)
	}
	a, b, c, d, x := got["MIG-a"].At, got["MIG-b"].At, got["MIG-c"].At, got["MIG-d"].At, got["GPU-x"]
	if a.GPU != "node-0/0000:aa:00.0" || a.GPU != b.GPU || a.Overlaps(b) || c.GPU == a.GPU || d != gpu.WholeGPU("MIG-d") {
		t.Errorf("instances at %v, %v, %v, %v", a, b, c, d)
	}
	if x.Units != 2 || x.Healthy || x.At != gpu.WholeGPU("GPU-x") {
		t.Errorf("shared %+v", x)
	}
	if node.Faults[0].At != a {
		t.Errorf("fault at %v, want %v", node.Faults[0].At, a)
	}
}

// Of two nodes with one name, the newer one has it.
func TestNodesOfOneName(t *testing.T) {
	r := newRegion(2, 1)
	r.nodes[0].Name, r.nodes[1].Name = "gpu1", "gpu1"
	r.nodes[0].Status = "down"
	r.run("web", "service", 0, 0)
	c := r.cluster()
	if c.Nodes[0].Name != "gpu1 (00000000)" || c.Nodes[1].Name != "gpu1" || work(c, "web").Node != "gpu1 (00000000)" {
		t.Errorf("%q, %q", c.Nodes[0].Name, c.Nodes[1].Name)
	}
}

// The mark of a node is ours only if it names gpu-fleet, and what is no repair is of another program or person.
func TestMarks(t *testing.T) {
	for _, tc := range []struct {
		meta map[string]string
		mark health.Repair
		ours bool
	}{
		{nil, health.NoRepair, false},
		{map[string]string{"gpu_repair": "reset", "gpu_repair_by": "gpu-fleet"}, health.Reset, true},
		{map[string]string{"gpu_repair": "reboot"}, health.Reboot, false},
		{map[string]string{"gpu_repair": "soon", "gpu_repair_by": "gpu-fleet"}, health.Replace, false},
		{map[string]string{"gpu_repair": "none", "gpu_repair_by": "gpu-fleet"}, health.Replace, false},
	} {
		if mark, ours := markOf(tc.meta); mark != tc.mark || ours != tc.ours {
			t.Errorf("%v: %v, %t", tc.meta, mark, ours)
		}
	}
}

// Events of eligibility and drain count, and those that the servers have dropped may have been such.
func TestChangedIndex(t *testing.T) {
	event := func(index uint64, subsystem, message string) *api.NodeEvent {
		return &api.NodeEvent{CreateIndex: index, Subsystem: subsystem, Message: message}
	}
	some := []*api.NodeEvent{
		event(10, "Cluster", "Node registered"), event(20, "Cluster", "Node marked as ineligible for scheduling"), event(30, "Cluster", "Node heartbeat missed"),
	}
	many := slices.Clone(some[:1])
	for i := range 9 {
		many = append(many, event(uint64(40+i), "Cluster", "Node heartbeat missed"))
	}
	for _, tc := range []struct {
		events []*api.NodeEvent
		want   uint64
	}{
		{nil, 0}, {some[:1], 0}, {some, 20}, {append(slices.Clone(some), event(31, "Drain", "Node drain complete")), 31}, {many[1:], 0}, {many, 10},
	} {
		if got := changedIndex(tc.events); got != tc.want {
			t.Errorf("%d events: %d, want %d", len(tc.events), got, tc.want)
		}
	}
}

// A replacement is the one that the servers name, or the first one of the job, group and name after the stop.
func TestReplacements(t *testing.T) {
	sibling := func(id, name string, index uint64) *api.AllocationListStub {
		return &api.AllocationListStub{ID: id, Name: name, Namespace: "default", JobID: "web", JobType: "service", TaskGroup: "g", DesiredStatus: "run", ClientStatus: "complete", CreateIndex: index}
	}
	r := newRegion(2, 2)
	a := r.run("web", "service", 0, 0)
	a.DesiredStatus = "stop"
	r.follow(t, a, nil)
	f := r.followed["web"]
	f.siblings = []*api.AllocationListStub{
		a, sibling("canary", "web.g[0]", 1500), sibling("later", "web.g[0]", 2001), sibling("other", "web.g[1]", 2000), sibling("next", "web.g[0]", 2000),
	}
	if c := r.cluster(); len(c.Work) != 1 {
		t.Errorf("the stop is not known: %+v", c.Work)
	}
	f.stopIndex = 2000
	c := r.cluster()
	if w := work(c, "next"); len(c.Work) != 2 || w == nil || w.Replaces != "web" || w.Phase != rescue.Ended {
		t.Errorf("work %+v", c.Work)
	}
	a.NextAllocation = "later"
	if w := work(r.cluster(), "later"); w == nil || w.Replaces != "web" {
		t.Error("the one that the servers name is not the replacement")
	}
	b := r.run("later", "service", 1, 0)
	b.DesiredStatus = "run"
	if w := work(r.cluster(), "later"); w == nil || w.Replaces != "web" || w.Phase != rescue.Running || len(w.Holds) != 1 {
		t.Errorf("replacement that runs: %+v", w)
	}
}

// Work is moved only to places that are certain.
func TestPools(t *testing.T) {
	text := func(s string) *string { return &s }
	for name, tc := range map[string]struct {
		region func(*region)
		job    func(*api.Job)
		want   string
	}{
		"all":                {want: "node-0 node-1 node-2"},
		"node is down":       {region: func(r *region) { r.nodes[1].Status = "down" }, want: "node-0 node-2"},
		"node is ineligible": {region: func(r *region) { r.nodes[1].SchedulingEligibility = "ineligible" }, want: "node-0 node-2"},
		"node drains":        {region: func(r *region) { r.nodes[1].Drain = true }, want: "node-0 node-2"},
		"other datacenter":   {region: func(r *region) { r.nodes[1].Datacenter = "eu1" }, want: "node-0 node-2"},
		"node pool":          {region: func(r *region) { r.nodes[1].NodePool = "gpu" }, job: func(j *api.Job) { j.NodePool = text("gpu") }, want: "node-1"},
		"all node pools":     {region: func(r *region) { r.nodes[1].NodePool = "gpu" }, job: func(j *api.Job) { j.NodePool = text("all") }, want: "node-0 node-1 node-2"},
		"constraint":         {job: func(j *api.Job) { j.Constraints = constraint("${node.unique.name}", "!=", "node-1") }, want: "node-0 node-2"},
		"of a group":         {job: func(j *api.Job) { j.TaskGroups[0].Constraints = constraint("${attr.unique.hostname}", "=", "host-1") }, want: "node-1"},
		"of a task":          {job: func(j *api.Job) { j.TaskGroups[0].Tasks[0].Constraints = constraint("${meta.rack}", "is_set", "") }, want: ""},
		"unknown operator":   {job: func(j *api.Job) { j.Constraints = constraint("${attr.kernel.name}", "resembles", "linux") }, want: "?"},
		"distinct_property":  {job: func(j *api.Job) { j.Constraints = constraint("${meta.rack}", "distinct_property", "") }, want: "?"},
		"distinct_hosts": {
			region: func(r *region) { r.run("two", "service", 1, 1).JobID = "web" },
			job:    func(j *api.Job) { j.Constraints = constraint("", "distinct_hosts", "true") }, want: "node-0 node-2",
		},
		"driver is not healthy": {region: func(r *region) { r.nodes[2].Drivers = map[string]*api.DriverInfo{"docker": {Detected: true}} }, want: "node-0 node-1"},
		"no free device":        {region: func(r *region) { r.run("full", "batch", 1, 0, 1) }, want: "node-0 node-2"},
		"no memory":             {region: func(r *region) { r.nodes[2].NodeResources.Memory.MemoryMB = 999 }, want: "node-0 node-1"},
		"no cpu beside what is reserved": {
			region: func(r *region) {
				r.nodes[2].ReservedResources = &api.NodeReservedResources{Cpu: api.NodeReservedCpuResources{CpuShares: 63500}}
			}, want: "node-0 node-1",
		},
		"static port": {
			region: func(r *region) {
				r.run("one", "service", 1, 1).AllocatedResources.Shared.Ports = []api.PortMapping{{Value: 8080}}
				r.nodes[2].ReservedResources = &api.NodeReservedResources{Networks: api.NodeReservedNetworkResources{ReservedHostPorts: "22,8000-8100"}}
			},
			job: func(j *api.Job) {
				j.TaskGroups[0].Networks = []*api.NetworkResource{{ReservedPorts: []api.Port{{Value: 8080}}}}
			},
			want: "node-0",
		},
		"network":    {job: func(j *api.Job) { j.TaskGroups[0].Networks = []*api.NetworkResource{{Mode: "cni/x"}} }, want: ""},
		"csi volume": {job: func(j *api.Job) { j.TaskGroups[0].Volumes = map[string]*api.VolumeRequest{"d": {Type: "csi"}} }, want: "?"},
		"host volume": {region: withVolume, job: func(j *api.Job) {
			j.TaskGroups[0].Volumes = map[string]*api.VolumeRequest{"d": {Type: "host", Source: "data"}}
		}, want: "node-2"},
		"cores": {job: func(j *api.Job) { j.TaskGroups[0].Tasks[0].Resources.Cores = new(4) }, want: "node-0"},
		"of a device": {job: func(j *api.Job) {
			j.TaskGroups[0].Tasks[0].Resources.Devices[0].Constraints = constraint("${device.attr.memory}", "almost", "80 GiB")
		}, want: "?"},
		"of one device": {job: func(j *api.Job) {
			j.TaskGroups[0].Tasks[0].Resources.Devices[0].Constraints = constraint("${device.ids}", "set_contains", "GPU-0-1")
		}, want: "?"},
		"most allocs": {region: func(r *region) { r.details[nodeID(1)].NodeMaxAllocs = 1 }, want: "node-0 node-2"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRegion(3, 2)
			r.fail(0, 0, xid95)
			a := r.run("web", "service", 0, 0)
			if tc.region != nil {
				tc.region(r)
			}
			r.follow(t, a, tc.job)
			c := r.cluster()
			unknown := work(c, "web").PoolUnknown
			got := slices.Sorted(slices.Values(c.Pools[work(c, "web").Pool]))
			if unknown != "" {
				got = []string{"?"}
			}
			if strings.Join(got, " ") != tc.want {
				t.Errorf("%v, want %q (%s)", got, tc.want, unknown)
			}
		})
	}
}

// Two replacements that can't be on one node are moved at once only if each of them has a node for certain.
func TestRivals(t *testing.T) {
	port := func(j *api.Job) {
		j.TaskGroups[0].Networks = []*api.NetworkResource{{ReservedPorts: []api.Port{{Value: 8080}}}}
	}
	for _, tc := range []struct {
		name  string
		nodes int
		job   func(*api.Job)
		want  string
	}{
		{"no rivals", 3, nil, "1 1"},
		{"one port, one node", 3, port, "1 0"},
		{"one port, two nodes", 4, port, "2 2"},
		{"distinct_hosts, one node", 3, func(j *api.Job) { j.Constraints = constraint("", "distinct_hosts", "true") }, "1 0"},
		{"distinct_hosts of the group, two nodes", 4, func(j *api.Job) { j.TaskGroups[0].Constraints = constraint("", "distinct_hosts", "") }, "2 2"},
	} {
		r := newRegion(tc.nodes, 2)
		var all []*api.AllocationListStub
		for n := range 2 { // nodes of which all GPUs are faulty
			r.fail(n, 0, xid95)
			r.fail(n, 1, xid95)
			a := r.run(fmt.Sprintf("web%d", n), "service", n, 0)
			a.JobID = "web"
			all = append(all, a)
			r.nodes[n].SchedulingEligibility = "ineligible"
		}
		for _, a := range all {
			r.follow(t, a, tc.job)
		}
		c := r.cluster()
		if got := fmt.Sprint(len(c.Pools[work(c, "web0").Pool]), " ", len(c.Pools[work(c, "web1").Pool])); got != tc.want {
			t.Errorf("%s: %s nodes, want %s", tc.name, got, tc.want)
		}
	}
}

func withVolume(r *region) {
	r.details[nodeID(1)].HostVolumes = map[string]*api.HostVolumeInfo{"data": {ReadOnly: true}}
	r.details[nodeID(2)].HostVolumes = map[string]*api.HostVolumeInfo{"data": {}}
}

func constraint(left, operand, right string) []*api.Constraint {
	return []*api.Constraint{{LTarget: left, Operand: operand, RTarget: right}}
}
