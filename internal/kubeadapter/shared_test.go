package kubeadapter

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// replica returns the ID of the n-th unit of GPU i.
func replica(i, n int) string { return fmt.Sprintf("%s::%d", coretest.GPU(i), n) }

// A container with units of a GPU sees it once, in any order of the units.
func TestAllocateReplicas(t *testing.T) {
	r := startRig(t, buildInventory(coretest.GPUs(3), shared(inventory.TimeSlicing, 4), 2))
	r.awaitHealthy(GPUResource, 8)
	id := gpuIDs(0, 1, 2)
	for _, c := range []struct {
		name string
		ids  []string
		want string
	}{
		{"one", []string{replica(1, 3)}, id[1]},
		{"two of one GPU", []string{replica(1, 2), replica(1, 0)}, id[1]},
		{"all of one GPU", []string{replica(0, 3), replica(0, 1), replica(0, 0), replica(0, 2)}, id[0]},
		{"two GPUs", []string{replica(1, 1), replica(0, 3), replica(1, 0)}, id[0] + "," + id[1]},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range 4 { // the kubelet's order is random
				c.ids = append(c.ids[1:], c.ids[0])
				got, err := r.kubelet.Allocate(r.ctx, GPUResource, c.ids...)
				r.must(err)
				want := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{inventory.VisibleDevices: c.want}}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	for _, bad := range []struct {
		id   string
		code codes.Code
	}{
		{id[0], codes.NotFound}, // the GPU itself is not a unit
		{replica(0, 4), codes.NotFound},
		{replica(2, 0), codes.FailedPrecondition},
	} {
		if _, err := r.kubelet.Allocate(r.ctx, GPUResource, bad.id); status.Code(err) != bad.code || !strings.Contains(err.Error(), bad.id) {
			t.Errorf("%s: %v, want %v with its name", bad.id, err, bad.code)
		}
	}
}

// The text of NVIDIA's k8s-device-plugin (plugin/server.go, rm/rm.go), so that its documentation can be found.
func TestSeveralSharedUnits(t *testing.T) {
	c := renamedShares(4)
	c.Policy.Shares[0].Sharing.OnePerRequest = true
	r := startRig(t, buildInventory(coretest.GPUs(2), c))
	const resource = "nvidia.com/gpu.shared"
	r.awaitHealthy(resource, 8)
	const want = `invalid allocation request for "nvidia.com/gpu.shared": invalid request: maximum request size for shared resources is 1; found 2`
	_, err := r.kubelet.Allocate(r.ctx, resource, replica(0, 0), replica(1, 0))
	if s := status.Convert(err); s.Code() != codes.InvalidArgument || s.Message() != want {
		t.Errorf("%v: %s", s.Code(), s.Message())
	}
	if _, err := r.kubelet.Allocate(r.ctx, resource, replica(0, 0)); err != nil {
		t.Error(err)
	}
	if s := r.adapter.Stats()[0]; s.Allocations != 1 || s.AllocationErrors != 1 {
		t.Errorf("%d allocations, %d errors", s.Allocations, s.AllocationErrors)
	}
}

// The paths are those of NVIDIA's k8s-device-plugin (plugin/mps.go, mps/root.go).
func TestMPSClient(t *testing.T) {
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{
		Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 30 << 30, Threads: 50,
	}}}
	built := buildInventory(coretest.GPUs(2), c)
	plan, err := built.Reserve(inventory.UnitID(replica(1, 1)))
	if err != nil {
		t.Fatal(err)
	}
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
	if diff := cmp.Diff(want, allocateResponse(plan, Options{MPSRoot: "/run/nvidia/mps/"}), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

// Units of a pool of MPS clients are unhealthy without the control daemon.
func TestMPSDaemon(t *testing.T) {
	const resource = "nvidia.com/gpu.mps"
	r := newRig(t)
	r.startKubelet()
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}}}
	built := buildInventory(coretest.GPUs(2), c)
	r.src.Set(built.WithHost(inventory.Host{}, inventory.OverlapWarn))
	r.start()
	r.await("unhealthy units", func() bool {
		capacity, allocatable := r.kubelet.Capacity(resource)
		return capacity == 4 && allocatable == 0
	})
	if _, err := r.kubelet.Allocate(r.ctx, resource, replica(0, 0)); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "pool gpu.mps") {
		t.Errorf("without a daemon: %v", err)
	}
	r.src.Set(built.WithHost(inventory.Host{MPS: []string{"gpu.mps"}}, inventory.OverlapWarn))
	r.awaitHealthy(resource, 4)
	_, err := r.kubelet.Allocate(r.ctx, resource, replica(0, 0))
	r.must(err)
	if _, err := r.kubelet.Allocate(r.ctx, resource, replica(0, 0), replica(0, 1)); status.Code(err) != codes.InvalidArgument {
		t.Errorf("two clients for one container: %v", err)
	}
}

