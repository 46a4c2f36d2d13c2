package kubeadapter

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// Which units an Allocate gets is in the core's tests and in FuzzAllocate; here are the responses and the errors.
func TestAllocate(t *testing.T) {
	strict := renamedShares(4)
	strict.Policy.Shares[0].Sharing.OnePerRequest = true
	exclusive := newTestServer(GPUResource, gpus(4, 3))
	oneEach := newTestServer("nvidia.com/gpu.shared", buildInventory(coretest.GPUs(2), strict))
	id := gpuIDs(0, 1, 2, 3)
	lost := id[3] + " is lost: GPU is lost since 1970-01-01T00:00Z; action: check slot and power, reboot the host; clears: GPU answers again, or reboot"
	for _, c := range []struct {
		name string
		of   *server
		ids  []string
		want string // the visible devices
		code codes.Code
		text string
	}{
		{name: "unordered, repeated", of: exclusive, ids: []string{id[2], id[0], id[2]}, want: id[0] + "," + id[2]},
		{name: "none", of: exclusive},
		{name: "unknown", of: exclusive, ids: []string{id[0], "GPU-x", "GPU-y"}, code: codes.NotFound, text: "unknown device IDs: GPU-x,GPU-y"},
		{name: "unhealthy", of: exclusive, ids: id, code: codes.FailedPrecondition, text: "unhealthy devices: " + lost},
		{name: "both", of: exclusive, ids: []string{id[3], "GPU-x"}, code: codes.NotFound,
			text: "unknown device IDs: GPU-x; unhealthy devices: " + lost},
		{name: "one share", of: oneEach, ids: []string{replica(0, 3)}, want: id[0]},
		// The text of NVIDIA's k8s-device-plugin (plugin/server.go, rm/rm.go), so that its documentation can be found.
		{name: "two shares", of: oneEach, ids: []string{replica(0, 0), replica(1, 0)}, code: codes.InvalidArgument,
			text: `invalid allocation request for "nvidia.com/gpu.shared": invalid request: maximum request size for shared resources is 1; found 2`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var want *v1beta1.AllocateResponse
			if c.code == codes.OK {
				one := &v1beta1.ContainerAllocateResponse{}
				if c.want != "" {
					one.Envs = map[string]string{"NVIDIA_VISIBLE_DEVICES": c.want}
				}
				want = &v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{one}}
			}
			for range 2 { // the same again
				got, err := c.of.Allocate(t.Context(), allocateRequest(c.ids))
				if s := status.Convert(err); s.Code() != c.code || s.Message() != c.text {
					t.Fatalf("error %v, want %v %q", err, c.code, c.text)
				}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	if s := exclusive.stats(); s.Allocations != 4 || s.AllocationErrors != 6 {
		t.Errorf("%d allocations, %d errors; want 4 and 6", s.Allocations, s.AllocationErrors)
	}
}

// Each container gets what it requests. Reserved is called once for each Allocate with devices that succeeds.
func TestReserved(t *testing.T) {
	var calls [][]gpu.Device
	s := newTestServer(GPUResource, gpus(4))
	s.opts.Reserved = func(devices []gpu.Device) { calls = append(calls, devices) }
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx        context.Context
		containers [][]string
		want       codes.Code
	}{
		{t.Context(), [][]string{gpuIDs(2, 0), gpuIDs(3)}, codes.OK},
		{t.Context(), [][]string{gpuIDs(1), {"GPU-x"}}, codes.NotFound},
		{t.Context(), [][]string{nil}, codes.OK},
		{canceled, [][]string{gpuIDs(1)}, codes.Canceled},
	} {
		got, err := s.Allocate(c.ctx, allocateRequest(c.containers...))
		if status.Code(err) != c.want {
			t.Fatalf("%v: %v", c.containers, err)
		}
		for i, one := range got.GetContainerResponses() {
			slices.Sort(c.containers[i])
			if visible := one.GetEnvs()[inventory.VisibleDevices]; visible != strings.Join(c.containers[i], ",") {
				t.Errorf("container %d of %v: %s", i, c.containers, visible)
			}
		}
	}
	var reserved []string
	for _, d := range slices.Concat(calls...) {
		reserved = append(reserved, string(d.ID))
	}
	if len(calls) != 1 || !slices.Equal(reserved, gpuIDs(0, 2, 3)) {
		t.Errorf("%d calls with %v, want one", len(calls), reserved)
	}
	if s := s.stats(); s.Allocations != 2 || s.AllocationErrors != 2 {
		t.Errorf("%+v", s)
	}
}

// Device nodes are those of the host's root, and an MPS client has the paths of NVIDIA's k8s-device-plugin (plugin/mps.go,
// mps/root.go).
func TestAllocateResponse(t *testing.T) {
	c := core.DefaultConfig()
	c.DeviceNodes = true
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{
		Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 30 << 30, Threads: 50,
	}}}
	plan, err := buildInventory(coretest.GPUs(2), c).Reserve(inventory.UnitID(replica(1, 1)))
	if err != nil {
		t.Fatal(err)
	}
	for devRoot, host := range map[string]string{"": "", "/": "", "/run/nvidia/driver": "/run/nvidia/driver"} {
		want := &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{
				inventory.VisibleDevices:            gpuIDs(1)[0],
				"CUDA_MPS_PIPE_DIRECTORY":           "/mps/nvidia.com/gpu.mps/pipe",
				"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
				"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT":  "0=30720M",
			},
			Mounts: []*v1beta1.Mount{
				{HostPath: "/run/nvidia/mps/nvidia.com/gpu.mps/pipe", ContainerPath: "/mps/nvidia.com/gpu.mps/pipe"},
				{HostPath: "/run/nvidia/mps/shm", ContainerPath: "/dev/shm"},
			},
		}
		for _, p := range []string{"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidiactl"} {
			want.Devices = append(want.Devices, &v1beta1.DeviceSpec{HostPath: host + p, ContainerPath: p, Permissions: "rw"})
		}
		got := allocateResponse(plan, Options{DevRoot: devRoot, MPSRoot: "/run/nvidia/mps/"})
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
	}
}

