package kubeadapter

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// fewUnits returns a server of units with names that a fuzzer finds: a to d are healthy, x is lost.
func fewUnits() *server {
	s := gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}}
	for i, id := range []gpu.DeviceID{"a", "b", "c", "d", "x"} {
		s.Devices = append(s.Devices, gpu.Device{ID: id, At: gpu.WholeGPU(id), Index: i, NUMANode: i % 2, Minor: i})
	}
	s.Links = []gpu.Link{{A: "a", B: "d", Path: gpu.PathBoard, NVLinks: 4}}
	cfg := core.DefaultConfig()
	l := health.Ledger{}.Apply(cfg.Health, time.Unix(0, 0), health.Observation{At: gpu.WholeGPU("x"), Kind: health.Lost})
	return newTestServer(GPUResource, core.Build(gpu.NewSnapshot(s), l, cfg))
}

// wire returns the encoding of a message.
func wire(f *testing.F, m proto.Message) []byte {
	f.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	return raw
}

// Either each container gets the devices of its request and no others, or the error names one that can't be allocated.
func FuzzAllocate(f *testing.F) {
	for _, containers := range [][][]string{{}, {{}}, {{"a"}}, {{"d", "a", "a"}, {"a"}}, {{"x"}}, {{"unknown"}, {"b"}}, {{""}}, {{"a,b"}}} {
		r := &v1beta1.AllocateRequest{}
		for _, ids := range containers {
			r.ContainerRequests = append(r.ContainerRequests, &v1beta1.ContainerAllocateRequest{DevicesIds: ids})
		}
		f.Add(wire(f, r))
	}
	s := fewUnits()
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &v1beta1.AllocateRequest{}
		if proto.Unmarshal(raw, r) != nil {
			return // refused by gRPC
		}
		can := func(id string) bool {
			u, ok := s.tracker.offers.Load().inventory.Unit(inventory.UnitID(id))
			return ok && u.Health.Schedulable()
		}
		response, err := s.Allocate(t.Context(), r)
		if err != nil {
			for _, c := range r.GetContainerRequests() {
				for _, id := range c.GetDevicesIds() {
					if !can(id) && strings.Contains(status.Convert(err).Message(), id) {
						return
					}
				}
			}
			t.Fatalf("%v: %v", r, err)
		}
		if len(response.GetContainerResponses()) != len(r.GetContainerRequests()) {
			t.Fatalf("%d responses to %v", len(response.GetContainerResponses()), r)
		}
		for i, c := range r.GetContainerRequests() {
			want := slices.Compact(slices.Sorted(slices.Values(c.GetDevicesIds())))
			got := strings.FieldsFunc(response.GetContainerResponses()[i].GetEnvs()[inventory.VisibleDevices], func(r rune) bool { return r == ',' })
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("%v: container %d got %v", r, i, got)
			}
			for _, id := range want {
				if !can(id) {
					t.Errorf("%v: %s is allocated", r, id)
				}
			}
		}
	})
}

