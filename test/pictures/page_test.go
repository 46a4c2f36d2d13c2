package pictures

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// TestPageOfAnAgent looks at the page of a k8s-gpu on a simulated machine with eight GPUs: one of them has a fault, two have pods.
func TestPageOfAnAgent(t *testing.T) {
	a := startAgent(t)
	a.pods.Hold("train/llm-0", "nvidia.com/gpu", a.driver.UUID(2), a.driver.UUID(5))
	must(t, a.driver.Set(5, "recovery_action", "1"), a.driver.XID(5, 95))
	await(t, "the fault and the owner", func() bool {
		text, _ := a.get("/inventory")
		return strings.Contains(text, `"XID_95"`) && strings.Contains(text, `"llm-0"`)
	})
	p := open(t, a.url, wide)
	p.shows("1 problem", "8 devices offered · 7 can take work · 1 unhealthy · 2 held", "GPU 5 ✖ unhealthy", "what to do drain and reset the GPU", "to clear k8s-gpu clear --gpu GPU-", "runbook faults.md#xids", "affected train/llm-0/main",
		"NVIDIA H100 80GB HBM3", "driver 570.124.06")
	for i := range 8 {
		if p.shows(fmt.Sprintf("GPU %d", i)); strings.Count(p.text(), "train/llm-0/main") != 3 {
			t.Errorf("the owner is not shown at both of its devices and the problem: %s", p.text())
		}
	}
	await(t, "four charts of each device", func() bool { return eval[int](p, `document.querySelectorAll("svg.line .plot[d^=M]").length`) == 32 })

	must(t, a.driver.Reset(5))
	a.pods.Forget("train/llm-0")
	await(t, "the fault and the owner to end", func() bool {
		text := p.text()
		return strings.Contains(text, "No problem") && !strings.Contains(text, "llm-0")
	})
}

// TestPageOfANodeWithDRA: the page has the slices, why they are not as they should be, and the prepared claims.
func TestPageOfANodeWithDRA(t *testing.T) {
	n := h100x8()
	at := n.now.Add(-time.Hour)
	n.report.DRA = &report.DRA{
		Driver: "gpu.nvidia.com", Node: n.name, Registered: true, APIReachable: true, Slices: 1, Published: 8, Generation: 3, LastWrite: at,
		Problem: "no device takes new work, because containers of this node would get none: containerd 1.6.20 has no CDI",
		Claims:  []report.Claim{{Namespace: "train", Name: "llm", UID: "u1", State: "complete", Since: at, Devices: []report.ClaimDevice{{ID: n.report.Devices[2].ID}}}},
	}
	p := open(t, n.serve(t), wide)
	p.shows("2 problems", "1 ResourceSlice, 1 prepared claim", "ResourceSlices no device takes new work", "containerd 1.6.20 has no CDI", "Dynamic Resource Allocation (3)")
	if lines := eval[[]string](p, `draLines(page.report)`); len(lines) != 3 || !strings.HasPrefix(lines[1], "1 slice with 8 devices, generation 3, last written ") ||
		!strings.HasPrefix(lines[2], "claim train/llm: GPU 2, prepared since ") {
		t.Errorf("details %q", lines)
	}
}

// TestPageOfTwoFaults: a fault that another one of its GPU hides has its own action, and what clears it.
func TestPageOfTwoFaults(t *testing.T) {
	n := h100x8()
	bad := n.report.Devices[7]
	n.report.Conditions = append(n.report.Conditions, report.Condition{
		Placement: string(bad.ID), GPU: bad.ID, Index: 7, Cause: "INFOROM_CORRUPT", State: health.Degraded, Since: bad.Since, LastSeen: bad.Since, Count: 1,
		Action: "run field diagnostics", Clears: "a valid InfoROM",
	})
	p := open(t, n.serve(t), wide)
	p.shows("1 problem", "GPU 7 ✖ unhealthy", "what to do "+bad.Action, "also INFOROM_CORRUPT; what to do: run field diagnostics; cleared by: a valid InfoROM")
}

