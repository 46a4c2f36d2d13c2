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

// resourceOf is the resource that a unit counts for.
func resourceOf(u core.Unit) string { return vendor + u.Pool }

// Resources counts the units of an inventory by resource name and health.
func Resources(inv *core.Inventory) map[string]map[core.HealthState]int {
	count := map[string]map[core.HealthState]int{}
	for u := range inv.Units() {
		r := resourceOf(u)
		if count[r] == nil {
			count[r] = map[core.HealthState]int{}
		}
		count[r][u.Health.State]++
	}
	return count
}

// listing is what the kubelet is told about one unit. It is comparable: equal lists are not sent twice.
type listing struct {
	id       core.UnitID
	healthy  bool
	numaNode int
}

// listings are the units of a resource in canonical order.
func listings(inv *core.Inventory, resource string) []listing {
	list := make([]listing, 0, inv.Len())
	for u := range inv.Units() {
		if resourceOf(u) == resource {
			list = append(list, listing{u.ID, u.Health.Schedulable(), u.Device.NUMANode})
		}
	}
	return list
}

// farewell is next with the units that go from one list to the next while they are healthy, as unhealthy: the
// kubelet may be handing them out (1.37 can panic over an ID that vanishes then). The core withdraws units for a
// while before they go, but not a unit that comes to another resource under the same ID, which a MIG instance in
// the place of another may have.
func farewell(sent, next []listing) (list []listing, leaving bool) {
	stays := make(map[core.UnitID]bool, len(next))
	for _, l := range next {
		stays[l.id] = true
	}
	for _, l := range sent {
		if l.healthy && !stays[l.id] {
			l.healthy, leaving = false, true
			next = append(next, l)
		}
	}
	return next, leaving
}

// listResponse says it in the kubelet's words. Health has two values there, and no reason. A device
// without NUMA affinity has no topology at all: -1 is the kubelet's own sentinel.
func listResponse(list []listing) *v1beta1.ListAndWatchResponse {
	devices := make([]*v1beta1.Device, len(list))
	for i, l := range list {
		d := &v1beta1.Device{ID: string(l.id), Health: v1beta1.Unhealthy}
		if l.healthy {
			d.Health = v1beta1.Healthy
		}
		if l.numaNode >= 0 {
			d.Topology = &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: int64(l.numaNode)}}}
		}
		devices[i] = d
	}
	return &v1beta1.ListAndWatchResponse{Devices: devices}
}

// allocateResponse is a plan in the kubelet's words. The kubelet keeps it for the life of the pod and
// replays it after restarts and reboots, so it names only what outlives them.
func allocateResponse(p core.Plan, devRoot string) *v1beta1.ContainerAllocateResponse {
	r := &v1beta1.ContainerAllocateResponse{Envs: make(map[string]string, len(p.Env))}
	for _, e := range p.Env {
		r.Envs[e.Name] = e.Value
	}
	for _, n := range p.Nodes {
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{
			HostPath: path.Join("/", devRoot, n.Path), ContainerPath: n.Path, Permissions: n.Permissions,
		})
	}
	return r
}

// refusal is an error of Reserve as a gRPC status; the kubelet shows its text as the pod's message.
func refusal(err error) error {
	code := codes.FailedPrecondition
	if unknown := (*core.UnknownUnitsError)(nil); errors.As(err, &unknown) {
		code = codes.NotFound
	}
	return status.Error(code, err.Error())
}

func unitIDs(ids []string) []core.UnitID {
	units := make([]core.UnitID, len(ids))
	for i, id := range ids {
		units[i] = core.UnitID(id)
	}
	return units
}
