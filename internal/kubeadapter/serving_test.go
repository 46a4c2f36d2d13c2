package kubeadapter

import (
	"fmt"
	"slices"
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
)

func TestFirstListWithinASecond(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	s := coretest.GPUs(4)
	s.Devices = slices.Clone(s.Devices)
	s.Devices[3].NUMANode = -1
	r.offer(s, 2)
	began := time.Now()
	r.start(func(a *Adapter) { a.timings = defaultTimings })
	r.awaitHealthy(GPUResource, 3)
	if took := time.Since(began); took > time.Second {
		t.Errorf("first list after %v", took)
	}
	node := func(n int64) *v1beta1.TopologyInfo {
		return &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: n}}}
	}
	want := []*v1beta1.Device{
		{ID: string(coretest.GPU(0)), Health: "Healthy", Topology: node(0)},
		{ID: string(coretest.GPU(1)), Health: "Healthy", Topology: node(0)},
		{ID: string(coretest.GPU(2)), Health: "Unhealthy", Topology: node(1)},
		{ID: string(coretest.GPU(3)), Health: "Healthy"}, // -1 is the kubelet's own sentinel
	}
	if diff := cmp.Diff(want, r.kubelet.Lists(GPUResource)[0], protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestResourceWithoutUnitsIsAnEmptyList(t *testing.T) {
	r := startRig(t, buildInventory(migGPU(), mixedConfig()))
	r.awaitHealthy(GPUResource, 1)
	r.awaitHealthy("nvidia.com/mig-1g.10gb", 2)
	r.awaitHealthy("nvidia.com/mig-1g.10gb.me", 1)
	r.src.Set(buildInventory(coretest.GPUs(2), mixedConfig())) // MIG mode off
	r.awaitHealthy(GPUResource, 2)
	r.awaitEmpty("nvidia.com/mig-1g.10gb")
	r.awaitReady()
	if n := len(r.kubelet.Registrations()); n != 3 {
		t.Errorf("%d registrations, want 3", n)
	}
	r.restartKubelet(true) // the next one gets the empty list, too: its checkpoint may have pods with such a unit
	r.awaitHealthy(GPUResource, 2)
	r.await("a connected plugin without units", func() bool {
		devices, ok := r.kubelet.Devices("nvidia.com/mig-1g.10gb")
		return ok && len(devices) == 0 && !r.kubelet.Listed("nvidia.com/mig-1g.10gb").IsZero()
	})
}

func TestAllocate(t *testing.T) {
	r := startRig(t, buildInventory(coretest.GPUs(4), core.DefaultConfig(), 3))
	r.awaitHealthy(GPUResource, 3)
	visible := func(ids string) *v1beta1.ContainerAllocateResponse {
		return &v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": ids}}
	}
	id := gpuIDs(0, 1, 2, 3)
	const lost = "lost: GPU is lost since 1970-01-01T00:00Z; action: check slot and power, reboot the host; clears: GPU answers again, or reboot"
	for _, c := range []struct {
		name string
		ids  []string
		want *v1beta1.ContainerAllocateResponse
		code codes.Code
		text string
	}{
		{name: "one", ids: id[:1], want: visible(id[0])},
		{name: "all, unordered", ids: []string{id[2], id[0], id[1]}, want: visible(id[0] + "," + id[1] + "," + id[2])},
		{name: "duplicates", ids: []string{id[1], id[1]}, want: visible(id[1])},
		{name: "none", want: &v1beta1.ContainerAllocateResponse{}},
		{name: "unknown", ids: []string{id[0], "GPU-x", "GPU-y"}, code: codes.NotFound, text: "unknown device IDs: GPU-x,GPU-y"},
		{name: "unhealthy", ids: id, code: codes.FailedPrecondition, text: "unhealthy devices: " + id[3] + " is " + lost},
		{name: "both", ids: []string{id[3], "GPU-x"}, code: codes.NotFound,
			text: "unknown device IDs: GPU-x; unhealthy devices: " + id[3] + " is " + lost},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range 2 { // the same again
				got, err := r.kubelet.Allocate(r.ctx, GPUResource, c.ids...)
				if s := status.Convert(err); s.Code() != c.code || s.Message() != c.text {
					t.Fatalf("error %v, want %v %q", err, c.code, c.text)
				}
				if diff := cmp.Diff(c.want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	if s := r.adapter.Stats()[0]; s.Allocations != 8 || s.AllocationErrors != 6 {
		t.Errorf("%d allocations, %d errors; want 8 and 6", s.Allocations, s.AllocationErrors)
	}
}

func TestAllocateSeveralContainers(t *testing.T) {
	s := newTestServer(GPUResource, buildInventory(coretest.GPUs(2), core.DefaultConfig()))
	got, err := s.Allocate(t.Context(), allocateRequest(gpuIDs(1), gpuIDs(0), gpuIDs(1)))
	if err != nil {
		t.Fatal(err)
	}
	var visible []string
	for _, c := range got.GetContainerResponses() {
		visible = append(visible, c.GetEnvs()["NVIDIA_VISIBLE_DEVICES"])
	}
	if !slices.Equal(visible, gpuIDs(1, 0, 1)) {
		t.Errorf("responses %v", visible)
	}
}

func TestAllocateWithDeviceNodes(t *testing.T) {
	c := mixedConfig()
	c.DeviceNodes = true
	s := migGPU()
	s.Nodes = append(slices.Clone(s.Nodes), "/dev/nvidia-caps/nvidia-cap10", "/dev/nvidia-caps/nvidia-cap20")
	inv := buildInventory(gpu.NewSnapshot(s), c)
	plan, err := inv.Reserve("MIG-00000000-0000-4000-8000-000000000000")
	if err != nil {
		t.Fatal(err)
	}
	want := []*v1beta1.DeviceSpec{}
	for _, p := range []string{"nvidia-caps/nvidia-cap10", "nvidia-caps/nvidia-cap20", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidiactl"} {
		want = append(want, &v1beta1.DeviceSpec{
			HostPath: "/run/nvidia/driver/dev/" + p, ContainerPath: "/dev/" + p, Permissions: "rw",
		})
	}
	if diff := cmp.Diff(want, allocateResponse(plan, Options{DevRoot: "/run/nvidia/driver"}).GetDevices(), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	for _, root := range []string{"", "/"} {
		if p := allocateResponse(plan, Options{DevRoot: root}).GetDevices()[5].GetHostPath(); p != "/dev/nvidiactl" {
			t.Errorf("root %q: %s", root, p)
		}
	}
}

func TestOptions(t *testing.T) {
	s := newTestServer(GPUResource, buildInventory(coretest.GPUs(1), core.DefaultConfig()))
	got, err := s.GetDevicePluginOptions(t.Context(), &v1beta1.Empty{})
	want := &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" || err != nil {
		t.Error(diff, err)
	}
	if _, err := s.PreStartContainer(t.Context(), &v1beta1.PreStartContainerRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("PreStartContainer, which the options do not have: %v", err)
	}
}

func TestResources(t *testing.T) {
	single := mixedConfig()
	single.MIG = inventory.MIGSingle
	for want, inv := range map[string]*inventory.Inventory{
		"map[nvidia.com/gpu:map[healthy:1] nvidia.com/mig-1g.10gb:map[lost:2] nvidia.com/mig-1g.10gb.me:map[lost:1]]": buildInventory(migGPU(), mixedConfig(), 1),
		"map[nvidia.com/gpu:map[healthy:2]]": buildInventory(migGPU(), single), // the profile with more instances
	} {
		if got := fmt.Sprint(Resources(inv)); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
