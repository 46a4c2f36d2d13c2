package kubeadapter

import (
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// largest are the largest nodes that are supported: a resource and its number of units.
var largest = []struct {
	name     string
	resource string
	units    int
	make     func(lost ...int) *inventory.Inventory
}{
	{"16GPUsBy100", GPUResource, 1600, func(lost ...int) *inventory.Inventory {
		return buildInventory(coretest.GPUs(16), shared(inventory.TimeSlicing, 100), lost...)
	}},
	{"16GPUsBy7InstancesBy10", "nvidia.com/mig-1g.10gb", 1120, func(lost ...int) *inventory.Inventory {
		c := shared(inventory.TimeSlicing, 10)
		c.MIG = inventory.MIGMixed
		return buildInventory(cutInSeven(16), c, lost...)
	}},
	{"16GPUsBy7Instances", "nvidia.com/mig-1g.10gb", 112, func(lost ...int) *inventory.Inventory {
		return buildInventory(cutInSeven(16), mixedConfig(), lost...)
	}},
}

// shared shares each device among replicas units of the same resource.
func shared(mode inventory.SharingMode, replicas int) core.Config {
	c := core.DefaultConfig()
	for _, pool := range []string{inventory.DefaultPool, inventory.MIGPool("1g.10gb")} {
		c.Policy.Shares = append(c.Policy.Shares, inventory.Share{
			Pool: pool, Sharing: inventory.Sharing{Mode: mode, Replicas: replicas, OnePerRequest: mode == inventory.MPS},
		})
	}
	return c
}

// renamedShares shares each GPU among replicas units of nvidia.com/gpu.shared.
func renamedShares(replicas int) core.Config {
	c := shared(inventory.TimeSlicing, replicas)
	c.Policy.Shares[0].Rename = "gpu.shared"
	return c
}

// cutInSeven returns n GPUs with seven MIG instances each.
func cutInSeven(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	for i := range n {
		s.Devices[i].MIG = true
		for j := range 7 {
			at := gpu.WholeGPU(coretest.GPU(i))
			at.GI, at.CI = uint32(7+j), 0
			s.Devices = append(s.Devices, gpu.Device{
				ID: gpu.DeviceID(fmt.Sprintf("MIG-00000000-0000-4000-8000-%06d%06d", i, j)), At: at, Index: i, Instance: j,
				Profile: "1g.10gb", Minor: i, GICap: 10 + i*16 + j, CICap: 500 + i*16 + j, NUMANode: i * 2 / n,
			})
		}
	}
	return gpu.NewSnapshot(s)
}

// A response may have 4 MiB, the limit of the kubelet's gRPC client (the default of grpc for a received message).
func TestLargestListsFitAMessage(t *testing.T) {
	for _, node := range largest {
		list := listDevices(node.make())[node.resource]
		size := proto.Size(listResponse(list))
		t.Logf("%s: %d units, %d bytes", node.name, len(list), size)
		if len(list) != node.units || size > 4<<20/8 {
			t.Errorf("%s: %d units, want %d; %d bytes", node.name, len(list), node.units, size)
		}
		for _, l := range list {
			if len(l.id) > 63 {
				t.Errorf("%s is longer than the kubelet's API allows", l.id)
			}
		}
	}
}

// All units of the largest nodes are listed, and those of a lost GPU become unhealthy in one response.
func TestLargestNodesAreServed(t *testing.T) {
	for _, node := range largest {
		t.Run(node.name, func(t *testing.T) {
			r := startRig(t, node.make())
			r.awaitHealthy(node.resource, node.units)
			r.src.Set(node.make(5))
			r.awaitHealthy(node.resource, node.units/16*15)
			if n := len(r.kubelet.Lists(node.resource)); n != 2 {
				t.Errorf("%d lists, want 2", n)
			}
		})
	}
}

// BenchmarkAllocate allocates a quarter of the units, without the socket.
func BenchmarkAllocate(b *testing.B) {
	for _, units := range []int{8, 64} {
		b.Run(fmt.Sprintf("units=%d", units), func(b *testing.B) {
			s := newTestServer(GPUResource, buildInventory(coretest.GPUs(units), core.DefaultConfig()))
			r := allocateRequest(firstIDs(units / 4))
			for b.Loop() {
				if _, err := s.Allocate(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLargeUpdate measures a change of one unit: the lists of all resources, and the response of the one that changed.
func BenchmarkLargeUpdate(b *testing.B) {
	for _, node := range largest {
		b.Run(node.name, func(b *testing.B) {
			inv := node.make()
			sent := listDevices(inv)[node.resource]
			b.ReportAllocs()
			for b.Loop() {
				list, _ := markRemoved(sent, listDevices(inv)[node.resource])
				if _, err := proto.Marshal(listResponse(list)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLargeAllocate allocates an eighth of all units.
func BenchmarkLargeAllocate(b *testing.B) {
	for _, node := range largest {
		b.Run(node.name, func(b *testing.B) {
			s, ids := largeServer(node.make(), node.resource)
			r := allocateRequest(ids[:len(ids)/8])
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Allocate(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLargePreference prefers 1, 8 and half of all units.
func BenchmarkLargePreference(b *testing.B) {
	for _, node := range largest {
		for _, n := range []int{1, 8, node.units / 2} {
			b.Run(fmt.Sprintf("%s/%d", node.name, n), func(b *testing.B) {
				s, ids := largeServer(node.make(), node.resource)
				r := preferRequest(ids, nil, n)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := s.GetPreferredAllocation(b.Context(), r); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func largeServer(inv *inventory.Inventory, resource string) (*server, []string) {
	var ids []string
	for _, l := range listDevices(inv)[resource] {
		ids = append(ids, string(l.id))
	}
	return newTestServer(resource, inv), ids
}

// BenchmarkLargeMemory measures the memory of a unit in the inventory and in the lists.
func BenchmarkLargeMemory(b *testing.B) {
	for _, node := range largest {
		b.Run(node.name, func(b *testing.B) {
			var inventories, lists float64
			for b.Loop() {
				before := heap()
				inv := node.make()
				built := heap()
				list := listDevices(inv)
				inventories, lists = float64(built-before), float64(heap()-built)
				runtime.KeepAlive(inv)
				runtime.KeepAlive(list)
			}
			b.ReportMetric(inventories/float64(node.units), "B/unit-inventory")
			b.ReportMetric(lists/float64(node.units), "B/unit-list")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// heap returns the bytes in use after a garbage collection.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
