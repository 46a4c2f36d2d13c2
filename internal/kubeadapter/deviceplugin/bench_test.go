package deviceplugin

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// onHosts runs a benchmark on each node, with the device IDs of the resource that has the most.
func onHosts(b *testing.B, run func(b *testing.B, s *server, ids []string)) {
	for _, h := range coretest.Hosts() {
		b.Run(fmt.Sprintf("units=%d", h.Units), func(b *testing.B) {
			b.ReportAllocs()
			inv := h.Allocatable()
			resource, ids := "", []string(nil)
			for name, list := range listDevices(inv) {
				if len(list) > len(ids) {
					resource, ids = name, nil
					for _, d := range list {
						ids = append(ids, string(d.id))
					}
				}
			}
			s := newTestServer(resource, inv)
			s.tracker.setInventory(inv)
			run(b, s, ids)
		})
	}
}

func allocate(b *testing.B, s *server, ids []string) {
	if _, err := s.Allocate(b.Context(), allocateRequest(ids)); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkAllocate allocates without the socket: "one" one unit, while pods hold all others; "eighth" an eighth of all units for one
// container.
func BenchmarkAllocate(b *testing.B) {
	b.Run("one", func(b *testing.B) {
		onHosts(b, func(b *testing.B, s *server, ids []string) {
			for _, id := range ids {
				allocate(b, s, []string{id})
			}
			for i := 0; b.Loop(); i++ {
				allocate(b, s, ids[i%len(ids):][:1])
			}
		})
	})
	b.Run("eighth", func(b *testing.B) {
		onHosts(b, func(b *testing.B, s *server, ids []string) {
			for b.Loop() {
				allocate(b, s, ids[:len(ids)/8])
			}
		})
	})
}

// BenchmarkPreferredAllocation chooses four of all units, without the socket.
func BenchmarkPreferredAllocation(b *testing.B) {
	onHosts(b, func(b *testing.B, s *server, ids []string) {
		r := &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: ids, AllocationSize: 4},
		}}
		for b.Loop() {
			response, err := s.GetPreferredAllocation(b.Context(), r)
			if err != nil || len(response.GetContainerResponses()[0].GetDeviceIDs()) != 4 {
				b.Fatal(response, err)
			}
		}
	})
}

// BenchmarkOffer measures an update of the inventory on its way to the endpoints: "free" while no pod is known to hold a unit, "held"
// while pods hold all of them.
func BenchmarkOffer(b *testing.B) {
	replace := func(b *testing.B, s *server) {
		inv := s.tracker.source.Current()
		for b.Loop() {
			s.tracker.setInventory(inv)
		}
		if s.tracker.published.Load().dependsOnPods() {
			b.Fatal("units are withheld or retained")
		}
	}
	b.Run("free", func(b *testing.B) {
		onHosts(b, func(b *testing.B, s *server, _ []string) { replace(b, s) })
	})
	b.Run("held", func(b *testing.B) {
		onHosts(b, func(b *testing.B, s *server, ids []string) {
			answer := podresources.Answer{Pods: len(ids)}
			for i, id := range ids {
				allocate(b, s, []string{id})
				answer.Devices = append(answer.Devices, podresources.Device{Resource: s.resource, ID: id, Pod: fmt.Sprintf("default/pod-%d", i)})
			}
			now := time.Now()
			s.tracker.apply(podresources.Reading{Began: now, Answer: answer, Complete: true, AnsweredAt: now, CompleteAt: now})
			replace(b, s)
		})
	})
}

// BenchmarkList measures the ListAndWatch response of one resource after a change of one device.
func BenchmarkList(b *testing.B) {
	onHosts(b, func(b *testing.B, s *server, ids []string) {
		sent := s.tracker.published.Load().byResource[s.resource]
		next := append([]listedDevice{{id: inventory.UnitID(ids[0]), numaNode: -1}}, sent[1:]...)
		var message []byte
		for b.Loop() {
			list, _ := markRemoved(sent, next)
			var err error
			if message, err = (proto.MarshalOptions{}).MarshalAppend(message[:0], listResponse(list)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(message)), "B/message")
	})
}
