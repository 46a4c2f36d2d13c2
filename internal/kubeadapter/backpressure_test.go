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
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// client opens another stream on the plugin socket. leave closes its connection.
func (r *rig) client() (plugin v1beta1.DevicePluginClient, stream grpc.ServerStreamingClient[v1beta1.ListAndWatchResponse], leave func()) {
	r.Helper()
	conn, err := dial(r.adapter.Stats()[0].Socket)
	r.must(err)
	plugin = v1beta1.NewDevicePluginClient(conn)
	stream, err = plugin.ListAndWatch(r.ctx, &v1beta1.Empty{})
	r.must(err)
	return plugin, stream, func() { _ = conn.Close() }
}

// many offers 1,000 GPUs, one of which is lost: another one is another list.
func (r *rig) many(lost int) {
	s := coretest.GPUs(1)
	template := s.Devices[0]
	s.Devices = nil
	for i := range 1000 {
		d := template
		d.ID, d.At, d.Index = coretest.GPU(i), gpu.WholeGPU(coretest.GPU(i)), i
		s.Devices = append(s.Devices, d)
	}
	r.offer(gpu.NewSnapshot(s), lost%7)
}

// block starts an adapter whose only stream is not read, and returns when Send blocks. The flow control window is 64 KiB, about the
// size of a list of 1,000 units.
func (r *rig) block() (leave func()) {
	r.Helper()
	r.kubelet.Behave(kubelettest.Behaviour{NoStream: true})
	r.startKubelet()
	r.many(0)
	r.start(func(a *Adapter) { a.timings.openStream = time.Hour })
	r.must(r.kubelet.Await(r.ctx, "registered", func() bool { return len(r.kubelet.Registrations()) == 1 }))
	_, _, leave = r.client()
	for still, lost := 0, 0; still < 10; lost++ {
		before := r.adapter.Stats()[0].Lists
		r.many(lost)
		watch.Sleep(r.ctx, 20*time.Millisecond)
		if still++; r.adapter.Stats()[0].Lists > before {
			still = 0
		}
	}
	return leave
}

// A stream that is not read blocks no other stream or request. It ends when its connection is closed.
func TestBlockedStream(t *testing.T) {
	r := newRig(t)
	leave := r.block()
	blocked := r.adapter.Stats()[0].Lists
	plugin, stream, leaveToo := r.client()
	for lost := range 5 {
		r.many(lost)
		list, err := stream.Recv()
		r.must(err)
		if len(list.GetDevices()) != 1000 {
			t.Fatalf("%d devices", len(list.GetDevices()))
		}
	}
	_, err := plugin.Allocate(r.ctx, allocateRequest(gpuIDs(999)))
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

// A kubelet that restarts may have two streams for a short time. Each list is sent on both, and the IDs
// do not change with the health.
func TestTwoStreamsGetEveryList(t *testing.T) {
	r := newRunning(t, 8)
	_, stream, leave := r.client()
	defer leave()
	for _, lost := range [][]int{nil, {1}, {1, 2}, {2}, nil} {
		r.offer(coretest.GPUs(8), lost...)
		list, err := stream.Recv()
		r.must(err)
		if got := ids(list.GetDevices()); !slices.Equal(got, firstIDs(8)) {
			t.Errorf("IDs changed: %v", got)
		}
		for i, d := range list.GetDevices() {
			if slices.Contains(lost, i) != (d.GetHealth() == v1beta1.Unhealthy) {
				t.Errorf("lost %v: unit %d is %s", lost, i, d.GetHealth())
			}
		}
		r.awaitHealthy(GPUResource, 8-len(lost))
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

// An Allocate that the kubelet has canceled allocates nothing.
func TestCanceledRequests(t *testing.T) {
	reserved := 0
	s := newTestServer(GPUResource, buildInventory(coretest.GPUs(8), core.DefaultConfig()))
	s.opts.Reserved = func([]gpu.Device) { reserved++ }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Allocate(ctx, allocateRequest(gpuIDs(1)))
	if status.Code(err) != codes.Canceled || reserved != 0 || s.stats().Allocations != 0 || s.stats().AllocationErrors != 1 {
		t.Errorf("allocation: %v, Reserved called %d times", err, reserved)
	}
	p, err := s.GetPreferredAllocation(ctx, preferRequest(firstIDs(8), nil, 2))
	if err != nil || len(p.GetContainerResponses()[0].GetDeviceIDs()) != 2 {
		t.Errorf("preference: %v, %v", p, err)
	}
}
