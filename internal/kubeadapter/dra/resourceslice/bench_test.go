package resourceslice_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
)

// BenchmarkDevices computes the devices of the benchmark nodes, each held by a claim, which happens with each change of an inventory and
// with each claim. It also reports their size as JSON and the number of slices.
func BenchmarkDevices(b *testing.B) {
	for _, h := range coretest.Hosts() {
		h.Config.API = inventory.DRA
		for _, separate := range []bool{false, true} {
			b.Run(fmt.Sprintf("units=%d/shares-as-devices=%t", h.Units, separate), func(b *testing.B) {
				in := resourceslice.Input{Allocatable: h.Allocatable(), SharesAsDevices: separate}
				all := resourceslice.Devices(in)
				for _, d := range all { // each is held
					in.Prepared = append(in.Prepared, claim(d.Name, in.Allocatable, d))
				}
				in.BootID = boot
				text, err := json.Marshal(all)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				for b.Loop() {
					all = resourceslice.Devices(in)
				}
				b.ReportMetric(float64(len(all)), "devices")
				b.ReportMetric(float64(len(resourceslice.Chunk(all))), "slices")
				b.ReportMetric(float64(len(text)), "bytes")
			})
		}
	}
}
