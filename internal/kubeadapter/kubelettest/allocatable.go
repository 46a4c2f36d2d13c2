package kubelettest

import (
	"context"
	"slices"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Offer adds devices of a NUMA node to those that the kubelet may allocate: the healthy ones that a device plugin lists.
func (p *PodResources) Offer(resource string, numaNode int64, ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.offer = append(p.offer, &podresources.ContainerDevices{
		ResourceName: resource, DeviceIds: ids,
		Topology: &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: numaNode}}},
	})
}

// GetAllocatableResources implements the API.
func (p *PodResources) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &podresources.AllocatableResourcesResponse{Devices: slices.Clone(p.offer)}, p.fail
}
