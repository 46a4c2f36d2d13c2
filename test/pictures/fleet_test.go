package pictures

import (
	"context"
	"log/slog"
	"math"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/chromedp"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/server"
	"github.com/tandem-gpu/tandem/internal/fleet/viewtest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// site is the page of gpu-fleet for views that a test stores.
type site struct {
	*httptest.Server
	view *watch.Value[fleet.View]

	mu   sync.Mutex
	told []string
}

// serveFleet serves the page of a view, with the token "secret". A stop and its end are in the next view.
func serveFleet(t *testing.T, v fleet.View) *site {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(token, []byte("secret\n"), 0o600))
	s := &site{view: watch.NewValue(v)}
	s.Server = httptest.NewServer(server.New(server.Options{
		TokenFile: token, View: s.view, Version: "2.0.0", Log: slog.New(slog.DiscardHandler),
		Stop: func(_ context.Context, by, text string) error {
			s.tell("stop " + by + " " + text)
			v := s.view.Load()
			v.Result.State = v.Result.State.Stopped(by, text, v.At)
			s.view.Store(v)
			return nil
		},
		Resume: func(_ context.Context, by string) error {
			s.tell("resume " + by)
			v := s.view.Load()
			v.Result.State = v.Result.State.Resumed(v.At)
			s.view.Store(v)
			return nil
		},
	}).Handler())
	t.Cleanup(s.Close)
	return s
}

func (s *site) tell(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = append(s.told, what)
}

// TestFleet: what needs a person is first; each table has its rows; nodes that are ready, without a fault or a mark, are not there.
func TestFleet(t *testing.T) {
	p := open(t, serveFleet(t, viewtest.SmallAt(time.Now())).URL, wide)
	p.shows("3 things need a person", "7 nodes · 22 GPUs · 8 out of service · 7 held", "CLUSTER_UNREAD west cluster west can't be read", "STUCK east/east-1 GPU-", "CLUSTER_RIGHTS the token for cluster dc1 has no right operator:read: add it",
		"Clusters (3)", "west kubernetes act 0 0 0 0 7 min ago Get", "Faulty GPUs (9)", "XID_95: reset, for 10 min", "train/llm-0", "XID_63 (GI 1 CI 0): reset", "XID_94 (simulated)",
		"Acts due (2)", "train/llm-0 east/east-0", "list only", "Waits (4)", "a person acts", "Not moved (2)", "NOT_REPLACED", "its controller is \"system\"",
		"Marks due", "Faulty and free (1)", "Nodes (7)", "takes no new work", "marked for reset", "Budget (", "nodes at a time 2 of 3 1 more if listed acts were made", "History (5)", "moved in 11 s", "not-replaced",
		"from gpu-fleet-0, which leads. Ledger: ConfigMap gpu-fleet/gpu-fleet in cluster east.")
	if first := eval[string](p, `document.querySelector("main .alerts .code").textContent`); first != "CLUSTER_UNREAD" {
		t.Errorf("the first alert is %s", first)
	}
	if title := eval[string](p, "document.title"); title != "(3) gpu-fleet" {
		t.Errorf("the title is %q", title)
	}
}

// cpu returns for how many milliseconds the page's thread computes while it makes and lays out the page: the least of some times, which is that of the page,
// and not of what else the computer does.
func (p *tab) cpu() float64 {
	p.Helper()
	least := math.Inf(1)
	for range 5 {
		before := p.busy()
		eval[int](p, `(() => { show(); return document.body.offsetHeight; })()`)
		least = min(least, p.busy()-before)
	}
	return least
}

// busy is for how many milliseconds the page's thread has computed.
func (p *tab) busy() float64 {
	p.Helper()
	r, err := chromedp.Run(p.ctx, chromedp.Action[performance.GetMetricsResult](func(ctx context.Context, t *chromedp.Target) (performance.GetMetricsResult, error) {
		return cdp.Call(ctx, t, performance.GetMetrics, cdp.Empty{})
	}))
	must(p.T, err)
	for _, m := range r.Metrics {
		if m.Name == "TaskDuration" {
			return m.Value * 1000
		}
	}
	p.Fatal("the browser has no TaskDuration")
	return 0
}

