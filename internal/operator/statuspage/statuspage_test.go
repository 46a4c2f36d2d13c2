package statuspage

import (
	"encoding/json"
	"html"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// clock is a page whose time the test sets.
type clock struct {
	*Page
	at time.Time
}

func newClock(r report.Report) *clock {
	c := &clock{at: time.Now()}
	c.Page = New(Options{
		Agent: "k8s-gpu", Version: "2.0.0", Node: "n1", Report: func() report.Report { return r }, Now: func() time.Time { return c.at },
	})
	return c
}

// reads records a reading of each device some time after the previous one. A device that is named with a "-" did not respond.
func (c *clock) reads(after time.Duration, percent uint64, ids ...string) {
	c.at = c.at.Add(after)
	t := use.Table{At: c.at}
	for _, id := range ids {
		name, silent := strings.CutPrefix(id, "-")
		d := use.Device{ID: gpu.DeviceID(name)}
		if !silent {
			d.Usage = gpu.Usage{
				At: c.at, GPU: gpu.OptionalUint64Of(percent), Power: gpu.OptionalUint64Of(percent * 1000), MemoryUsed: gpu.OptionalUint64Of(percent << 30),
				Temperature: gpu.OptionalUint64Of(percent + 20),
			}
		}
		t.Devices = append(t.Devices, d)
	}
	c.Run(func(yield func(use.Table) bool) { yield(t) })
}

// get returns the history as a client gets it, with a time in it that no test sets.
func (c *clock) get(t *testing.T) (d struct {
	StepSeconds int
	Devices     []struct {
		ID                 string
		UtilizationPercent []*int
		MemoryUsedMiB      []*int
		PowerWatts         []*int
		TemperatureCelsius []*int
	}
}) {
	t.Helper()
	c.at = c.at.Add(maxAge)
	w := httptest.NewRecorder()
	c.Handlers()["GET /history.json"].ServeHTTP(w, httptest.NewRequest("GET", "/history.json", nil))
	if err := json.Unmarshal(w.Body.Bytes(), &d); err != nil {
		t.Fatalf("%v: %s", err, w.Body)
	}
	return d
}

// some are numbers; -1 = null.
func some(numbers ...int) (all []*int) {
	for _, n := range numbers {
		if n < 0 {
			all = append(all, nil)
		} else {
			all = append(all, &n)
		}
	}
	return all
}

// A point is the mean of the readings of its step; steps without a reading have none; a device that came later has none before.
func TestHistory(t *testing.T) {
	c := newClock(report.Report{})
	c.reads(0, 10, "GPU-a")
	c.reads(4*time.Second, 20, "GPU-a")
	c.reads(4*time.Second, 60, "GPU-a")
	c.reads(20*time.Second, 100, "-GPU-a", "GPU-b")
	c.reads(10*time.Second, 40, "GPU-a", "GPU-b")
	d := c.get(t)
	if d.StepSeconds != 10 || len(d.Devices) != 2 {
		t.Fatalf("%+v", d)
	}
	a, b := d.Devices[0], d.Devices[1]
	for _, line := range []struct {
		name      string
		got, want []*int
	}{
		{"a's utilisation", a.UtilizationPercent, some(30, -1, -1, 40)}, {"a's memory", a.MemoryUsedMiB, some(30<<10, -1, -1, 40<<10)},
		{"a's power", a.PowerWatts, some(30, -1, -1, 40)}, {"a's temperature", a.TemperatureCelsius, some(50, -1, -1, 60)},
		{"b's utilisation", b.UtilizationPercent, some(-1, -1, 100, 40)},
	} {
		if diff := cmp.Diff(line.want, line.got); diff != "" {
			t.Errorf("%s (-want, +got):\n%s", line.name, diff)
		}
	}
}

// While nothing uses the devices, a reading is due every 15 s: that leaves no gap. A reading that failed does.
func TestHistoryOfIdleDevices(t *testing.T) {
	c := newClock(report.Report{})
	for percent := range 5 {
		c.reads(15100*time.Millisecond, uint64(percent), "GPU-a")
	}
	c.reads(8*time.Second, 0, "-GPU-a")
	c.reads(8*time.Second, 7, "GPU-a")
	c.reads(30*time.Second, 8, "GPU-a")
	want := some(-1, 0, 0, 1, 2, 2, 3, 4, -1, 7, -1, -1, 8)
	if diff := cmp.Diff(want, c.get(t).Devices[0].UtilizationPercent); diff != "" {
		t.Errorf("(-want, +got):\n%s", diff)
	}
}

// The history covers an hour, in memory that does not grow. A device that is gone is in it for as long.
func TestHistoryIsAnHour(t *testing.T) {
	c := newClock(report.Report{})
	c.reads(0, 1, "GPU-a", "GPU-gone")
	for range 2*points - 1 {
		c.reads(step, 2, "GPU-a")
	}
	d := c.get(t)
	if len(d.Devices) != 1 || len(d.Devices[0].UtilizationPercent) != points || *d.Devices[0].UtilizationPercent[0] != 2 {
		t.Errorf("%d devices, %d points", len(d.Devices), len(d.Devices[0].UtilizationPercent))
	}
	c.reads(2*time.Hour, 3, "GPU-a")
	if all := c.get(t).Devices[0].UtilizationPercent; all[points-1] == nil || *all[points-1] != 3 || all[0] != nil || all[points-2] != nil {
		t.Errorf("after two hours without a reading there are others than the latest")
	}
	if size := unsafe.Sizeof(series{}); size > 3000 {
		t.Errorf("%d bytes for each device; docs/monitoring.md promises 3 kB", size)
	}
}

// More devices than there is memory for: those that are gone for the longest time make room.
func TestHistoryOfManyDevices(t *testing.T) {
	c := newClock(report.Report{})
	c.reads(0, 1, "GPU-first")
	var ids []string
	for i := range maxDevices + 5 {
		ids = append(ids, "MIG-"+strings.Repeat("x", i))
	}
	c.reads(step, 1, ids...)
	c.reads(step, 1, "GPU-last")
	d := c.get(t)
	if len(d.Devices) != maxDevices || d.Devices[0].ID != "GPU-last" {
		t.Errorf("%d devices, first %s", len(d.Devices), d.Devices[0].ID)
	}
}

// Values beyond the range of a point are cut off, and not taken for values that were not read.
func TestLargestValues(t *testing.T) {
	c := newClock(report.Report{})
	c.reads(0, 1<<40>>10, "GPU-a")
	a := c.get(t).Devices[0]
	if *a.UtilizationPercent[0] != 254 || *a.PowerWatts[0] != 65534 || *a.TemperatureCelsius[0] != 254 {
		t.Errorf("%d %%, %d W, %d °C", *a.UtilizationPercent[0], *a.PowerWatts[0], *a.TemperatureCelsius[0])
	}
}

// The page without JavaScript has the table of inspect; names that pods and drivers choose are text in it.
func TestDocument(t *testing.T) {
	r := report.Report{Warnings: []string{`<script>alert(1)</script> {{script}} </pre></noscript><img src=x onerror=alert(2)>`}}
	c := newClock(r)
	c.opts.Node = `"><script>alert(3)</script>`
	w := httptest.NewRecorder()
	c.Handlers()["GET /{$}"].ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	body := w.Body.String()
	if strings.Contains(body, "alert(1)</script>") || strings.Contains(body, "<img") || strings.Contains(body, "<script>alert") || strings.Contains(body, "{{agent}}") {
		t.Errorf("the page has a name as HTML, or a mark")
	}
	var table strings.Builder
	if err := r.WriteTable(&table); err != nil || !strings.Contains(html.UnescapeString(body), table.String()) {
		t.Errorf("the page lacks the table of inspect: %v", err)
	}
	if p := w.Header().Get("Content-Security-Policy"); !strings.Contains(p, "default-src 'none'") || strings.Contains(p, "unsafe") {
		t.Errorf("policy %q", p)
	}
}

// However many clients there are, a response is made once a second.
func TestResponsesAreShared(t *testing.T) {
	made := 0
	c := newClock(report.Report{})
	c.opts.Report = func() report.Report { made++; return report.Report{} }
	handler := c.Handlers()["GET /{$}"]
	for range 50 {
		c.at = c.at.Add(maxAge / 10)
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
	}
	if made != 5 {
		t.Errorf("%d responses were made in five seconds", made)
	}
}

// BenchmarkHistory measures /history.json of 64 devices with a full hour.
func BenchmarkHistory(b *testing.B) {
	c := newClock(report.Report{})
	var ids []string
	for i := range 64 {
		ids = append(ids, "GPU-"+strings.Repeat("a", i))
	}
	for range points {
		c.reads(step, 97, ids...)
	}
	b.ReportAllocs()
	size := 0
	for b.Loop() {
		size = len(c.describe())
	}
	b.ReportMetric(float64(size), "B/page")
}
