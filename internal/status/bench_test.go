package status

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// BenchmarkScrape measures one response of /metrics. A page makes at most one in minInterval, whatever the number of clients.
func BenchmarkScrape(b *testing.B) {
	for _, encoding := range []string{"identity", "gzip"} {
		for _, h := range append([]coretest.Host{{Units: 1, Snapshot: coretest.GPUs(1), Config: coretest.Hosts()[0].Config}}, coretest.Hosts()...) {
			b.Run(fmt.Sprintf("%s/units=%d", encoding, h.Units), func(b *testing.B) {
				b.ReportAllocs()
				handler := promhttp.HandlerFor(read(h.Config, h.Snapshot).server().registry(), promhttp.HandlerOpts{})
				r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
				r.Header.Set("Accept-Encoding", encoding)
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