// A MIG instance may get the ID of the one that was in its place, and a GPU in another pool has the same ID. The plugin of
// the old resource does not allocate it, and lists it as unhealthy before it is removed.
func TestSameIDInAnotherResource(t *testing.T) {
	reconfigured := migGPU()
	reconfigured.Devices[3].Profile = "2g.20gb"
	instance := string(reconfigured.Devices[3].ID)
	for _, c := range []struct {
		name, was, is, id string
		before, after     *inventory.Inventory
		left              []string // of the old resource
	}{
		{"another profile", "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-2g.20gb", instance,
			buildInventory(migGPU(), mixedConfig()), buildInventory(reconfigured, mixedConfig()), []string{}},
		{"another pool", GPUResource, h100, gpuIDs(1)[0],
			buildInventory(coretest.GPUs(2), core.DefaultConfig()), buildInventory(coretest.GPUs(2), oneElsewhere()), gpuIDs(0)},
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
// list.
func TestSharesInPlaceOfGPUs(t *testing.T) {
	r := newRunning(t, 2)
	r.src.Set(buildInventory(coretest.GPUs(2), shared(inventory.TimeSlicing, 3)))
	r.awaitHealthy(GPUResource, 6)
	r.await("shared units only", func() bool { n, _ := r.kubelet.Capacity(GPUResource); return n == 6 })

	c := renamedShares(3)
	r.src.Set(buildInventory(coretest.GPUs(2), c))
	r.awaitHealthy("nvidia.com/gpu.shared", 6)
	r.awaitEmpty(GPUResource)
	r.assertUnhealthyBeforeRemoval(GPUResource)
	if _, err := r.kubelet.Allocate(r.ctx, GPUResource, replica(0, 0)); err == nil {
		t.Error("the old resource allocates what is in another pool")
	}
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

// The names are those of NVIDIA's k8s-device-plugin (rm/rm.go: '+' becomes '.'), the profiles those of `nvidia-smi mig -lgip` on
// A30, A100, H100, H200, B200 and RTX PRO 6000.
func TestResourceNamesOfProfiles(t *testing.T) {
	for profile, want := range map[string]string{
		"1g.5gb": "nvidia.com/mig-1g.5gb", "1g.5gb+me": "nvidia.com/mig-1g.5gb.me", "1g.6gb+me": "nvidia.com/mig-1g.6gb.me",
		"2g.10gb": "nvidia.com/mig-2g.10gb", "2g.12gb+me": "nvidia.com/mig-2g.12gb.me", "3g.20gb": "nvidia.com/mig-3g.20gb",
		"4g.20gb": "nvidia.com/mig-4g.20gb", "7g.40gb": "nvidia.com/mig-7g.40gb", "4g.24gb": "nvidia.com/mig-4g.24gb",
		"1g.10gb": "nvidia.com/mig-1g.10gb", "1g.10gb+me": "nvidia.com/mig-1g.10gb.me", "1g.20gb": "nvidia.com/mig-1g.20gb",
		"7g.80gb": "nvidia.com/mig-7g.80gb", "1g.18gb+me": "nvidia.com/mig-1g.18gb.me", "7g.141gb": "nvidia.com/mig-7g.141gb",
		"1g.23gb": "nvidia.com/mig-1g.23gb", "7g.180gb": "nvidia.com/mig-7g.180gb",
		"1g.24gb": "nvidia.com/mig-1g.24gb", "1g.24gb+me": "nvidia.com/mig-1g.24gb.me", "1g.24gb+gfx": "nvidia.com/mig-1g.24gb.gfx",
		"1g.24gb+me.all": "nvidia.com/mig-1g.24gb.me.all", "1g.24gb-me": "nvidia.com/mig-1g.24gb-me",
		"2g.48gb+gfx": "nvidia.com/mig-2g.48gb.gfx", "2g.48gb+me.all": "nvidia.com/mig-2g.48gb.me.all",
		"2g.48gb-me": "nvidia.com/mig-2g.48gb-me", "4g.96gb+gfx": "nvidia.com/mig-4g.96gb.gfx",
		"1c.3g.40gb": "nvidia.com/mig-1c.3g.40gb", // NVIDIA's plugin has no name for it, and does not start
	} {
		s := cutInSeven(1)
		for i := range s.Devices {
			if s.Devices[i].Profile != "" {
				s.Devices[i].Profile = profile
			}
		}
		lists := listDevices(buildInventory(gpu.NewSnapshot(s), mixedConfig()))
		if len(lists[want]) != 7 || len(lists) != 1 || len(want) > 63 {
			t.Errorf("%s: %v, want 7 %s", profile, lists, want)
		}
		c := mixedConfig()
		c.Policy.Shares = []inventory.Share{{
			Pool: inventory.MIGPool(profile), Rename: inventory.MIGPool(profile) + ".shared",
			Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2},
		}}
		if lists := listDevices(buildInventory(gpu.NewSnapshot(s), c)); len(lists[want+".shared"]) != 14 {
			t.Errorf("%s shared: %v", profile, lists)
		}
	}
}

// The next adapter offers resources without units as empty lists, after the driver was read.
func TestResourcesOfAnEarlierAdapter(t *testing.T) {
	r := newRunning(t, 2)
	before := r.adapter.Offered()
	r.stop()

	r.src = coretest.NewSource() // the driver has not been read yet
	r.start(func(a *Adapter) { a.opts.Offered = before })
	r.await("a reason", func() bool { return r.adapter.Ready() != nil })
	if n, _ := r.kubelet.Capacity(GPUResource); n != 2 || len(r.sockets()) > 0 {
		t.Errorf("%d GPUs, sockets %v before the driver was read", n, r.sockets())
	}
	c := renamedShares(2)
	r.src.Set(buildInventory(coretest.GPUs(2), c))
	r.awaitHealthy("nvidia.com/gpu.shared", 4)
	r.awaitEmpty(GPUResource)
	if got, want := fmt.Sprint(r.adapter.Offered()), "[nvidia.com/gpu nvidia.com/gpu.shared]"; got != want {
		t.Errorf("offered: %s, want %s", got, want)
	}
}
