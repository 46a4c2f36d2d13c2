package status

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// BenchmarkScrape measures one response of /metrics. A page makes at most one in minInterval, whatever the number of clients.
func BenchmarkScrape(b *testing.B) {
	for _, encoding := range []string{"identity", "gzip"} {
		for _, h := range append([]coretest.Host{{Units: 1, Snapshot: coretest.GPUs(1), Config: coretest.Hosts()[0].Config}}, coretest.Hosts()...) {
			b.Run(fmt.Sprintf("%s/units=%d", encoding, h.Units), func(b *testing.B) {
				b.ReportAllocs()
				var handler http.Handler = http.HandlerFunc(read(h.Config, h.Snapshot).server().metrics)
				if encoding == "gzip" {
					handler = compressed(handler)
				}
				r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
				size := 0
				for b.Loop() {
					w := httptest.NewRecorder()
					handler.ServeHTTP(w, r)
					size = w.Body.Len()
				}
				b.ReportMetric(float64(size), "B/page")
			})
		}
	}
}

// BenchmarkInventoryPage measures one response of /inventory.
func BenchmarkInventoryPage(b *testing.B) {
	for _, h := range coretest.Hosts() {
		b.Run(fmt.Sprintf("units=%d", h.Units), func(b *testing.B) {
			b.ReportAllocs()
			s := read(h.Config, h.Snapshot).server()
			size := 0
			for b.Loop() {
				w := httptest.NewRecorder()
				s.inventory(w, nil)
				size = w.Body.Len()
			}
			b.ReportMetric(float64(size), "B/page")
		})
	}
}
