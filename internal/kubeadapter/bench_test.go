package kubeadapter

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func benchServer(units int) *server {
	return newTestServer(GPUResource, buildInventory(coretest.GPUs(units), core.DefaultConfig()))
}

// BenchmarkAllocate takes a quarter of the units, called as a function.
func BenchmarkAllocate(b *testing.B) {
	for _, units := range []int{8, 64} {
		b.Run(fmt.Sprintf("units=%d", units), func(b *testing.B) {
			s := benchServer(units)
			r := &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: firstIDs(units / 4)}}}
			for b.Loop() {
				if _, err := s.Allocate(context.Background(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkAllocateOverSocket is what the kubelet waits for.
func BenchmarkAllocateOverSocket(b *testing.B) {
	for _, units := range []int{8, 64} {
		b.Run(fmt.Sprintf("units=%d", units), func(b *testing.B) {
			plugin := benchPlugin(b, benchServer(units))
			r := &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: firstIDs(units / 4)}}}
			for b.Loop() {
				if _, err := plugin.Allocate(context.Background(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPreferredAllocation chooses 4 of 8 linked GPUs.
func BenchmarkPreferredAllocation(b *testing.B) {
	s := benchServer(8)
	r := &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: firstIDs(8), AllocationSize: 4},
	}}
	for b.Loop() {
		if _, err := s.GetPreferredAllocation(context.Background(), r); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkList is an inventory on its way to the wire.
func BenchmarkList(b *testing.B) {
	for _, units := range []int{8, 64} {
		b.Run(fmt.Sprintf("units=%d", units), func(b *testing.B) {
			inv := buildInventory(coretest.GPUs(units), core.DefaultConfig())
			for b.Loop() {
				if n := len(listResponse(listDevices(inv)[GPUResource]).GetDevices()); n != units {
					b.Fatal(n)
				}
			}
		})
	}
}

func firstIDs(n int) []string {
	var ids []string
	for i := range n {
		ids = append(ids, gpuIDs(i)...)
	}
	return ids
}

// benchPlugin serves s on a socket and returns a client of it.
func benchPlugin(b *testing.B, s *server) v1beta1.DevicePluginClient {
	b.Helper()
	in := &incarnation{endpoint: &endpoint{resource: GPUResource, kubelet: &kubelet{dir: b.TempDir()}}}
	listener, err := in.listen(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterDevicePluginServer(g, s)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	conn, err := dial(in.path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		if err := <-served; err != nil {
			b.Error(err)
		}
	})
	return v1beta1.NewDevicePluginClient(conn)
}
