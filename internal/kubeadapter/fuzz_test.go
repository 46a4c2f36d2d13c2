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
					return !slices.Contains([]string{"a", "b", "c", "d", "x"}, id)
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