// TestPageOfProofs: the page has the latest proof of each GPU, one that runs, and what the next one waits for. A summary is text, whatever it is. A GPU that
// is withheld for a proof has no fault.
func TestPageOfProofs(t *testing.T) {
	n := h100x8()
	at, hostile := n.now.Add(-2*time.Hour), `<img src=x onerror="document.title='bad'"> `+strings.Repeat("a_long_word_", 18)
	for i, d := range n.report.Devices {
		p := report.Proof{GPU: d.GPU, Index: i, Result: "passed", At: at, Seconds: 31, Reason: "boot", Summary: "passed: 71.1 GiB of memory",
			Values: map[string]float64{"memory_gbps": 2400.123456, "memory_tested_bytes": 71 << 30},
			Next:   report.Next{WaitsFor: "NOT_DUE", Waits: "its last proof is not old enough", WaitsUntil: n.now.Add(100 * time.Hour)}}
		switch i {
		case 1:
			p.Result, p.Reason, p.Summary, p.NeedsService, p.Waits, p.WaitsUntil = "failed", "reset", hostile, true, "it needs service", time.Time{}
		case 2:
			p = report.Proof{GPU: d.GPU, Index: i, CouldNotRun: 2, Next: report.Next{WaitsFor: "COULD_NOT_RUN", Waits: "the check could not run: exit status 127", WaitsUntil: n.now.Add(6 * time.Hour)}}
		case 6:
			p.Running, p.RunsSince = "idle", n.now.Add(-20*time.Second)
		}
		n.report.Proofs = append(n.report.Proofs, p)
	}
	proving := &n.report.Devices[6]
	proving.State, proving.Cause, proving.Schedulable, proving.Since, proving.Health = health.Unknown, "PROVING", false, n.now, "unknown: withheld for a proof"
	url := n.serve(t)
	for _, v := range []view{wide, views["phone"], views["dark"]} {
		p := open(t, url, v)
		p.shows("1 problem", "Proofs", "GPU 0 ● passed", "2 h ago, after 31 s, reason: boot", "memory_gbps 2400.1 · memory_tested_bytes 71 GiB", "its last proof is not old enough", "in 4 days",
			"✖ failed, needs service", "<img src=x", "it needs service", "no result so far", "could not run 2 times", "in 6 h", "runs", "reason: idle", "? unknown")
		p.isHarmless()
		if level := eval[string](p, `document.querySelectorAll("#devices tbody tr")[6].className + " " + problemsOf(page.report, "k8s-gpu").filter((p) => p.cause === "PROVING").map((p) => p.level)`); level != "info info" {
			t.Errorf("a GPU that is proved: %s", level)
		}
	}
	n.report.Proofs = nil
	if text := open(t, n.serve(t), wide).text(); strings.Contains(text, "Proofs") {
		t.Error("without proofs there are proofs")
	}
}

// TestPageOfResets: the page has the latest reset of each GPU, one that runs, and what the next one waits for, a person above all. The text of nvidia-smi is
// text. A GPU that is withheld for a reset has no fault.
func TestPageOfResets(t *testing.T) {
	n := h100x8()
	at, hostile := n.now.Add(-2*time.Hour), `<img src=x onerror="document.title='bad'"> `+strings.Repeat("a_long_word_", 18)
	next := func(text string) report.Next { return report.Next{WaitsFor: "CODE", Waits: text} }
	n.report.Resets = []report.Reset{
		{GPU: n.report.Devices[0].GPU, Index: 0, Result: "done", At: at, Seconds: 9, Cause: "XID_95"},
		{GPU: n.report.Devices[1].GPU, Index: 1, Result: "refused", At: at, Seconds: 3, Cause: "XID_95", Text: hostile, Attempts: 1, NeedsPerson: true, Next: next("nvidia-smi does not reset it")},
		{GPU: n.report.Devices[2].GPU, Index: 2, Refusals: 2, Next: report.Next{WaitsFor: "BACK_OFF", Waits: "open in dcgm-exporter (pid 2114)", WaitsUntil: n.now.Add(30 * time.Minute)}},
		{GPU: n.report.Devices[3].GPU, Index: 3, Due: true},
		{GPU: n.report.Devices[6].GPU, Index: 6, Attempts: 1, Next: report.Next{Running: "XID_119", RunsSince: n.now.Add(-20 * time.Second)}},
	}
	resetting := &n.report.Devices[6]
	resetting.State, resetting.Cause, resetting.Schedulable, resetting.Since, resetting.Health = health.Unknown, "RESETTING", false, n.now, "unknown: it is reset"
	url := n.serve(t)
	for _, v := range []view{wide, views["phone"], views["dark"]} {
		p := open(t, url, v)
		p.shows("1 problem", "Resets", "GPU 0 ● done", "2 h ago, after 9 s, reason: XID_95", "▲ refused", "<img src=x", "1 attempt for the present fault", "▲ a person is needed",
			"none so far", "2 refusals for the present fault", "open in dcgm-exporter (pid 2114)", "in 30 min", "would be reset now", "runs", "reason: XID_119", "? unknown")
		p.isHarmless()
	}
	n.report.Resets = nil
	if text := open(t, n.serve(t), wide).text(); strings.Contains(text, "Resets") {
		t.Error("without resets there are resets")
	}
}

