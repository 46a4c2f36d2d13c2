package deviceplugin

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

// stream is a ListAndWatch stream in a synctest bubble.
type stream struct {
	grpc.ServerStream // nil: other methods panic
	ctx               context.Context
	opened            time.Time
	lists             []sent
}

// sent is a response: when it was sent, and its number of healthy devices.
type sent struct {
	at      time.Duration
	healthy int
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Send(r *v1beta1.ListAndWatchResponse) error {
	l := sent{at: time.Since(s.opened)}
	for _, d := range r.GetDevices() {
		if d.GetHealth() == v1beta1.Healthy {
			l.healthy++
		}
	}
	s.lists = append(s.lists, l)
	return nil
}

// The responses on a stream of eight GPUs with the default timings. play sets the GPUs, some of which are lost.
func TestResponses(t *testing.T) {
	pause := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
	for name, c := range map[string]struct {
		play func(set func(lost ...int))
		want []sent
	}{
		"heartbeat": {func(func(...int)) { pause(2*defaultTimings.heartbeat + time.Second) },
			[]sent{{0, 8}, {30 * time.Second, 8}, {60 * time.Second, 8}}},
		"a change is sent immediately after the stream has opened": {func(set func(...int)) { set(3) }, []sent{{0, 8}, {0, 7}}},
		"a change is sent immediately after a heartbeat": {func(set func(...int)) {
			pause(defaultTimings.heartbeat)
			set(3)
			pause(defaultTimings.heartbeat - time.Millisecond)
			set(3, 4)
		}, []sent{{0, 8}, {30 * time.Second, 8}, {30 * time.Second, 7}, {59999 * time.Millisecond, 6}}},
		// The kubelet writes its checkpoint for each response, so there is at most one a second.
		"changes after another one are sent each second": {func(set func(...int)) {
			pause(5 * time.Second)
			set(0)
			pause(5 * time.Millisecond)
			for i := range 189 {
				pause(10 * time.Millisecond)
				set([]int{0, 1, 2, 3}[:1+(i+1)%4]...) // the 99th is the last of the first second: 4 are lost
			}
			pause(2 * time.Second)
		}, []sent{{0, 8}, {5 * time.Second, 7}, {6 * time.Second, 4}, {7 * time.Second, 6}}},
		"a change that is reverted within a second is not sent": {func(set func(...int)) {
			set(0)
			pause(100 * time.Millisecond)
			set(0, 1)
			pause(100 * time.Millisecond)
			set(0)
			pause(5 * time.Second)
		}, []sent{{0, 8}, {0, 7}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestServer(kubeadapter.GPUResource, gpus(8))
				ctx, cancel := context.WithCancel(t.Context())
				st := &stream{ctx: ctx, opened: time.Now()}
				done := make(chan error, 1)
				go func() { done <- s.ListAndWatch(nil, st) }()
				synctest.Wait()
				c.play(func(lost ...int) {
					s.tracker.setInventory(gpus(8, lost...))
					synctest.Wait()
				})
				cancel()
				if err := <-done; err != nil {
					t.Errorf("ended with %v", err)
				}
				if !slices.Equal(st.lists, c.want) {
					t.Errorf("lists %v, want %v", st.lists, c.want)
				}
			})
		})
	}
}

func TestListResponse(t *testing.T) {
	s := coretest.GPUs(4)
	s.Devices = slices.Clone(s.Devices)
	s.Devices[3].NUMANode = -1
	node := func(n int64) *v1beta1.TopologyInfo {
		return &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: n}}}
	}
	want := []*v1beta1.Device{
		{ID: string(coretest.GPU(0)), Health: "Healthy", Topology: node(0)},
		{ID: string(coretest.GPU(1)), Health: "Healthy", Topology: node(0)},
		{ID: string(coretest.GPU(2)), Health: "Unhealthy", Topology: node(1)},
		{ID: string(coretest.GPU(3)), Health: "Healthy"}, // -1 is the kubelet's own sentinel
	}
	c := core.DefaultConfig()
	inv := buildInventory(s, c, 2)
	if diff := cmp.Diff(want, listResponse(listDevices(inv)[kubeadapter.GPUResource]).GetDevices(), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	// A change that the API can't express, such as another reason, is another inventory and the same list.
	l := health.Ledger{}.Apply(c.Health, time.Unix(900, 0), health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.Lost})
	later := core.Build(s, l, c).WithoutHost()
	if later.Equal(inv) || !slices.Equal(listDevices(later)[kubeadapter.GPUResource], listDevices(inv)[kubeadapter.GPUResource]) {
		t.Error("want inventories that differ and equal lists")
	}
	c.Health.Mode = health.ModeObserve
	want[2].Health = "Healthy"
	observed := buildInventory(s, c, 2)
	if diff := cmp.Diff(want, listResponse(listDevices(observed)[kubeadapter.GPUResource]).GetDevices(), protocmp.Transform()); diff != "" {
		t.Error("under ModeObserve:", diff)
	}
	if n := Resources(observed)[kubeadapter.GPUResource][health.GPULost]; n != 1 {
		t.Errorf("%d lost in the count, want 1", n)
	}
}

