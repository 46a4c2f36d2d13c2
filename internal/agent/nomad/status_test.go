package nomad

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tandem-gpu/tandem/internal/nomadadapter"
)

type fixed nomadadapter.Counters

func (f fixed) Counters() nomadadapter.Counters { return nomadadapter.Counters(f) }

// The plugin is ready from the first fingerprint on. One without devices is a node that has nothing to offer.
func TestReady(t *testing.T) {
	for name, c := range map[string]struct {
		plugin fixed
		text   string
		idle   bool
		err    error
	}{
		"no fingerprint":  {fixed{}, "", false, errNoFingerprint},
		"without devices": {fixed{FingerprintResponses: 1}, "no device in the latest fingerprint; inspect names the reasons", true, nil},
		"with devices":    {fixed{FingerprintResponses: 2, Groups: []string{"nvidia/gpu/A (1)", "nvidia/gpu/B (2)"}}, "fingerprint sent to Nomad: nvidia/gpu/A (1), nvidia/gpu/B (2)", false, nil},
	} {
		text, idle, err := view{plugin: c.plugin}.Ready()
		if text != c.text || idle != c.idle || !errors.Is(err, c.err) {
			t.Errorf("%s: %q %v %v", name, text, idle, err)
		}
	}
}

func TestCollect(t *testing.T) {
	durations := newDurations()
	durations.Observe("Reserve", 2*time.Millisecond)
	registry, w := prometheus.NewPedanticRegistry(), httptest.NewRecorder()
	if err := registry.Register(view{fixed{
		FingerprintResponses: 1, StatsResponses: 2, Reservations: 3, ReservationErrors: 4, Groups: make([]string, 5),
	}, durations}); err != nil {
		t.Fatal(err)
	}
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	text := w.Body.String()
	for _, line := range []string{
		"tandem_fingerprint_responses_total 1", "tandem_stats_responses_total 2", "tandem_reservations_total 3", "tandem_reservation_errors_total 4",
		"tandem_device_groups 5", `tandem_request_duration_seconds_sum{method="Reserve"} 0.002`, `tandem_request_duration_seconds_bucket{method="Reserve",le="0.001"} 0`,
		`tandem_request_duration_seconds_bucket{method="Reserve",le="0.0025"} 1`, `tandem_request_duration_seconds_bucket{method="Reserve",le="+Inf"} 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no line %s in\n%s", line, text)
		}
	}
	if all := Metrics(); len(all) != strings.Count(text, "# TYPE ") {
		t.Errorf("%d metrics are described", len(all))
	}
}