// TestPageOfLimits: the page has the memory limit of each share: what the driver has counted, what the policy wants, and why a limit does not hold. The names of work
// are text.
func TestPageOfLimits(t *testing.T) {
	n := h100x8()
	hostile := `<img src=x onerror="document.title='bad'">`
	share := func(name, state, reason string, used, hard *uint64) report.MemoryLimit {
		return report.MemoryLimit{
			GPU: n.report.Devices[0].GPU, Work: report.Owner{Orchestrator: "nomad", Namespace: "default", Name: name, Container: "t"}, Pool: "gpu.shared", Way: "task", Required: true, Begun: name != "d",
			WantBytes: 20 << 30, ControlGroup: "/nomad.slice/share.slice/a.t.scope", HardBytes: hard, UsedBytes: used, State: state, Reason: reason, Since: n.now.Add(-2 * time.Hour),
		}
	}
	n.report.MemoryLimits = &report.MemoryLimits{Backend: "misc", Shares: []report.MemoryLimit{
		share(hostile, "limited", "", new(uint64(3<<29)), new(uint64(20<<30))), share("b", "not limited", "the controller misc is off", new(uint64(0)), nil), share("c", "unknown", "not read", nil, nil),
		share("d", "unknown", "its image is pulled", nil, nil),
	}}
	p := open(t, n.serve(t), wide)
	p.shows("Memory limits", "<img src=x", "gpu.shared · set by the agent on the task", "1.5 GiB of 20 GiB", "by the policy 20 GiB, required", "● limited", "✖ not limited", "the controller misc is off",
		"0.0 GiB, no limit", "✖ unknown", "unknown, not begun")
	p.isHarmless()
	n.report.MemoryLimits = nil
	if text := open(t, n.serve(t), wide).text(); strings.Contains(text, "Memory limits") {
		t.Error("without limits there are limits")
	}
}

// isHarmless checks that no text of another program is more than text, and that the page is legible.
func (p *tab) isHarmless() {
	p.Helper()
	if n := eval[int](p, `document.querySelectorAll("main img").length`); n != 0 || strings.Contains(eval[string](p, "document.title"), "bad") {
		p.Errorf("%d images, title %s", n, eval[string](p, "document.title"))
	}
	if overflow := eval[int](p, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); overflow > 0 {
		p.Errorf("the page is %d pixels wider than the screen", overflow)
	}
	if faint := eval[[]string](p, faintText); len(faint) > 0 {
		p.Errorf("text with a contrast below 4.5: %q", faint)
	}
}

// views are those of the screenshots in the documents.
var views = map[string]view{
	"light": wide, "dark": {1280, 900, "dark", false, true}, "phone": {390, 844, "light", true, true}, "phone-dark": {390, 844, "dark", true, true},
}

// TestViews checks that the page is legible in each view; with -update it takes the screenshots.
func TestViews(t *testing.T) {
	url := h100x8().serve(t)
	for name, v := range views {
		t.Run(name, func(t *testing.T) {
			p := open(t, url, v)
			p.shows("1 problem", "XID 95 uncontained memory error", "for 12 min", "what to do drain and reset the GPU", "train/llm-70b-2/main", "▲ idle for 47 min",
				"73 GiB of 80 GiB", "700 W", "● healthy", "✖ unhealthy")
			if overflow := eval[int](p, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); overflow > 0 {
				t.Errorf("the page is %d pixels wider than the screen", overflow)
			}
			if faint := eval[[]string](p, faintText); len(faint) > 0 {
				t.Errorf("text with a contrast below 4.5 (WCAG 2.1, 1.4.3): %q", faint)
			}
			if *goldenfile.Update && name != "phone-dark" {
				savePicture(t, "../../docs/images/status-"+name+".png", p.screenshot())
			}
		})
	}
}

// faintText are texts whose contrast with the background is too low.
const faintText = `(() => {
  const luminance = (c) => {
    const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const paper = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
    return [255, 255, 255];
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = texts.nextNode();) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest("script, style, noscript") || !e.checkVisibility()) continue;
    const a = luminance(rgb(getComputedStyle(e).color).slice(0, 3)), b = luminance(paper(e));
    if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) faint.push(n.data);
  }
  return faint;
})()`