// client opens another stream on the plugin socket. leave closes its connection.
func (r *rig) client() (plugin v1beta1.DevicePluginClient, stream grpc.ServerStreamingClient[v1beta1.ListAndWatchResponse], leave func()) {
	r.Helper()
	conn, err := pluginsocket.Dial(r.stats().Socket)
	check.NoError(r, err)
	plugin = v1beta1.NewDevicePluginClient(conn)
	stream, err = plugin.ListAndWatch(r.ctx, &v1beta1.Empty{})
	check.NoError(r, err)
	return plugin, stream, func() { _ = conn.Close() }
}

// many offers 1,000 units, those of one GPU lost: another one is another list.
func (r *rig) many(lost int) {
	r.src.Set(buildInventory(coretest.GPUs(10), shared(100), lost%7))
}

// block starts plugins whose only stream is not read, and returns when Send blocks. The flow control window is 64 KiB, about the
// size of a list of 1,000 units.
func (r *rig) block() (leave func()) {
	r.Helper()
	r.kubelet.Behave(kubelettest.Behaviour{NoStream: true})
	r.startKubelet()
	r.start(gpus(1), func(p *Plugins) { p.timings.openStream = time.Hour })
	r.awaitRegistrations(1)
	_, _, leave = r.client()
	for still, lost := 0, 0; still < 10; lost++ {
		before := r.stats().Lists
		r.many(lost)
		watch.Sleep(r.ctx, 20*time.Millisecond)
		if still++; r.stats().Lists > before {
			still = 0
		}
	}
	return leave
}

// A stream that is not read blocks no other stream or request. It ends when its connection is closed.
func TestBlockedStream(t *testing.T) {
	r := newRig(t)
	leave := r.block()
	blocked := r.stats().Lists
	plugin, stream, leaveToo := r.client()
	for lost := range 5 {
		r.many(lost)
		list, err := stream.Recv()
		check.NoError(r, err)
		if len(list.GetDevices()) != 1000 {
			t.Fatalf("%d devices", len(list.GetDevices()))
		}
	}
	_, err := plugin.Allocate(r.ctx, allocateRequest([]string{replica(9, 99)}))
	check.NoError(r, err)
	check.Until(r, "five lists more", func() bool { return r.stats().Lists >= blocked+5 }) // the server counts a list when it is sent
	leaveToo()
	check.NoError(r, r.plugins.Alive(r.ctx))
	if s := r.stats(); !s.Connected || s.Sockets != 1 {
		t.Errorf("%+v", s)
	}
	leave()
	check.Until(r, "the end of the stream", func() bool { return r.stats().LastError == errStreamEnded.Error() })
}

// A kubelet that restarts may have two streams for a short time. Each list is sent on both, and the IDs
// do not change with the health.
func TestTwoStreamsGetEveryList(t *testing.T) {
	r := newRunning(t, 8)
	_, stream, leave := r.client()
	defer leave()
	for _, lost := range [][]int{nil, {1}, {1, 2}, {2}, nil} {
		r.src.Set(gpus(8, lost...))
		list, err := stream.Recv()
		check.NoError(r, err)
		if got := ids(list.GetDevices()); !slices.Equal(got, gpuIDs(0, 1, 2, 3, 4, 5, 6, 7)) {
			t.Errorf("IDs changed: %v", got)
		}
		for i, d := range list.GetDevices() {
			if slices.Contains(lost, i) != (d.GetHealth() == v1beta1.Unhealthy) {
				t.Errorf("lost %v: unit %d is %s", lost, i, d.GetHealth())
			}
		}
		r.awaitHealthy(kubeadapter.GPUResource, 8-len(lost))
	}
	if n := len(r.kubelet.Lists(kubeadapter.GPUResource)); n != 5 {
		t.Errorf("%d lists to the kubelet, want 5", n)
	}
}

// largest are the largest nodes that are supported: a resource and its number of units.
var largest = []struct {
	name, resource string
	units          int
	machine        gpu.Snapshot
	config         core.Config
}{
	{"16GPUsBy100", kubeadapter.GPUResource, 1600, coretest.GPUs(16), shared(100)},
	{"16GPUsBy7InstancesBy10", "nvidia.com/mig-1g.10gb", 1120, cutInSeven(16), shared(10)},
	{"16GPUsBy7Instances", "nvidia.com/mig-1g.10gb", 112, cutInSeven(16), mixedConfig()},
}

// A response may have 4 MiB, the limit of the kubelet's gRPC client (the default of grpc for a received message).
func TestLargestListsFitAMessage(t *testing.T) {
	for _, node := range largest {
		list := listDevices(buildInventory(node.machine, node.config))[node.resource]
		if size := proto.Size(listResponse(list)); len(list) != node.units || size > 4<<20/8 {
			t.Errorf("%s: %d units, want %d; %d bytes", node.name, len(list), node.units, size)
		}
		for _, l := range list {
			if len(l.id) > 63 {
				t.Errorf("%s is longer than the kubelet's API allows", l.id)
			}
		}
	}
}
