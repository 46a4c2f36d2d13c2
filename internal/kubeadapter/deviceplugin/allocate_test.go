package deviceplugin

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/test/check"
)

// Which units an Allocate gets is in the core's tests and in FuzzAllocate; here are the responses and the errors.
func TestAllocate(t *testing.T) {
	strict := renamedShares(4)
	strict.Policy.Shares[0].Sharing.OnePerRequest = true
	exclusive := newTestServer(kubeadapter.GPUResource, gpus(4, 3))
	oneEach := newTestServer("nvidia.com/gpu.shared", buildInventory(coretest.GPUs(2), strict))
	id := gpuIDs(0, 1, 2, 3)
	lost := id[3] + " is lost: GPU is lost since 1970-01-01T00:00Z; action: check slot and power, reboot the node; cleared by: an answer from the GPU, or a reboot"
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
	s := newTestServer(kubeadapter.GPUResource, gpus(4))
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
	c.Injection.Nodes = true
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{
		Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 30 << 30, Threads: 50,
	}}}
	plan, err := buildInventory(coretest.GPUs(2), c).Reserve(inventory.UnitID(replica(1, 1)))
	check.NoError(t, err)
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
		got := allocateResponse("nvidia.com/gpu.mps", plan, Options{DevRoot: devRoot, MPSRoot: "/run/nvidia/mps/"})
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
	}
}

// fewUnits returns a server of devices with names that a fuzzer finds: a to d are healthy, x is lost. The devices of share have
// three units each, those of b one per request.
func fewUnits(share ...gpu.DeviceID) *server {
	s := gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}}
	for i, id := range []gpu.DeviceID{"a", "b", "c", "d", "x"} {
		s.Devices = append(s.Devices, gpu.Device{ID: id, At: gpu.WholeGPU(id), Index: i, NUMANode: i % 2, Minor: i})
	}
	s.Links = []gpu.Link{{A: "a", B: "d", Path: gpu.PathBoard, NVLinks: 4}}
	cfg := core.DefaultConfig()
	for _, id := range share {
		cfg.Policy.Rules = append(cfg.Policy.Rules, inventory.Rule{
			Pool: inventory.DefaultPool, Select: inventory.Selector{IDs: []gpu.DeviceID{id}},
			Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, OnePerRequest: id == "b"},
		})
	}
	l := health.Ledger{}.Apply(cfg.Health, time.Unix(0, 0), health.Observation{At: gpu.WholeGPU("x"), Kind: health.Lost})
	return newTestServer(kubeadapter.GPUResource, core.Build(gpu.NewSnapshot(s), l, cfg).WithoutHost())
}

// wire returns the encoding of a message.
func wire(f *testing.F, m proto.Message) []byte {
	f.Helper()
	raw, err := proto.Marshal(m)
	check.NoError(f, err)
	return raw
}

// Each container sees each GPU of its request once, in order, and no others. A request for units that can't be allocated is
// refused with the ID of one, a request for more units than allowed is refused, and no other is.
func FuzzAllocate(f *testing.F) {
	for _, containers := range [][][]string{
		{}, {{}}, {{"c"}}, {{"d", "c", "c"}, {"c"}}, {{"x"}}, {{"unknown"}, {"d"}}, {{""}}, {{"c,d"}}, {{"a::2", "a::0"}}, {{"b::1"}},
		{{"b::0", "b::1"}}, {{"c", "a::1"}}, {{"c", "b::2"}}, {{"a::3"}}, {{"a"}}, {{"a::"}}, {{"::0"}}, {{"b::0"}, {"b::1"}},
	} {
		f.Add(wire(f, allocateRequest(containers...)))
	}
	s := fewUnits("a", "b")
	all := []string{"a::0", "a::1", "a::2", "b::0", "b::1", "b::2", "c", "d"}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &v1beta1.AllocateRequest{}
		if proto.Unmarshal(raw, r) != nil {
			return // refused by gRPC
		}
		var bad, want []string
		tooMany := false
		for _, c := range r.GetContainerRequests() {
			ids := slices.Compact(slices.Sorted(slices.Values(c.GetDevicesIds())))
			var visible []string
			for _, id := range ids {
				device, _, _ := strings.Cut(id, "::")
				visible = append(visible, device)
				if !slices.Contains(all, id) {
					bad = append(bad, id)
				}
				tooMany = tooMany || device == "b" && len(ids) > 1
			}
			want = append(want, strings.Join(slices.Compact(visible), ","))
		}
		response, err := s.Allocate(t.Context(), r)
		if err != nil {
			text := status.Convert(err).Message()
			if !tooMany && !slices.ContainsFunc(bad, func(id string) bool { return strings.Contains(text, id) }) {
				t.Errorf("%v: %v", r, err)
			}
			return
		}
		var got []string
		for _, c := range response.GetContainerResponses() {
			got = append(got, c.GetEnvs()[inventory.VisibleDevices])
		}
		if len(bad) > 0 || tooMany || !slices.Equal(got, want) {
			t.Errorf("%v: %q; want %q; not to be allocated: %q, more than allowed: %t", r, got, want, bad, tooMany)
		}
	})
}

// What the check of a reservation finds is logged; its error fails the Allocate, which is not recorded.
func TestAllocateChecks(t *testing.T) {
	s := newTestServer(kubeadapter.GPUResource, gpus(4))
	var log bytes.Buffer
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	reserved := 0
	s.opts.Reserved = func([]gpu.Device) { reserved++ }
	s.opts.Check = func(units []inventory.Unit) ([]inventory.Finding, error) {
		processes := []gpu.Process{{PID: 31, Memory: gpu.OptionalUint64Of(2 << 20)}}
		switch findings := []inventory.Finding{{Device: units[0].Device, Processes: processes}}; units[0].Device.Index {
		case 1:
			return findings, nil
		case 2:
			return nil, &inventory.CheckError{Findings: findings}
		}
		return nil, nil
	}
	const reason = "memory in use by processes without a reservation: pid 31 (2 MiB)"
	for _, c := range []struct {
		containers [][]string
		err, log   string
	}{
		{containers: [][]string{gpuIDs(0)}},
		{[][]string{gpuIDs(1)}, "", `level=WARN msg="device reserved despite the reservation check" id=` + gpuIDs(1)[0] + ` pci=0000:11:00.0 reason="` + reason + `"`},
		{[][]string{gpuIDs(0), gpuIDs(2)}, "reservation check: " + gpuIDs(2)[0] + ": " + reason, `level=WARN msg="reservation refused" error="reservation check: ` + gpuIDs(2)[0] + ": " + reason + `"`},
	} {
		log.Reset()
		_, err := s.Allocate(t.Context(), allocateRequest(c.containers...))
		if got := status.Convert(err); got.Message() != c.err || c.err != "" && got.Code() != codes.FailedPrecondition {
			t.Errorf("%v: %v, want %q", c.containers, err, c.err)
		}
		if _, line, _ := strings.Cut(strings.TrimSpace(log.String()), " "); line != c.log {
			t.Errorf("%v: logged\n%s\nwant\n%s", c.containers, line, c.log)
		}
	}
	if n := s.stats(); reserved != 2 || n.Allocations != 2 || n.AllocationErrors != 1 || len(s.tracker.allocations.byKey) != 2 {
		t.Errorf("%d reserved, %+v, %v", reserved, n, s.tracker.allocations.byKey)
	}
}