// TestAccessibility checks what a screen reader gets: headers, names of charts, an announced summary.
func TestAccessibility(t *testing.T) {
	p := open(t, h100x8().serve(t), wide)
	for expression, want := range map[string]int{
		`document.querySelectorAll("th[scope=col]").length`:                                                                     7,
		`document.querySelectorAll("th[scope=row]").length`:                                                                     8,
		`document.querySelectorAll("svg[role=img][aria-label]").length`:                                                         32,
		`document.querySelectorAll("[aria-live=polite] .verdict").length`:                                                       1,
		`document.querySelectorAll("h1").length`:                                                                                1,
		`document.querySelectorAll("html[lang=en]").length`:                                                                     1,
		`[...document.querySelectorAll("[id]")].length - new Set([...document.querySelectorAll("[id]")].map((e) => e.id)).size`: 0,
	} {
		if got := eval[int](p, expression); got != want {
			t.Errorf("%s is %d, want %d", expression, got, want)
		}
	}
	labels := eval[[]string](p, `[...document.querySelectorAll("svg.line")].map((e) => e.getAttribute("aria-label"))`)
	if !slices.ContainsFunc(labels, func(l string) bool {
		return strings.HasPrefix(l, "Utilisation of GPU 5 in the last hour: lowest 0 %, mean ")
	}) {
		t.Errorf("charts are called %q", labels)
	}
	if title := eval[string](p, "document.title"); title != "(1) gpu-node-17" {
		t.Errorf("the title is %q", title)
	}
}

// TestPointer: under the pointer a chart shows the value of that time, and the present one again when the pointer leaves.
func TestPointer(t *testing.T) {
	n := h100x8()
	p := open(t, n.serve(t), wide)
	got := eval[[]string](p, `(() => {
	  const chart = document.querySelectorAll("tbody tr")[5].querySelector("svg.line"), box = chart.getBoundingClientRect();
	  const now = () => chart.parentElement.querySelector(".now").textContent, seen = [now()];
	  chart.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.left + box.width / 12, clientY: box.top + 5}));
	  seen.push(now());
	  chart.dispatchEvent(new PointerEvent("pointerleave"));
	  return [...seen, now()];
	})()`)
	at, value, _ := strings.Cut(got[1], "  ")
	five := n.now.Add(-55 * time.Minute)
	if got[0] != "0 %" || got[2] != got[0] || value == "0 %" || !strings.HasSuffix(value, " %") ||
		at != five.Format("15:04") && at != five.Add(-time.Minute).Format("15:04") && at != five.Add(time.Minute).Format("15:04") {
		t.Errorf("present, five minutes after the first, present: %q", got)
	}
}

// hostile are names that would run if the page took them for HTML, or for a part of its script.
const hostile = `</script><script>window.ran=1</script><img src=x onerror="window.ran=1">{{script}}${window.ran=1}`

// TestHostileNames: names of pods, namespaces, models and causes are text.
func TestHostileNames(t *testing.T) {
	n := h100x8()
	n.name = hostile
	r := &n.report
	d := &r.Devices[0]
	fault(d, n.now)
	d.Model, d.Pool, d.Cause, d.Action, d.Clears, d.Health = hostile, hostile, hostile, hostile, hostile, "unhealthy: "+hostile
	d.Owners = []report.Owner{{Namespace: hostile, Name: hostile, Container: hostile}}
	d.Processes = []report.Process{{PID: 1, Name: hostile, Unreserved: true}}
	r.Driver.Version, r.Warnings, r.PolicyWarnings = hostile, []string{hostile}, []string{hostile}
	r.Excluded = []report.Excluded{{ID: hostile, Reason: hostile}}
	r.Conditions = append(r.Conditions, report.Condition{Placement: hostile, Index: -1, Cause: hostile, State: health.Degraded, Detail: hostile, Since: n.now, LastSeen: n.now})
	r.Overlaps = []report.Overlap{{ID: gpu.DeviceID(hostile), Agent: hostile}}
	p := open(t, n.serve(t), wide)
	if eval[bool](p, `"ran" in window`) || eval[int](p, `document.querySelectorAll("img").length`) > 0 {
		t.Error("a name ran")
	}
	if n := strings.Count(p.text(), strings.Join(strings.Fields(hostile), " ")); n < 10 {
		t.Errorf("the names are shown %d times", n)
	}
	if refused := eval[bool](p, `(() => { const s = document.createElement("script"); s.textContent = "window.ran=1"; document.body.append(s); return !("ran" in window); })()`); !refused {
		t.Error("the policy of the page lets a script run that is not its own")
	}
	p.expect = func(message string) bool { return strings.Contains(message, "Content Security Policy") }
}