// TestFleetOf1000Nodes: 1,000 nodes with 8,000 GPUs, of which 20 have a fault, are shown in less than 200 ms: after a reading, with all nodes, and with a filter.
func TestFleetOf1000Nodes(t *testing.T) {
	p := open(t, serveFleet(t, viewtest.Large(1000, time.Now())).URL, wide)
	p.shows("1000 nodes · 8000 GPUs · 20 out of service", "Nodes (20)", "980 nodes that are ready, without a fault or a mark", "Faulty GPUs (20)")
	must(t, chromedp.Do(p.ctx, send(performance.Enable, performance.EnableParams{TimeDomain: performance.EnableTimeDomainThreadTicks})))
	times := map[string]float64{"brief": p.cpu()}
	if rows := evalAsync[int](p, `(async () => { byID("all").checked = true; await readNow(); return document.querySelectorAll("#nodes tbody tr").length; })()`); rows != 100 {
		t.Errorf("%d rows at first", rows)
	}
	p.shows("Nodes (1000)", "Show 100 more of 900")
	times["all"] = p.cpu()
	if rows := eval[int](p, `(() => { document.querySelector("#nodes .more button").click(); return document.querySelectorAll("#nodes tbody tr").length; })()`); rows != 200 {
		t.Errorf("%d rows after one more step", rows)
	}
	if rows := evalAsync[int](p, `(async () => { byID("filter").value = "job-77-3"; await readNow(); show(); return document.querySelectorAll("#nodes tbody tr").length; })()`); rows != 2 {
		t.Errorf("%d rows with work of that name", rows)
	}
	times["filter"] = p.cpu()
	t.Logf("milliseconds: %v", times)
	for name, ms := range times {
		if ms > 200 {
			t.Errorf("%s took %.0f ms", name, ms)
		}
	}
}

// evalAsync returns what a promise becomes.
func evalAsync[T any](p *tab, expression string) T {
	p.Helper()
	value, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	must(p.T, err)
	return value
}

// TestFleetFilter: the filter finds nodes that the page does not show by default, by the work that they have; what is open stays open, and the focus where it is.
func TestFleetFilter(t *testing.T) {
	s := serveFleet(t, viewtest.Large(100, time.Now()))
	p := open(t, s.URL, wide)
	must(t, chromedp.Do(p.ctx, chromedp.KeyEvent("/")))
	if focus := eval[string](p, `document.activeElement.id`); focus != "filter" {
		t.Errorf("the key / has the focus in %q", focus)
	}
	eval[string](p, `(() => { byID("filter").value = ""; return ""; })()`) // the protocol types the key also if the page has handled it
	must(t, chromedp.Do(p.ctx, chromedp.KeyEvent("dc1 JOB-33-2")))
	await(t, "the node", func() bool { return strings.Contains(p.text(), "Nodes (1)") })
	p.shows("dc1-33 dc1 ready", "serve/job-33-1")
	eval[string](p, `(() => { const s = document.querySelector("#nodes summary"); s.click(); s.focus(); return ""; })()`)
	v := viewtest.Large(100, time.Now())
	v.Identity = "gpu-fleet-1"
	s.view.Store(v)
	await(t, "the next view", func() bool { return strings.Contains(p.text(), "from gpu-fleet-1") })
	if got := eval[string](p, `document.activeElement.parentElement.id + " " + document.querySelectorAll("#nodes details[open] li").length`); got != "node-dc1/dc1-33 8" {
		t.Errorf("focus and GPUs of the open node: %s", got)
	}
	p.shows("research/job-33-2, running")
}

// TestFleetOrders: a person stops acts with name, text and token, and resumes them. A wrong token is reported, and stops nothing.
func TestFleetOrders(t *testing.T) {
	s := serveFleet(t, viewtest.SmallAt(time.Now()))
	p := open(t, s.URL, wide)
	p.expect = func(message string) bool { return strings.Contains(message, "401") }
	order := func(by, text, token string) {
		t.Helper()
		eval[string](p, `(() => {
		  if (!byID("dialog").open) byID("order").click();
		  byID("by").value = "`+by+`"; byID("text").value = "`+text+`"; byID("token").value = "`+token+`";
		  byID("send").click();
		  return "";
		})()`)
	}
	order("ada", "driver rollout", "wrong")
	await(t, "the refusal", func() bool {
		return strings.Contains(eval[string](p, `byID("dialog-error").textContent`), "missing or wrong")
	})
	order("ada", "driver rollout", "secret")
	answered := func() bool { return eval[bool](p, `!byID("dialog").open && !byID("send").disabled`) } // the page may read the next view by itself before
	await(t, "the stop", func() bool { return strings.Contains(p.text(), "All acts are stopped") && answered() })
	p.shows("STOPPED all acts are stopped by ada: driver rollout, since", "remove the cause, then run gpu-fleet resume", "Resume acts…")
	if left := eval[string](p, `byID("token").value + byID("dialog").open`); left != "false" {
		t.Errorf("the token stays in the page, or the dialog open: %q", left)
	}
	order("ada", "", "secret")
	await(t, "the end of the stop", func() bool { return strings.Contains(p.text(), "Stop all acts…") })
	if want := []string{"stop ada driver rollout", "resume ada"}; !slices.Equal(s.told, want) {
		t.Errorf("told %q, want %q", s.told, want)
	}
}

// TestFleetPlan: the plan of a mode is read when it is opened.
func TestFleetPlan(t *testing.T) {
	p := open(t, serveFleet(t, viewtest.SmallAt(time.Now())).URL, wide)
	eval[string](p, `(() => { byID("plan-details").open = true; return ""; })()`)
	await(t, "the plan", func() bool {
		return strings.Contains(eval[string](p, `byID("plan-result").innerText`), "default/web[0]")
	})
	p.shows("Would move now (1)", "Would mark now")
}

