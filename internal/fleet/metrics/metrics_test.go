package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/fleet/viewtest"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// collector returns a collector of a document that the test changes.
func collector(d *report.Document) *Collector {
	c := New(func() report.Document { return *d }, "2.0.0")
	c.now = func() time.Time { return viewtest.At.Add(30 * time.Second) }
	return c
}

// scrape returns the text that Prometheus reads.
func scrape(t *testing.T, c *Collector) string {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	check.NoError(t, r.Register(c))
	w := httptest.NewRecorder()
	promhttp.HandlerFor(r, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusOK {
		t.Fatal(w.Body)
	}
	return w.Body.String()
}

// All metrics of a fleet with one of each thing, with their help. Prometheus' linter has nothing against them.
func TestGolden(t *testing.T) {
	d := report.Of(viewtest.Small())
	text := scrape(t, collector(&d))
	lines := strings.SplitAfter(text, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "tandem_fleet_build_info{") {
			lines[i] = "tandem_fleet_build_info{...} 1\n"
		}
	}
	goldenfile.Compare(t, "testdata/metrics.txt", strings.Join(lines, ""))
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	check.NoError(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	for _, m := range Metrics() {
		if !strings.Contains(text, "# TYPE "+m.Name+" ") {
			t.Errorf("%s is missing", m.Name)
		}
	}
}

// A replacement is counted once, also if documents have it again, and two that are equal are two.
func TestReplacements(t *testing.T) {
	d := report.Of(viewtest.Small())
	c := collector(&d)
	count := func(want string) {
		t.Helper()
		if text := scrape(t, c); !strings.Contains(text, `tandem_fleet_replacement_seconds_count{cluster="east",from="call"} `+want+"\n") {
			t.Errorf("want %s:\n%s", want, text)
		}
	}
	count("2")
	count("2")
	d.Counts.Replaced = append(d.Counts.Replaced[1:], d.Counts.Replaced[1], report.Replaced{Cluster: "east", CallSeconds: 3})
	count("4")
	d.Counts.Replaced = nil
	count("4")
}

// What stops acts has a label, and both labels are there from the start.
func TestStopped(t *testing.T) {
	for by, want := range map[string]string{"": "0 0", rescue.ByQuorum: "0 1", "ada": "1 0"} {
		d := report.Document{}
		if by != "" {
			d.Stop = &report.Stop{By: by}
		}
		text := scrape(t, collector(&d))
		person, quorum, _ := strings.Cut(want, " ")
		for _, line := range []string{`tandem_fleet_stopped{by="person"} ` + person, `tandem_fleet_stopped{by="quorum"} ` + quorum} {
			if !strings.Contains(text, line+"\n") {
				t.Errorf("by %q: no %s in\n%s", by, line, text)
			}
		}
	}
}

// Causes, which are texts of others, do not make series without limit; neither do nodes, GPUs and work.
func TestSeriesAreBounded(t *testing.T) {
	c := viewtest.Cluster("east", fleet.Kubernetes, rescue.ModeAct, 200, 1, viewtest.At)
	for n := range c.Nodes {
		viewtest.Fault(&c, n, 0, strings.Repeat("x", n+1), health.Unhealthy, health.Reset, viewtest.At)
	}
	d := report.Of(viewtest.View(viewtest.At, rescue.NewLedger(), c))
	if n := strings.Count(scrape(t, collector(&d)), "\n"+faults.Name+"{"); n != maxCauses+1 {
		t.Errorf("%d series of faults", n)
	}
	large := report.Of(viewtest.Large(1000, viewtest.At))
	if n := strings.Count(scrape(t, collector(&large)), "\ntandem_"); n > 200 {
		t.Errorf("%d series of a large fleet", n)
	}
}

// A cluster that is off has nothing but its mode.
func TestOff(t *testing.T) {
	d := report.Of(viewtest.View(viewtest.At, rescue.NewLedger(), fleet.ClusterView{Cluster: rescue.Cluster{Name: "west"}, Kind: fleet.Nomad}))
	text := scrape(t, collector(&d))
	if !strings.Contains(text, `tandem_fleet_cluster_info{cluster="west",kind="nomad",mode="off"} 1`) || strings.Contains(text, `tandem_fleet_cluster_readable{`) {
		t.Error(text)
	}
}
