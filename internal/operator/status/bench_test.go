package status

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// divided is a node with 64 GPUs of seven MIG instances each.
func divided() coretest.Host {
	snapshot, cfg := coretest.GPUs(64), core.DefaultConfig()
	for n := range 64 {
		snapshot = coretest.WithMIG(snapshot, n, slices.Repeat([]string{"1g.10gb"}, 7)...)
	}
	cfg.MIG = inventory.MIGMixed
	return coretest.Host{Units: 448, Snapshot: snapshot, Config: cfg}
}

// inUse is the agent of a node whose devices all report everything and have an owner and a process each; MIG instances report what
// NVIDIA's driver reports of them.
func inUse(h coretest.Host) fixedAgent {
	a := read(h.Config, h.Snapshot)
	a.use = use.Table{At: time.Unix(100, 0), HoldersKnown: true}
	for u := range a.state.Allocatable.Devices() {
		id := u.Device.ID
		usage := everything(id)
		if u.Device.Profile != "" {
			usage = gpu.Usage{Device: id, At: usage.At, Temperature: usage.Temperature, MemoryUsed: usage.MemoryUsed, MemoryTotal: usage.MemoryTotal,
				BAR1Used: usage.BAR1Used, BAR1Total: usage.BAR1Total}
		}
		owner := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: "train-0", Container: "main", ID: "2b0ff2a8-6b0c-4e0a-9f6d-3f6f0e0f0f0f"}
		a.use.Devices = append(a.use.Devices, use.Device{
			ID: id, Usage: usage, Holders: []holders.Holder{{Work: owner, Device: id}}, Processes: []use.Process{{}}, HeldSince: time.Unix(1, 0),
		})
	}
	for i := range 30 {
		a.calls = append(a.calls, gpu.CallCount{Function: fmt.Sprintf("nvmlDeviceGetSomething%d", i), Calls: 1e5, Time: time.Second})
	}
	return a
}

// measure measures one response of a page.
func measure(b *testing.B, page http.Handler) {
	b.ReportAllocs()
	r, size := httptest.NewRequest(http.MethodGet, "/", nil), 0
	for b.Loop() {
		w := httptest.NewRecorder()
		page.ServeHTTP(w, r)
		size = w.Body.Len()
	}
	b.ReportMetric(float64(size), "B/page")
}

// BenchmarkScrape measures one response of /metrics, on a node where every device is in use. A page makes at most one in minInterval,
// whatever the number of clients.
func BenchmarkScrape(b *testing.B) {
	one := coretest.Host{Units: 1, Snapshot: coretest.GPUs(1), Config: coretest.Hosts()[0].Config}
	for _, encoding := range []string{"identity", "gzip"} {
		for _, h := range slices.Concat([]coretest.Host{one}, coretest.Hosts(), []coretest.Host{divided()}) {
			b.Run(fmt.Sprintf("%s/units=%d", encoding, h.Units), func(b *testing.B) {
				handler := inUse(h).server().metrics()
				if encoding == "gzip" {
					handler = compressed(handler)
				}
				measure(b, handler)
			})
		}
	}
}

// BenchmarkInventoryPage measures one response of /inventory.
func BenchmarkInventoryPage(b *testing.B) {
	for _, h := range coretest.Hosts() {
		b.Run(fmt.Sprintf("units=%d", h.Units), func(b *testing.B) {
			measure(b, http.HandlerFunc(read(h.Config, h.Snapshot).server().inventory))
		})
	}
}
