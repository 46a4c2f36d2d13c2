package podresources

import (
	"context"
	"fmt"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Container is a container of a pod with devices of one resource.
type Container struct {
	Namespace, Pod, Container string
	Resource                  string
	IDs                       []string // in the kubelet's order, each once
}

// Node is what the kubelet has of the devices of a node, whichever plugins they are from.
type Node struct {
	Allocatable []Device    // that take new work, each device ID of a resource once; of no pod
	Containers  []Container // that hold devices
}

// ReadNode calls GetAllocatableResources and List. ctx should have a deadline.
func ReadNode(ctx context.Context, socket string) (Node, error) {
	allocatable, err := Allocatable(ctx, socket)
	if err != nil {
		return Node{}, fmt.Errorf("pod-resources API: %w; --pod-resources-socket names the kubelet's", err)
	}
	r, err := list(ctx, socket)
	return Node{Allocatable: allocatable, Containers: containers(r)}, err
}

// Allocatable calls GetAllocatableResources of the API: the devices that plugins have listed as healthy. ctx should have a deadline,
// because the server may never answer.
func Allocatable(ctx context.Context, socket string) ([]Device, error) {
	r, err := call(ctx, socket, "allocatable resources of", podresources.PodResourcesListerClient.GetAllocatableResources, &podresources.AllocatableResourcesRequest{})
	d := distinct{listed: map[string]bool{}}
	d.add(Device{}, r.GetDevices())
	return d.all, err
}

// containers are those that hold devices, an entry for each resource, with each of its device IDs once.
func containers(r *podresources.ListPodResourcesResponse) (all []Container) {
	for _, p := range r.GetPodResources() {
		for _, c := range p.GetContainers() {
			d := distinct{listed: map[string]bool{}}
			d.add(Device{}, c.GetDevices())
			at := map[string]int{} // by resource: in all
			for _, device := range d.all {
				i, known := at[device.Resource]
				if !known {
					i = len(all)
					at[device.Resource] = i
					all = append(all, Container{Namespace: p.GetNamespace(), Pod: p.GetName(), Container: c.GetName(), Resource: device.Resource})
				}
				all[i].IDs = append(all[i].IDs, device.ID)
			}
		}
	}
	return all
}