// TestNoScripts: a browser without JavaScript gets the table of inspect and a link to the JSON.
func TestNoScripts(t *testing.T) {
	v := wide
	v.scripts = false
	p := open(t, h100x8().serve(t), v)
	p.shows("GPUs of gpu-node-17", "driver ready 570.124.06", "GPU 7 XID_95 unhealthy", "/inventory")
}

// TestSilentAgent: when the agent does not answer any more, the page shows that and keeps its content.
func TestSilentAgent(t *testing.T) {
	n := h100x8()
	server := n.server(t)
	p := open(t, server.URL, wide)
	p.expect = func(message string) bool { return strings.Contains(message, "Failed to load resource") }
	server.CloseClientConnections()
	server.Close()
	await(t, "the page to notice", func() bool { return strings.Contains(p.text(), "✖ No answer from the agent for") })
	p.shows("what is below is old", "GPU 7 ✖ unhealthy")
}

// TestStoppedAgent: an agent whose process has stopped accepts connections and answers none.
func TestStoppedAgent(t *testing.T) {
	server := h100x8().server(t)
	answers, stopped := server.Config.Handler, make(chan struct{})
	end := make(chan struct{})
	t.Cleanup(func() { close(end) }) // before the server is closed, which waits for requests
	server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-stopped:
			<-end
		default:
			answers.ServeHTTP(w, r)
		}
	})
	p := open(t, server.URL, wide)
	close(stopped)
	await(t, "the page to notice", func() bool { return strings.Contains(p.text(), "✖ No answer from the agent for") })
}

// TestOpenDetails: what a reader opened stays open, and the focus where it is, when the page reads the agent again.
func TestOpenDetails(t *testing.T) {
	p := open(t, h100x8().serve(t), wide)
	before := eval[string](p, `(() => { const s = document.querySelectorAll("tbody summary")[3]; s.click(); s.focus(); return document.getElementById("server").textContent; })()`)
	await(t, "the next reading", func() bool { return eval[string](p, `document.getElementById("server").textContent`) != before })
	if got := eval[string](p, `document.activeElement.parentElement.id + " " + document.querySelectorAll("tbody details[open]").length`); !strings.HasPrefix(got, "about-GPU-3") || !strings.HasSuffix(got, " 1") {
		t.Errorf("focus and number of open details: %s", got)
	}
}

// TestOtherStates: the page of a node without a driver, of one with MIG instances, of one without a fault, and of one with a GPU that was
// never read.
func TestOtherStates(t *testing.T) {
	absent := h100x8()
	absent.report.Driver = report.Driver{State: "absent", Reason: "no NVIDIA driver: libnvidia-ml.so.1 is not in /usr/lib64"}
	absent.report.Devices, absent.report.Conditions = []report.Device{}, []report.Condition{}
	open(t, absent.serve(t), wide).shows("1 problem", "Driver absent", "libnvidia-ml.so.1 is not in", "run k8s-gpu doctor on this node", "This agent offers no device.")

	mig := h100x8()
	mig.report.Conditions = []report.Condition{}
	for i := range mig.report.Devices {
		d := &mig.report.Devices[i]
		if d.State = health.Healthy; i >= 6 {
			fault(d, mig.now.Add(-time.Hour))
			d.GPU, d.Index, d.Profile, d.Instance = mig.report.Devices[6].ID, 6, "1g.10gb", new(i-6)
			d.Usage.GPUPercent, d.Usage.PowerMilliwatts = nil, nil
		} else {
			d.Cause, d.Health = "", "healthy"
		}
	}
	open(t, mig.serve(t), wide).shows("1 problem", "GPU 6:0, 6:1 ✖ unhealthy", "1g.10gb · gpu", "2 unhealthy")

	healthy := h100x8()
	healthy.report.Devices, healthy.report.Conditions = healthy.report.Devices[:5], []report.Condition{}
	open(t, healthy.serve(t), wide).shows("● No problem", "5 devices offered · 5 can take work · 5 held")

	healthy.report.Excluded = []report.Excluded{{Index: 5, Reason: "nvmlDeviceGetHandleByIndex: GPU is lost", Failed: true}, {Index: 6, Reason: "not selected"}}
	open(t, healthy.serve(t), wide).shows("1 problem", "GPU 5 can't be read: nvmlDeviceGetHandleByIndex: GPU is lost", "run k8s-gpu doctor on this node", "2 not offered")
}