// A MIG instance may get the ID of the one that was in its place, and a GPU in another pool has the same ID. The plugin of
// the old resource does not allocate it, and lists it as unhealthy before it is removed.
func TestSameIDInAnotherResource(t *testing.T) {
	reconfigured := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "2g.20gb", "1g.10gb")
	for _, c := range []struct {
		name, was, is, id string
		before, after     *inventory.Inventory
		left              []string // of the old resource
	}{
		{"another profile", "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-2g.20gb", string(coretest.Instance(1, 1)),
			migGPU(), buildInventory(reconfigured, mixedConfig()), []string{}},
		{"another pool", GPUResource, h100, gpuIDs(1)[0], gpus(2), oneElsewhere(), gpuIDs(0)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := startRig(t, c.before)
			r.awaitListed(c.was, c.id, v1beta1.Healthy)
			old, err := r.kubelet.Plugin(c.was)
			r.must(err)
			r.src.Set(c.after)
			r.awaitHealthy(c.is, 1)
			_, err = old.Allocate(r.ctx, allocateRequest([]string{c.id}))
			if err == nil || !strings.Contains(err.Error(), c.id+": belongs to "+c.is+" now, not "+c.was) {
				t.Errorf("the old resource allocates it: %v", err)
			}
			r.await("the old resource without it", func() bool {
				devices, connected := r.kubelet.Devices(c.was)
				return connected && slices.Equal(ids(devices), c.left)
			})
			r.assertUnhealthyBeforeRemoval(c.was)
			if _, err := r.kubelet.Allocate(r.ctx, c.is, c.id); err != nil {
				t.Errorf("the new resource: %v", err)
			}
		})
	}
}

// GPUs become shared, in the same pool or another: no ID is removed while it is healthy, and a pool without units is an empty
// list, also for the next kubelet, whose checkpoint may have pods with such a unit.
func TestSharesInPlaceOfGPUs(t *testing.T) {
	r := newRunning(t, 2)
	r.src.Set(buildInventory(coretest.GPUs(2), shared(3)))
	r.awaitHealthy(GPUResource, 6)
	r.await("shared units only", func() bool { n, _ := r.kubelet.Capacity(GPUResource); return n == 6 })

	r.src.Set(buildInventory(coretest.GPUs(2), renamedShares(3)))
	r.awaitHealthy("nvidia.com/gpu.shared", 6)
	r.awaitEmpty(GPUResource)
	r.assertUnhealthyBeforeRemoval(GPUResource)
	if _, err := r.kubelet.Allocate(r.ctx, GPUResource, replica(0, 0)); err == nil {
		t.Error("the old resource allocates what is in another pool")
	}
	if n := len(r.kubelet.Registrations()); n != 2 {
		t.Errorf("%d registrations, want 2", n)
	}
	r.restartKubelet(true)
	r.awaitHealthy("nvidia.com/gpu.shared", 6)
	r.awaitEmpty(GPUResource)
}

// assertUnhealthyBeforeRemoval fails if a unit was removed from the lists of a resource while it was healthy.
func (r *rig) assertUnhealthyBeforeRemoval(resource string) {
	r.Helper()
	var before []*v1beta1.Device
	for _, list := range r.kubelet.Lists(resource) {
		now := ids(list)
		for _, d := range before {
			if d.GetHealth() == v1beta1.Healthy && !slices.Contains(now, d.GetID()) {
				r.Errorf("%s was dropped while it was healthy", d.GetID())
			}
		}
		before = list
	}
}

// The next adapter offers resources without units as empty lists, after the driver was read.
func TestResourcesOfAnEarlierAdapter(t *testing.T) {
	r := newRunning(t, 2)
	before := r.adapter.Offered()
	r.stop()

	r.src = coretest.NewSource() // the driver has not been read yet
	r.start(r.src.Current(), func(a *Adapter) { a.opts.Offered = before })
	watch.Sleep(r.ctx, 100*time.Millisecond)
	if n, _ := r.kubelet.Capacity(GPUResource); n != 2 || len(r.sockets()) > 0 {
		t.Errorf("%d GPUs, sockets %v before the driver was read", n, r.sockets())
	}
	r.src.Set(buildInventory(coretest.GPUs(2), renamedShares(2)))
	r.awaitHealthy("nvidia.com/gpu.shared", 4)
	r.awaitEmpty(GPUResource)
	if got, want := fmt.Sprint(r.adapter.Offered()), "[nvidia.com/gpu nvidia.com/gpu.shared]"; got != want {
		t.Errorf("offered: %s, want %s", got, want)
	}
}

// BenchmarkAllocate allocates a quarter of the GPUs or an eighth of the units of the largest nodes, without the socket.
func BenchmarkAllocate(b *testing.B) {
	measure := func(name, resource string, inv *inventory.Inventory, part int) {
		b.Run(name, func(b *testing.B) {
			var ids []string
			for _, l := range listDevices(inv)[resource] {
				ids = append(ids, string(l.id))
			}
			s, r := newTestServer(resource, inv), allocateRequest(ids[:len(ids)/part])
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Allocate(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	for _, n := range []int{8, 64} {
		measure(fmt.Sprintf("units=%d", n), GPUResource, gpus(n), 4)
	}
	for _, node := range largest {
		measure(node.name, node.resource, buildInventory(node.machine, node.config), 8)
	}
}
