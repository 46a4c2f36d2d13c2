package nomadadapter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	pb "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/device/proto"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// onHosts runs a benchmark on each node.
func onHosts(b *testing.B, run func(b *testing.B, inv *inventory.Allocatable)) {
	for _, h := range coretest.Hosts() {
		h.Snapshot = withDetails(h.Snapshot)
		b.Run(fmt.Sprintf("units=%d", h.Units), func(b *testing.B) {
			b.ReportAllocs()
			run(b, h.Allocatable())
		})
	}
}

// BenchmarkReserve reserves one unit.
func BenchmarkReserve(b *testing.B) {
	reserve := func(b *testing.B, inv *inventory.Allocatable, call func([]string) error) {
		var ids []string
		for u := range inv.Units() {
			ids = append(ids, string(u.ID))
		}
		for i := 0; b.Loop(); i++ {
			if err := call(ids[i%len(ids):][:1]); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("direct", func(b *testing.B) {
		onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
			s := newFixture(b, inv)
			reserve(b, inv, func(ids []string) error { _, err := s.Reserve(ids); return err })
		})
	})
	b.Run("socket", func(b *testing.B) {
		onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
			p := nomadtest.Serve(b, newFixture(b, inv).Plugin)
			reserve(b, inv, func(ids []string) error { _, err := p.Reserve(ids); return err })
		})
	})
}

// BenchmarkReserveTogether reserves two of eight GPUs over a socket, by injection and number of concurrent callers.
func BenchmarkReserveTogether(b *testing.B) {
	for _, injection := range [][]string{{"variables"}, {"devices"}, {"cdi"}} {
		for _, callers := range []int{1, 4, 16, 64} {
			b.Run(fmt.Sprintf("%s/callers=%d", injection[0], callers), func(b *testing.B) {
				b.ReportAllocs()
				s := newFixture(b, nil)
				s.mustConfigure(b, map[string]any{"injection": injection})
				s.currentRun()
				cfg := s.Started()[0].Core
				cdi := &inventory.CDI{Kind: "nomad.device-plugin.nvidia.com/gpu"}
				for n := range 8 {
					cdi.Defined = append(cdi.Defined, coretest.GPU(n))
				}
				s.Source.Set(core.Build(withDetails(coretest.GPUs(8)), health.Ledger{}, cfg).WithHost(inventory.Host{CDI: cdi}, cfg.Overlap))
				p := nomadtest.Serve(b, s.Plugin)
				var left atomic.Int64
				left.Store(int64(b.N))
				var wg sync.WaitGroup
				b.ResetTimer()
				for n := range callers {
					wg.Go(func() {
						for left.Add(-1) >= 0 {
							if _, err := p.Reserve([]string{gpuID(n % 8), gpuID((n + 1) % 8)}); err != nil {
								b.Error(err)
							}
						}
					})
				}
				wg.Wait()
			})
		}
	}
}

// BenchmarkGroups measures an update of the fingerprint that has no effect, so that nothing is sent.
func BenchmarkGroups(b *testing.B) {
	onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
		given := assignment{by: config.GroupByNVLink}.with(inv)
		for b.Loop() {
			if len(groups(inv, given)) != 1 {
				b.Fatal("not one group")
			}
		}
	})
}

// usages returns the usage of each device.
func usages(inv *inventory.Allocatable) (all []gpu.Usage) {
	for u := range inv.Devices() {
		one := usage(0)
		one.Device, one.At = u.Device.ID, time.Unix(1_800_000_000, 123_456_789)
		all = append(all, one)
	}
	return all
}

// BenchmarkStats measures what one response costs the agent beyond the driver's calls and the socket; Nomad requests one each
// second.
func BenchmarkStats(b *testing.B) {
	onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
		groups, used := &statsGroups{}, usages(inv)
		var e statsEncoder
		var message []byte
		names := &groupNamer{}
		for b.Loop() {
			groups.update(names, inv, config.GroupByNone)
			r, err := e.message(&device.StatsResponse{Groups: groups.stats(used, time.Unix(0, 0))})
			if err != nil {
				b.Fatal(err)
			}
			if message, err = (pb.MarshalOptions{}).MarshalAppend(message[:0], protoadapt.MessageV2Of(r)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(message)), "B/message")
	})
}

