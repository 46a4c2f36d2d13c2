package podresources

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
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
	Allocatable []Device    // that take new work, each device ID of a resource once; Pod is ""
	Containers  []Container // that hold devices
}

// ReadNode calls GetAllocatableResources and List. ctx should have a deadline.
func ReadNode(ctx context.Context, socket string) (Node, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return Node{}, err
	}
	defer func() { _ = conn.Close() }()
	client := podresources.NewPodResourcesListerClient(conn)
	allocatable, err := client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return Node{}, fmt.Errorf("pod-resources API %s: GetAllocatableResources: %s", socket, status.Convert(err).Message())
	}
	list, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return Node{}, fmt.Errorf("pod-resources API %s: List: %s", socket, status.Convert(err).Message())
	}
	all := &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Containers: []*podresources.ContainerResources{{Devices: allocatable.GetDevices()}}},
	}}
	n := Node{Allocatable: devices(all), Containers: containers(list)}
	for i := range n.Allocatable {
		n.Allocatable[i].Pod = ""
	}
	return n, nil
}

// containers are those that hold devices, an entry for each resource.
func containers(r *podresources.ListPodResourcesResponse) (all []Container) {
	for _, p := range r.GetPodResources() {
		for _, c := range p.GetContainers() {
			at := map[string]int{} // by resource: in all
			listed := map[string]bool{}
			for _, d := range c.GetDevices() {
				resource := d.GetResourceName()
				i, known := at[resource]
				if !known {
					i = len(all)
					at[resource] = i
					all = append(all, Container{Namespace: p.GetNamespace(), Pod: p.GetName(), Container: c.GetName(), Resource: resource})
				}
				for _, id := range d.GetDeviceIds() {
					if !listed[resource+" "+id] {
						listed[resource+" "+id] = true
						all[i].IDs = append(all[i].IDs, id)
					}
				}
			}
		}
	}
	return all
}
