package deviceplugin

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/test/check"
)

// prefer calls GetPreferredAllocation for n of the available units.
func prefer(t *testing.T, inv *inventory.Allocatable, available, required []string, n int) []string {
	t.Helper()
	got, err := newTestServer(kubeadapter.GPUResource, inv).GetPreferredAllocation(t.Context(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, MustIncludeDeviceIDs: required, AllocationSize: int32(n)},
		},
	})
	check.NoError(t, err)
	return got.GetContainerResponses()[0].GetDeviceIDs()
}

// perGPU counts units by the index of their GPU.
func perGPU(units []string, gpus int) []int {
	counts := make([]int, gpus)
	for _, u := range units {
		id, _, _ := strings.Cut(u, "::")
		counts[slices.Index(gpuIDs(0, 1, 2, 3)[:gpus], id)]++
	}
	return counts
}

// A pool of exclusive and shared GPUs, of which the core warns: unused GPUs come first.
func TestPreferredOverMixedUnits(t *testing.T) {
	c := core.DefaultConfig()
	c.Policy.Shares = []inventory.Share{{Pool: inventory.DefaultPool, First: 2, Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
	inv := buildInventory(coretest.GPUs(3), c)
	if len(inv.PolicyWarnings()) != 1 {
		t.Errorf("warnings %q", inv.PolicyWarnings())
	}
	available := gpuIDs(2)
	for n := range 4 {
		available = append(available, replica(0, n))
		if n > 0 {
			available = append(available, replica(1, n))
		}
	}
	for n, want := range [][]int{{0, 0, 0}, {1, 0, 0}, {1, 0, 1}, {1, 1, 1}, {2, 1, 1}} {
		if got := perGPU(prefer(t, inv, available, nil, n), 3); !slices.Equal(got, want) {
			t.Errorf("%d: %v, want %v", n, got, want)
		}
	}
}

// What NVIDIA's k8s-device-plugin v0.20.0 chooses with either policy (rm/allocate.go, greedyAlloc), where that is not random: an independent
// implementation chooses the same in random states, for any order of the request.
func TestPreferredSharesAtRandom(t *testing.T) {
	const gpus, replicas = 4, 6
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		c := shared(replicas)
		c.Packed = random.IntN(2) == 0
		var available, required []string
		for i := range gpus {
			for r := range replicas {
				switch random.IntN(8) {
				case 0, 1, 2, 3:
					available = append(available, replica(i, r))
				case 4:
					available, required = append(available, replica(i, r)), append(required, replica(i, r))
				}
			}
		}
		n := random.IntN(gpus*replicas + 2)
		want := greedy(available, required, n, replicas, c.Packed)
		inv := buildInventory(coretest.GPUs(gpus), c)
		for range 3 {
			random.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
			random.Shuffle(len(required), func(i, j int) { required[i], required[j] = required[j], required[i] })
			if got := prefer(t, inv, available, required, n); !slices.Equal(got, want) {
				t.Fatalf("seed %d: packed %t, %d of %v with %v:\ngot  %v\nwant %v", seed, c.Packed, n, available, required, got, want)
			}
		}
	}
}

// greedy chooses unit by unit from the GPU with the fewest (packed: the most) units taken, of equals the one that
// this request has the fewest of, of equals the first.
func greedy(available, required []string, n, replicas int, packed bool) []string {
	left, set := slices.Sorted(slices.Values(available)), slices.Sorted(slices.Values(required))
	left = slices.DeleteFunc(left, func(u string) bool { return slices.Contains(set, u) })
	set = set[:min(n, len(set))]
	for len(set) < n && len(left) > 0 {
		free, here := perGPU(left, 4), perGPU(set, 4)
		best := slices.MinFunc(left, func(a, b string) int {
			i, j := slices.Index(perGPU([]string{a}, 4), 1), slices.Index(perGPU([]string{b}, 4), 1)
			byTaken := cmp.Compare(replicas-free[i], replicas-free[j])
			if packed {
				byTaken = -byTaken
			}
			return cmp.Or(byTaken, cmp.Compare(here[i], here[j]), cmp.Compare(a, b))
		})
		set, left = append(set, best), slices.DeleteFunc(left, func(u string) bool { return u == best })
	}
	return slices.Sorted(slices.Values(set))
}

// Exclusive MIG instances: of as few GPUs as possible, partly used ones first. GPUs 0 and 1 are on one NUMA node: GPU 2 goes first.
func TestPreferredInstances(t *testing.T) {
	inv := buildInventory(cutInSeven(3), mixedConfig())
	var all []string
	for u := range inv.Units() {
		if u.Device.Index != 0 || u.Device.Instance > 4 { // two of GPU 0 are free
			all = append(all, string(u.ID))
		}
	}
	for n, want := range map[int]string{1: "map[0:1]", 2: "map[0:2]", 7: "map[2:7]", 9: "map[0:2 1:7]"} {
		count := map[int]int{}
		for _, id := range prefer(t, inv, all, nil, n) {
			u, _ := inv.Unit(inventory.UnitID(id))
			count[u.Device.Index]++
		}
		if got := fmt.Sprint(count); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
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
