package nomadadapter

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func BenchmarkReserve(b *testing.B) {
	for _, n := range []int{8, 64} {
		s := newFixture(b, nodeInventory(coretest.GPUs(n)))
		remote := nomadtest.Serve(b, s.Plugin)
		for _, bm := range []struct {
			name string
			call func([]string) error
		}{
			{"direct", func(ids []string) error { _, err := s.Reserve(ids); return err }},
			{"socket", func(ids []string) error { _, err := remote.Reserve(ids); return err }},
		} {
			b.Run(fmt.Sprintf("units=%d/%s", n, bm.name), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if err := bm.call([]string{gpuID(i % n)}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// benchInventories returns inventories by their number of units.
func benchInventories() map[int]*inventory.Inventory {
	return map[int]*inventory.Inventory{8: nodeInventory(coretest.GPUs(8)), 64: nodeInventory(coretest.GPUs(64)), 1120: sharedInstances(10), 1600: sharedGPUs(16, 100)}
}

// BenchmarkGroups measures an update of the fingerprint.
func BenchmarkGroups(b *testing.B) {
	all := benchInventories()
	for _, n := range slices.Sorted(maps.Keys(all)) {
		for _, by := range []config.GroupBy{config.GroupByNone, config.GroupByNVLink} {
			inv := all[n]
			given := assignment{by: by}.with(inv)
			b.Run(fmt.Sprintf("units=%d/by=%s", n, by), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if len(groups(inv, given)) != 1 {
						b.Fatal("not one group")
					}
				}
			})
		}
	}
}

// BenchmarkStats measures one response; Nomad requests one per second.
func BenchmarkStats(b *testing.B) {
	all := benchInventories()
	for _, n := range slices.Sorted(maps.Keys(all)) {
		inv := all[n]
		_, all := assignment{}.groups(inv)
		var used []gpu.Usage
		for u := range inv.Units() {
			one := usage(0)
			if one.Device = u.Device.ID; used == nil || used[len(used)-1].Device != one.Device {
				used = append(used, one)
			}
		}
		b.Run(fmt.Sprintf("units=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if len(groupStats(all, used, time.Unix(0, 0))) != 1 {
					b.Fatal("not one group")
				}
			}
		})
	}
}

// BenchmarkStreams measures both over gRPC and a socket.
func BenchmarkStreams(b *testing.B) {
	for _, n := range []int{8, 1600} {
		p := nomadtest.Serve(b, newFixture(b, benchInventories()[n]).Plugin)
		for name, receive := range map[string]func(context.Context){
			"fingerprint": func(ctx context.Context) { <-fingerprints(ctx, b, p) },
			"stats":       func(ctx context.Context) { <-openStats(ctx, b, p, time.Hour) },
		} {
			b.Run(fmt.Sprintf("units=%d/%s", n, name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					ctx, cancel := context.WithCancel(b.Context())
					receive(ctx)
					cancel()
				}
			})
		}
	}
}
