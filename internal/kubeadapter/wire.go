package kubeadapter

import (
	"errors"
	"path"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
)

const (
	// vendor is the domain of the resource names, as in NVIDIA's k8s-device-plugin.
	vendor = "nvidia.com/"

	// GPUResource is the resource of full GPUs, and of every unit under the MIG strategy "single".
	GPUResource = vendor + inventory.DefaultPool
)

// ResourceOf returns the extended resource of a unit: its pool in NVIDIA's domain.
func ResourceOf(u inventory.Unit) string { return vendor + u.Pool }

// Resources counts the units of an inventory by resource name and health.
func Resources(inv *inventory.Inventory) map[string]map[health.State]int {
	count := map[string]map[health.State]int{}
	for u := range inv.Units() {
		r := ResourceOf(u)
		if count[r] == nil {
			count[r] = map[health.State]int{}
		}
		count[r][u.Health.State]++
	}
	return count
}

// listResponse returns the ListAndWatch response of a list. The API has two health values and no reason. A device without
// NUMA affinity has no topology, because -1 is the kubelet's own sentinel.
func listResponse(list []listedDevice) *v1beta1.ListAndWatchResponse {
	all, devices := make([]v1beta1.Device, len(list)), make([]*v1beta1.Device, len(list))
	topology := map[int]*v1beta1.TopologyInfo{} // shared by all devices of a NUMA node: messages are only read
	for i, l := range list {
		d := &all[i]
		if d.ID, d.Health = string(l.id), v1beta1.Unhealthy; l.healthy {
			d.Health = v1beta1.Healthy
		}
		if l.numaNode >= 0 {
			if topology[l.numaNode] == nil {
				topology[l.numaNode] = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: int64(l.numaNode)}}}
			}
			d.Topology = topology[l.numaNode]
		}
		devices[i] = d
	}
	return &v1beta1.ListAndWatchResponse{Devices: devices}
}

// allocateResponse returns the Allocate response of a plan. The kubelet stores it with the pod and uses it again after
// restarts and reboots, so it contains only what remains valid.
func allocateResponse(p inventory.Plan, o Options) *v1beta1.ContainerAllocateResponse {
	r := &v1beta1.ContainerAllocateResponse{Envs: make(map[string]string, len(p.Env)+1)}
	if len(p.IDs) > 0 && p.Injection.Runtime {
		r.Envs[inventory.VisibleDevices] = p.VisibleDevices()
	}
	for _, e := range p.Env {
		r.Envs[e.Name] = e.Value
	}
	for _, n := range p.Nodes {
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{
			HostPath: path.Join("/", o.DevRoot, n.Path), ContainerPath: n.Path, Permissions: n.Permissions,
		})
	}
	if p.MPS != "" {
		addMPSClient(r, p.MPS, o.MPSRoot)
	}
	return r
}

// addMPSClient makes a container a client of a pool's MPS control daemon, with the variable and the mounts of NVIDIA's
// k8s-device-plugin (mps/root.go). All daemons use one /dev/shm.
func addMPSClient(r *v1beta1.ContainerAllocateResponse, pool, root string) {
	pipe := hostwatch.MPSPipe("/mps", pool)
	r.Envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
	r.Mounts = append(r.Mounts,
		&v1beta1.Mount{HostPath: hostwatch.MPSPipe(root, pool), ContainerPath: pipe},
		&v1beta1.Mount{HostPath: path.Join(root, "shm"), ContainerPath: "/dev/shm"},
	)
}

// allocateError returns an error of Reserve as a gRPC status. The kubelet puts its text into the pod's message. The text for
// several shared units is that of NVIDIA's k8s-device-plugin, so that its documentation can be found.
func allocateError(resource string, err error) error {
	if shared, ok := errors.AsType[*inventory.SharedUnitsError](err); ok {
		return status.Errorf(codes.InvalidArgument,
			"invalid allocation request for %q: invalid request: maximum request size for shared resources is 1; found %d",
			resource, shared.N)
	}
	if _, ok := errors.AsType[*inventory.UnknownUnitsError](err); ok {
		return status.Error(codes.NotFound, err.Error())
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

func unitIDs(ids []string) []inventory.UnitID {
	units := make([]inventory.UnitID, len(ids))
	for i, id := range ids {
		units[i] = inventory.UnitID(id)
	}
	return units
}