// a has three units, b has three with one per request, and c is not shared. A container sees each GPU once, in order, or there
// is an error.
func FuzzAllocateShares(f *testing.F) {
	for _, ids := range [][]string{{"a::2", "a::0"}, {"b::1"}, {"b::0", "b::1"}, {"c", "a::1"}, {"c", "b::2"}, {"a::3"}, {"a"}, {"a::"}, {"::0"}} {
		f.Add(wire(f, allocateRequest(ids)))
	}
	machine := gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}}
	for i, id := range []gpu.DeviceID{"a", "b", "c"} {
		machine.Devices = append(machine.Devices, gpu.Device{ID: id, At: gpu.WholeGPU(id), Index: i, Minor: i})
	}
	cfg := core.DefaultConfig()
	for _, id := range []gpu.DeviceID{"a", "b"} {
		cfg.Policy.Rules = append(cfg.Policy.Rules, inventory.Rule{
			Pool: inventory.DefaultPool, Select: inventory.Selector{IDs: []gpu.DeviceID{id}},
			Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, OnePerRequest: id == "b"},
		})
	}
	s := newTestServer(GPUResource, core.Build(gpu.NewSnapshot(machine), health.Ledger{}, cfg))
	all := []string{"a::0", "a::1", "a::2", "b::0", "b::1", "b::2", "c"}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &v1beta1.AllocateRequest{}
		if proto.Unmarshal(raw, r) != nil {
			return
		}
		response, err := s.Allocate(t.Context(), r)
		refused := false
		for i, c := range r.GetContainerRequests() {
			ids := slices.Compact(slices.Sorted(slices.Values(c.GetDevicesIds())))
			bad := slices.ContainsFunc(ids, func(id string) bool { return !slices.Contains(all, id) })
			one := slices.ContainsFunc(ids, func(id string) bool { return strings.HasPrefix(id, "b::") })
			if bad || one && len(ids) > 1 {
				refused = true
			} else if err == nil {
				var want []string
				for _, id := range ids {
					want = append(want, id[:1])
				}
				got := response.GetContainerResponses()[i].GetEnvs()[inventory.VisibleDevices]
				if got != strings.Join(slices.Compact(want), ",") {
					t.Errorf("%v sees %q", ids, got)
				}
			}
		}
		if refused != (err != nil) {
			t.Errorf("%v: %v", r, err)
		}
	})
}

// Each container gets as many of the available units as requested, the required ones first, and no unknown ones.
func FuzzPreferredAllocation(f *testing.F) {
	for _, c := range []*v1beta1.ContainerPreferredAllocationRequest{
		{},
		{AvailableDeviceIDs: []string{"a", "b", "c", "d", "x"}, AllocationSize: 2},
		{AvailableDeviceIDs: []string{"b", "d"}, MustIncludeDeviceIDs: []string{"d"}, AllocationSize: 1},
		{AvailableDeviceIDs: []string{"a", "a", "unknown"}, MustIncludeDeviceIDs: []string{"unknown", "c"}, AllocationSize: 9},
		{AvailableDeviceIDs: []string{"a"}, AllocationSize: -1},
		{AvailableDeviceIDs: []string{"a", "b"}, MustIncludeDeviceIDs: []string{"a", "b"}, AllocationSize: 1},
	} {
		f.Add(wire(f, &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{c, c}}))
	}
	s := fewUnits()
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := &v1beta1.PreferredAllocationRequest{}
		if proto.Unmarshal(raw, r) != nil {
			return
		}
		response, err := s.GetPreferredAllocation(t.Context(), r)
		if err != nil || len(response.GetContainerResponses()) != len(r.GetContainerRequests()) {
			t.Fatalf("%v: %v, %v", r, response, err)
		}
		for i, c := range r.GetContainerRequests() {
			got := response.GetContainerResponses()[i].GetDeviceIDs()
			known := func(ids []string) []string {
				return slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(ids))), func(id string) bool {
					_, ok := s.tracker.offers.Load().inventory.Unit(inventory.UnitID(id))
					return !ok
				})
			}
			must := known(c.GetMustIncludeDeviceIDs())
			all := known(slices.Concat(c.GetAvailableDeviceIDs(), must))
			want := max(0, min(int(c.GetAllocationSize()), len(all)))
			if len(got) != want || len(known(got)) != want {
				t.Errorf("%v: got %v, want %d different units", c, got, want)
			}
			for _, id := range got {
				if !slices.Contains(all, id) || want <= len(must) && !slices.Contains(must, id) {
					t.Errorf("%v: %s is not wanted", c, id)
				}
			}
			for _, id := range must {
				if want >= len(must) && !slices.Contains(got, id) {
					t.Errorf("%v: %s is missing in %v", c, id, got)
				}
			}
		}
	})
}
