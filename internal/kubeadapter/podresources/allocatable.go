package podresources

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Allocatable calls GetAllocatableResources of the API: the device IDs that plugins have listed as healthy, by resource. ctx should
// have a deadline, because the server may never answer.
func Allocatable(ctx context.Context, socket string) (map[string][]string, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	r, err := podresources.NewPodResourcesListerClient(conn).GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("allocatable resources of %s: %s", socket, status.Convert(err).Message())
	}
	ids := map[string][]string{}
	for _, d := range r.GetDevices() {
		ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
	}
	return ids, nil
}