// BenchmarkFirstFingerprint opens a stream over a socket and receives the first fingerprint, without decoding it.
func BenchmarkFirstFingerprint(b *testing.B) {
	onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
		conn := nomadtest.Connect(b, newFixture(b, inv).Plugin)
		size := 0
		for b.Loop() {
			ctx, cancel := context.WithCancel(b.Context())
			size = openRaw(ctx, b, conn, "Fingerprint", &proto.FingerprintRequest{})()
			cancel()
		}
		b.ReportMetric(float64(size), "B/message")
	})
}

// BenchmarkStatsOverSocket sends and receives responses without a pause. "sent" does not decode them: that is the cost of the
// agent and of both ends of the socket. "decoded" is that and Nomad's client. "sent by PluginDevice" is with the server of Nomad's
// device.PluginDevice, for comparison.
func BenchmarkStatsOverSocket(b *testing.B) {
	sent := func(option func(device.DevicePlugin) grpc.ServerOption) func(*testing.B, *inventory.Allocatable) {
		return func(b *testing.B, inv *inventory.Allocatable) {
			p := newPacedStats(b, inv, option)
			receive := openRaw(b.Context(), b, nomadtest.Connect(b, p), "Stats", &proto.StatsRequest{CollectionInterval: durationpb.New(time.Hour)})
			size := 0
			for b.Loop() {
				p.send()
				size = receive()
			}
			b.ReportMetric(float64(size), "B/message")
		}
	}
	b.Run("sent", func(b *testing.B) { onHosts(b, sent(encodeOnce)) })
	b.Run("sent by PluginDevice", func(b *testing.B) { onHosts(b, sent(noOption)) })
	b.Run("decoded", func(b *testing.B) {
		onHosts(b, func(b *testing.B, inv *inventory.Allocatable) {
			p := newPacedStats(b, inv, encodeOnce)
			received := openStats(b.Context(), b, nomadtest.Serve(b, p), time.Hour)
			for b.Loop() {
				p.send()
				<-received
			}
		})
	})
}

// pacedStats is a plugin whose responses are requested by the benchmark.
type pacedStats struct {
	sentStats
	groups statsGroups
	usage  []gpu.Usage
}

func newPacedStats(b *testing.B, inv *inventory.Allocatable, option func(device.DevicePlugin) grpc.ServerOption) *pacedStats {
	p := &pacedStats{sentStats: newSentStats(newFixture(b, inv).Plugin, option), usage: usages(inv)}
	p.groups.update(&groupNamer{}, inv, config.GroupByNone)
	return p
}

// send makes and sends a response.
func (p *pacedStats) send() {
	p.responses <- &device.StatsResponse{Groups: p.groups.stats(p.usage, time.Unix(0, 0))}
}

// openRaw opens a stream and returns a function that receives its next message and returns its size, without decoding it.
func openRaw(ctx context.Context, b *testing.B, conn *grpc.ClientConn, method string, request any) (receive func() (size int)) {
	b.Helper()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true},
		"/hashicorp.nomad.plugins.device.DevicePlugin/"+method, grpc.ForceCodecV2(sizeCodec{encoding.GetCodecV2("proto")}))
	if err == nil {
		err = stream.SendMsg(request)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil {
		b.Fatal(err)
	}
	return func() (size int) {
		if err := stream.RecvMsg(&size); err != nil {
			b.Fatal(err)
		}
		return size
	}
}

// sizeCodec decodes a message as its size.
type sizeCodec struct{ encoding.CodecV2 }

func (sizeCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*int) = data.Len()
	return nil
}