// TestFleetViews checks that the page is legible in each view; with -update it takes the screenshots.
func TestFleetViews(t *testing.T) {
	url := serveFleet(t, viewtest.SmallAt(time.Now())).URL
	for name, v := range views {
		t.Run(name, func(t *testing.T) {
			if !v.phone {
				v.height = 1250
			}
			p := open(t, url, v)
			if overflow := eval[int](p, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); overflow > 0 {
				t.Errorf("the page is %d pixels wider than the screen", overflow)
			}
			if faint := eval[[]string](p, faintText); len(faint) > 0 {
				t.Errorf("text with a contrast below 4.5 (WCAG 2.1, 1.4.3): %q", faint)
			}
			if *goldenfile.Update && !v.phone {
				top, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot()) // what is on the screen
				must(t, err)
				savePicture(t, "../../docs/images/fleet-"+name+".png", top)
			}
		})
	}
}

// TestFleetAccessibility checks what a screen reader gets: headers, names of regions and fields, announcements.
func TestFleetAccessibility(t *testing.T) {
	p := open(t, serveFleet(t, viewtest.SmallAt(time.Now())).URL, wide)
	for expression, want := range map[string]int{
		`document.querySelectorAll("h1").length`: 1,
		`document.querySelectorAll("table").length - document.querySelectorAll(".wide[role=region][aria-label][tabindex='0'] > table").length`: 0,
		`[...document.querySelectorAll("tbody tr")].filter((r) => r.querySelectorAll(":scope > th[scope=row]").length !== 1).length`:           0,
		`[...document.querySelectorAll("thead th")].filter((c) => c.scope !== "col").length`:                                                   0,
		`[...document.querySelectorAll("input, select")].filter((e) => !e.labels.length).length`:                                               0,
		`document.querySelectorAll("#verdict[aria-live=polite] .verdict").length`:                                                              1,
		`document.querySelectorAll("dialog[aria-labelledby=dialog-title]").length`:                                                             1,
		`[...document.querySelectorAll("[id]")].length - new Set([...document.querySelectorAll("[id]")].map((e) => e.id)).size`:                0,
		`[...document.querySelectorAll("meter, .gpus")].filter((e) => !e.getAttribute("aria-label")).length`:                                   0,
	} {
		if got := eval[int](p, expression); got != want {
			t.Errorf("%s is %d, want %d", expression, got, want)
		}
	}
	labels := eval[[]string](p, `[...document.querySelectorAll("#nodes .gpus")].map((e) => e.getAttribute("aria-label"))`)
	if !slices.Contains(labels, "3 healthy, 1 unhealthy") {
		t.Errorf("GPUs of nodes are called %q", labels)
	}
}

// TestFleetHostileNames: names of clusters, nodes, work and answers are text.
func TestFleetHostileNames(t *testing.T) {
	v := viewtest.SmallAt(time.Now())
	c := &v.Clusters[0].Cluster
	c.Problem, c.Nodes[0].Name, c.Work[0].Name, c.Work[0].Node = hostile, hostile, hostile, hostile
	c.Nodes[0].Faults[0].Cause, v.Result.Waits[0].Text, v.Store = hostile, hostile, hostile
	v.Result.State.Ledger.Rescues[0].Node, v.Result.Acts[0].Name = hostile, hostile
	p := open(t, serveFleet(t, v).URL, wide)
	p.shows("window.ran=1", "</script>")
	if eval[bool](p, `window.ran !== undefined || document.images.length > 0 || document.scripts.length !== 1`) {
		t.Error("a name became HTML")
	}
}

// TestFleetIsSilent: when the server does not answer, or decides nothing any more, the page shows that and keeps its content.
func TestFleetIsSilent(t *testing.T) {
	open(t, serveFleet(t, viewtest.SmallAt(time.Now().Add(-10*time.Minute))).URL, wide).shows("✖ No decision for 10 min: what is below is old")
	s := serveFleet(t, viewtest.SmallAt(time.Now()))
	p := open(t, s.URL, wide)
	p.expect = func(message string) bool { return strings.Contains(message, "Failed to load resource") }
	s.CloseClientConnections()
	s.Close()
	await(t, "the page to notice", func() bool { return strings.Contains(p.text(), "✖ No answer from gpu-fleet for") })
	p.shows("what is below is old", "Faulty GPUs (9)")
}

// TestFleetWithoutScripts: a browser without scripts has what gpu-fleet status prints.
func TestFleetWithoutScripts(t *testing.T) {
	v := wide
	v.scripts = false
	open(t, serveFleet(t, viewtest.SmallAt(time.Now())).URL, v).shows("NEEDS A PERSON", "FAULTY GPUS", "/fleet.json")
}
