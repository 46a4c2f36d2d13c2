package kubeadapter

import (
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// largest are the nodes that the project promises to serve: each resource and its units.
var largest = []struct {
	name     string
	resource string
	units    int
	make     func(sick ...int) *core.Inventory
}{
	{"16GPUsBy100", GPUResource, 1600, func(sick ...int) *core.Inventory {
		return buildInventory(coretest.GPUs(16), shared(core.TimeSlicing, 100), sick...)
	}},
	{"16GPUsBy7InstancesBy10", "nvidia.com/mig-1g.10gb", 1120, func(sick ...int) *core.Inventory {
		c := shared(core.TimeSlicing, 10)
		c.MIG = core.MIGMixed
		return buildInventory(cutInSeven(16), c, sick...)
	}},
	{"16GPUsBy7Instances", "nvidia.com/mig-1g.10gb", 112, func(sick ...int) *core.Inventory {
		return buildInventory(cutInSeven(16), mixedConfig(), sick...)
	}},
}

// shared offers every device under its own name, so many times.
func shared(mode core.SharingMode, replicas int) core.Config {
	c := core.DefaultConfig()
	for _, pool := range []string{core.DefaultPool, core.MIGPool("1g.10gb")} {
		c.Policy.Shares = append(c.Policy.Shares, core.Share{
			Pool: pool, Sharing: core.Sharing{Mode: mode, Replicas: replicas, OnePerRequest: mode == core.MPS},
		})
	}
	return c
}

// cutInSeven is n GPUs with seven MIG instances each.
func cutInSeven(n int) core.Snapshot {
	s := coretest.GPUs(n)
	for i := range n {
		s.Devices[i].MIG = true
		for j := range 7 {
			at := core.WholeGPU(coretest.GPU(i))
			at.GI, at.CI = uint32(7+j), 0
			s.Devices = append(s.Devices, core.Device{
				ID: core.DeviceID(fmt.Sprintf("MIG-00000000-0000-4000-8000-%06d%06d", i, j)), At: at, Index: i, Instance: j,
				Profile: "1g.10gb", Minor: i, GICap: 10 + i*16 + j, CICap: 500 + i*16 + j, NUMANode: i * 2 / n,
			})
		}
	}
	return core.NewSnapshot(s)
}

// A list may have 4 MiB: that is what the kubelet's gRPC client takes (grpc's default for a received message).
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

// The largest nodes over the kubelet's sockets: all units are there, those of a lost GPU go as one.
func TestLargestNodesAreServed(t *testing.T) {
	for _, node := range largest {
		t.Run(node.name, func(t *testing.T) {
			r := newRig(t)
			r.startKubelet()
			r.src.Set(node.make())
			r.start()
			r.awaitHealthy(node.resource, node.units)
			r.src.Set(node.make(5))
			r.awaitHealthy(node.resource, node.units/16*15)
			if n := len(r.kubelet.Lists(node.resource)); n != 2 {
				t.Errorf("%d lists, want 2", n)
			}
		})
	}
}

// BenchmarkLargeUpdate is what one change of one unit costs at most: the lists of all resources, and the message of
// the one that changed.
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

// BenchmarkLargeAllocate is a container that asks for an eighth of the units.
func BenchmarkLargeAllocate(b *testing.B) {
	for _, node := range largest {
		b.Run(node.name, func(b *testing.B) {
			s, ids := largeServer(node.make(), node.resource)
			r := &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids[:len(ids)/8]}}}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Allocate(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLargePreference chooses among all units: one as most pods want, and half of them as a bad day has it.
func BenchmarkLargePreference(b *testing.B) {
	for _, node := range largest {
		for _, n := range []int{1, 8, node.units / 2} {
			b.Run(fmt.Sprintf("%s/%d", node.name, n), func(b *testing.B) {
				s, ids := largeServer(node.make(), node.resource)
				r := &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
					{AvailableDeviceIDs: ids, AllocationSize: int32(n)},
				}}
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

func largeServer(inv *core.Inventory, resource string) (*server, []string) {
	var ids []string
	for _, l := range listDevices(inv)[resource] {
		ids = append(ids, string(l.id))
	}
	return newTestServer(resource, inv), ids
}

// BenchmarkLargeMemory is what a unit keeps: in the inventory, and in the adapter's lists.
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

// heap is what is in use after everything else was collected.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
