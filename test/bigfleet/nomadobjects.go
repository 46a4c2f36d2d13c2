package bigfleet

import (
	"fmt"
	"time"

	"github.com/hashicorp/nomad/api"
)

// newNomadNode is a node as a client registers it: with attributes, drivers and a group of GPUs.
func newNomadNode(n int) *api.Node {
	group := &api.NodeDeviceResource{Vendor: "nvidia", Type: "gpu", Name: "H100", Attributes: map[string]*api.Attribute{}}
	for i := range 12 {
		group.Attributes[fmt.Sprintf("attribute_%d", i)] = &api.Attribute{StringVal: new(fmt.Sprintf("value %d", i))}
	}
	for g := range GPUs {
		group.Instances = append(group.Instances, &api.NodeDevice{ID: gpuID(n, g), Healthy: true, Locality: &api.NodeDeviceLocality{PciBusID: fmt.Sprintf("0000:%02x:00.0", g)}})
	}
	o := &api.Node{
		ID: nodeUUID(n), Name: nodeName(n), Datacenter: "dc1", NodePool: "default", Status: api.NodeStatusReady, SchedulingEligibility: api.NodeSchedulingEligible,
		Attributes: map[string]string{"unique.hostname": nodeName(n), "kernel.name": "linux"}, Meta: map[string]string{},
		Drivers: map[string]*api.DriverInfo{}, Links: map[string]string{}, CreateIndex: uint64(100 + n), ModifyIndex: uint64(100 + n),
		NodeResources: &api.NodeResources{
			Cpu:    api.NodeCpuResources{CpuShares: 500000, TotalCpuCores: 192},
			Memory: api.NodeMemoryResources{MemoryMB: 2000000}, Disk: api.NodeDiskResources{DiskMB: 7000000},
			Networks: []*api.NetworkResource{{Mode: "host", Device: "eth0", CIDR: "10.0.0.1/32", IP: "10.0.0.1"}, {Mode: "bridge"}},
			Devices:  []*api.NodeDeviceResource{group},
		},
		ReservedResources: &api.NodeReservedResources{},
		Events:            []*api.NodeEvent{{Subsystem: "Cluster", Message: "Node registered", Timestamp: time.Now(), CreateIndex: uint64(100 + n)}},
	}
	for i := range 80 {
		o.Attributes[fmt.Sprintf("platform.attribute.%d", i)] = fmt.Sprintf("value %d", i)
	}
	for _, name := range []string{"docker", "exec", "raw_exec", "java", "qemu"} {
		o.Drivers[name] = &api.DriverInfo{
			Attributes: map[string]string{"driver." + name: "true", "driver." + name + ".version": "1.0"}, Detected: true, Healthy: true,
			HealthDescription: "Healthy", UpdateTime: time.Now(),
		}
	}
	return o
}

// newNomadJob is the service job of a node's allocations.
func newNomadJob(n int) *api.Job {
	cpu, memory, gpus := 16000, 131072, uint64(1)
	env := map[string]string{}
	for i := range 30 {
		env[fmt.Sprintf("VARIABLE_%d", i)] = fmt.Sprintf("value %d of %s", i, jobName(n))
	}
	return &api.Job{
		ID: new(jobName(n)), Name: new(jobName(n)), Namespace: new("default"), Type: new(api.JobTypeService), Version: new(uint64(0)), Priority: new(50),
		Datacenters: []string{"*"}, NodePool: new("default"),
		TaskGroups: []*api.TaskGroup{{Name: new("main"), Count: new(GPUs), Tasks: []*api.Task{{
			Name: "main", Driver: "docker", KillTimeout: new(5 * time.Second), Env: env,
			Config:    map[string]any{"image": "registry.example/team/image-1:1.0", "command": "python"},
			Resources: &api.Resources{CPU: &cpu, MemoryMB: &memory, Devices: []*api.RequestedDevice{{Name: "nvidia/gpu", Count: &gpus}}},
		}}}},
	}
}

// newAlloc is an allocation of a job that runs with one GPU.
func newAlloc(node *api.Node, job *api.Job, id, gpu string, i int) *api.Allocation {
	return &api.Allocation{
		ID: id, EvalID: nodeUUID(i), Name: fmt.Sprintf("%s.main[%d]", *job.ID, i), Namespace: "default", NodeID: node.ID, NodeName: node.Name, JobID: *job.ID, Job: job,
		TaskGroup: "main", DesiredStatus: api.AllocDesiredStatusRun, ClientStatus: api.AllocClientStatusRunning, CreateIndex: 900, ModifyIndex: 950, AllocModifyIndex: 900,
		CreateTime: time.Now().UnixNano(), ModifyTime: time.Now().UnixNano(),
		AllocatedResources: &api.AllocatedResources{
			Tasks: map[string]*api.AllocatedTaskResources{"main": {
				Cpu: api.AllocatedCpuResources{CpuShares: 16000}, Memory: api.AllocatedMemoryResources{MemoryMB: 131072},
				Devices: []*api.AllocatedDeviceResource{{Vendor: "nvidia", Type: "gpu", Name: "H100", DeviceIDs: []string{gpu}}},
			}},
			Shared: api.AllocatedSharedResources{DiskMB: 300},
		},
	}
}
