package deviceplugin

import (
	"errors"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// Resources counts the units of an inventory by resource name and health.
func Resources(inv *inventory.Allocatable) map[string]map[health.State]int {
	count := map[string]map[health.State]int{}
	for u := range inv.Units() {
		r := kubeadapter.ResourceOf(u)
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
	if unhealthy, ok := errors.AsType[*inventory.UnhealthyUnitsError](err); ok {
		unhealthy.Units = withoutNames(unhealthy.Units)
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

// withoutNames returns units whose health does not name the work that has them: the text goes to the pod of another tenant.
func withoutNames(units []inventory.Unit) []inventory.Unit {
	units = slices.Clone(units)
	for i, u := range units {
		if r := u.Health.Reason; r == health.ReasonHeld || r == health.ReasonOccupied {
			units[i].Health.Detail = "by other work"
		}
	}
	return units
}

func unitIDs(ids []string) []inventory.UnitID {
	units := make([]inventory.UnitID, len(ids))
	for i, id := range ids {
		units[i] = inventory.UnitID(id)
	}
	return units
}
