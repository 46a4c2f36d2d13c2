package kubeadapter

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// client opens a stream on the adapter's socket, over a connection of its own.
func (r *rig) client() (plugin v1beta1.DevicePluginClient, stream grpc.ServerStreamingClient[v1beta1.ListAndWatchResponse], leave func()) {
	r.Helper()
	conn, err := dial(r.adapter.Stats()[0].Socket)
	r.must(err)
	plugin = v1beta1.NewDevicePluginClient(conn)
	stream, err = plugin.ListAndWatch(r.ctx, &v1beta1.Empty{})
	r.must(err)
	return plugin, stream, func() { _ = conn.Close() }
}

// many are a thousand units; which of them is sick makes it another list.
func (r *rig) many(sick int) {
	s := coretest.GPUs(1)
	template := s.Devices[0]
	s.Devices = nil
	for i := range 1000 {
		d := template
		d.ID, d.At, d.Index = coretest.GPU(i), core.WholeGPU(coretest.GPU(i)), i
		s.Devices = append(s.Devices, d)
	}
	r.offer(core.NewSnapshot(s), sick%7)
}

// block starts an adapter whose only stream is one that nobody reads, and returns when Send blocks. A window
// has 64 KiB, and a list of 1000 units as much.
func (r *rig) block() (leave func()) {
	r.Helper()
	r.kubelet.Behave(kubelettest.Behaviour{NoStream: true})
	r.startKubelet()
	r.many(0)
	r.start(func(a *Adapter) { a.timings.openStream = time.Hour })
	r.must(r.kubelet.Await(r.ctx, "registered", func() bool { return len(r.kubelet.Registrations()) == 1 }))
	_, _, leave = r.client()
	for still, sick := 0, 0; still < 10; sick++ {
		before := r.adapter.Stats()[0].Lists
		r.many(sick)
		watch.Sleep(r.ctx, 20*time.Millisecond)
		if still++; r.adapter.Stats()[0].Lists > before {
			still = 0
		}
	}
	if n := r.adapter.Stats()[0].Lists; n == 0 {
		r.Fatal("no list at all")
	}
	return leave
}

// A kubelet that does not read holds up its own stream and nothing else; when it goes away, the stream ends.
func TestStreamOfAKubeletThatDoesNotRead(t *testing.T) {
	r := newRig(t)
	leave := r.block()
	blocked := r.adapter.Stats()[0].Lists
	plugin, stream, leaveToo := r.client()
	for sick := range 5 {
		r.many(sick)
		list, err := stream.Recv()
		r.must(err)
		if len(list.GetDevices()) != 1000 {
			t.Fatalf("%d devices", len(list.GetDevices()))
		}
	}
	_, err := plugin.Allocate(r.ctx, &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: gpuIDs(999)}}})
	r.must(err)
	if n := r.adapter.Stats()[0].Lists; n < blocked+5 {
		t.Errorf("%d lists, and %d before", n, blocked)
	}
	leaveToo()
	r.must(r.adapter.Alive(r.ctx))
	if s := r.adapter.Stats()[0]; !s.Connected || s.Incarnations != 1 {
		t.Errorf("%+v", s)
	}
	leave()
	r.await("the end of the stream", func() bool { return r.adapter.Stats()[0].LastError == errStreamEnded.Error() })
}

// A kubelet that restarts may have two streams for a moment: no list goes to one of them only.
func TestTwoStreamsGetEveryList(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(8))
	r.start()
	r.awaitHealthy(GPUResource, 8)
	_, stream, leave := r.client()
	defer leave()
	for _, sick := range [][]int{nil, {1}, {1, 2}, {2}, nil} {
		r.offer(coretest.GPUs(8), sick...)
		list, err := stream.Recv()
		r.must(err)
		for i, d := range list.GetDevices() {
			if slices.Contains(sick, i) != (d.GetHealth() == v1beta1.Unhealthy) {
				t.Errorf("sick %v: unit %d is %s", sick, i, d.GetHealth())
			}
		}
		r.awaitHealthy(GPUResource, 8-len(sick))
	}
	if n := len(r.kubelet.Lists(GPUResource)); n != 5 {
		t.Errorf("%d lists to the kubelet, want 5", n)
	}
}

func TestStopWhileSendBlocks(t *testing.T) {
	r := newRig(t)
	leave := r.block()
	defer leave()
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	select {
	case <-stopped:
	case <-time.After(10 * time.Second):
		t.Fatal("still running")
	}
	if s := r.sockets(); len(s) > 0 {
		t.Errorf("sockets left: %v", s)
	}
}

// Nobody waits for the answer any more: nothing was given to new work. A preference takes nothing.
func TestRequestsThatWereGivenUp(t *testing.T) {
	told := 0
	s := benchServer(8)
	s.opts.Reserved = func([]core.Device) { told++ }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Allocate(ctx, &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: gpuIDs(1)}}})
	if status.Code(err) != codes.Canceled || told != 0 || s.count.allocations.Load() != 0 || s.count.allocationErrors.Load() != 1 {
		t.Errorf("allocation: %v, told %d times", err, told)
	}
	p, err := s.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: firstIDs(8), AllocationSize: 2},
	}})
	if err != nil || len(p.GetContainerResponses()[0].GetDeviceIDs()) != 2 {
		t.Errorf("preference: %v, %v", p, err)
	}
}
