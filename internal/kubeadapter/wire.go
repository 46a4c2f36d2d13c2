package kubeadapter

import (
	"errors"
	"path"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Resource names are pools under NVIDIA's domain, as its k8s-device-plugin spells them.
const (
	vendor = "nvidia.com/"

	// GPUResource is the resource of full GPUs, and of every unit under the MIG strategy "single".
	GPUResource = vendor + core.DefaultPool
)

// ResourceOf is the resource that a unit counts for.
func ResourceOf(u core.Unit) string { return vendor + u.Pool }

// Resources counts the units of an inventory by resource name and health.
func Resources(inv *core.Inventory) map[string]map[core.HealthState]int {
	count := map[string]map[core.HealthState]int{}
	for u := range inv.Units() {
		r := ResourceOf(u)
		if count[r] == nil {
			count[r] = map[core.HealthState]int{}
		}
		count[r][u.Health.State]++
	}
	return count
}

// listResponse says it in the kubelet's words. Health has two values there, and no reason. A device
// without NUMA affinity has no topology at all: -1 is the kubelet's own sentinel.
func listResponse(list []listing) *v1beta1.ListAndWatchResponse {
	devices := make([]*v1beta1.Device, len(list))
	places := map[int]*v1beta1.TopologyInfo{} // one for all units of a NUMA node: messages are only read
	for i, l := range list {
		d := &v1beta1.Device{ID: string(l.id), Health: v1beta1.Unhealthy}
		if l.healthy {
			d.Health = v1beta1.Healthy
		}
		if l.numaNode >= 0 {
			if places[l.numaNode] == nil {
				places[l.numaNode] = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: int64(l.numaNode)}}}
			}
			d.Topology = places[l.numaNode]
		}
		devices[i] = d
	}
	return &v1beta1.ListAndWatchResponse{Devices: devices}
}

// allocateResponse is a plan in the kubelet's words. The kubelet keeps it for the life of the pod and
// replays it after restarts and reboots, so it names only what outlives them.
func allocateResponse(p core.Plan, o Options) *v1beta1.ContainerAllocateResponse {
	r := &v1beta1.ContainerAllocateResponse{Envs: make(map[string]string, len(p.Env))}
	for _, e := range p.Env {
		r.Envs[e.Name] = e.Value
	}
	for _, n := range p.Nodes {
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{
			HostPath: path.Join("/", o.DevRoot, n.Path), ContainerPath: n.Path, Permissions: n.Permissions,
		})
	}
	if p.MPS != "" {
		joinMPS(r, vendor+p.MPS, o.MPSRoot)
	}
	return r
}

// joinMPS makes a container the client of a resource's MPS control daemon, with the variable and the mounts of
// NVIDIA's k8s-device-plugin: images and policies that know those know these. Daemons share one /dev/shm.
func joinMPS(r *v1beta1.ContainerAllocateResponse, resource, root string) {
	pipe := path.Join("/mps", resource, "pipe")
	r.Envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
	r.Mounts = append(r.Mounts,
		&v1beta1.Mount{HostPath: path.Join(root, resource, "pipe"), ContainerPath: pipe},
		&v1beta1.Mount{HostPath: path.Join(root, "shm"), ContainerPath: "/dev/shm"},
	)
}

// refusal is an error of Reserve as a gRPC status; the kubelet shows its text as the pod's message. Too many
// shares are refused in the words of NVIDIA's k8s-device-plugin, which people look for.
func refusal(resource string, err error) error {
	if shared, ok := errors.AsType[*core.SharedUnitsError](err); ok {
		return status.Errorf(codes.InvalidArgument,
			"invalid allocation request for %q: invalid request: maximum request size for shared resources is 1; found %d",
			resource, shared.N)
	}
	if _, ok := errors.AsType[*core.UnknownUnitsError](err); ok {
		return status.Error(codes.NotFound, err.Error())
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

func unitIDs(ids []string) []core.UnitID {
	units := make([]core.UnitID, len(ids))
	for i, id := range ids {
		units[i] = core.UnitID(id)
	}
	return units
}
