package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/report"
)

func simulation(o *control.Options) { o.Simulation = true }

func TestInspectAsksTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), func(o *control.Options) {
		o.Warnings = func() []string { return []string{"health history is not kept: the disk is full"} }
	})
	r.xid(1, 95)
	read := func(context.Context) report.Report {
		t.Error("the driver is asked though an agent runs")
		return report.Report{}
	}
	wants(t, r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Inspect(ctx, path, read, out, false)
	}), "driver ready", "note: health history is not kept: the disk is full\n", "  unhealthy  ", "CONDITIONS\nGPU 1  XID_95  unhealthy  since ")
	var got report.Report
	if err := json.Unmarshal([]byte(r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Inspect(ctx, path, read, out, true)
	})), &r); err != nil {
		t.Fatal(err)
	}
	if got.Source != report.FromAgent || len(got.Conditions) != 1 || got.Conditions[0].Cause != "XID_95" || len(got.Warnings) != 1 {
		t.Errorf("%+v", got)
	}
}

func TestInspectWithoutAgent(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	mute := control.Path(dir, "mute") // listens and never answers
	listener, err := net.Listen("unix", mute)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	cfg := core.DefaultConfig()
	machine := coretest.NewMachine(coretest.GPUs(1))
	reading := report.DescribeState(report.ReadState(t.Context(), machine.Open, cfg), cfg)
	read := func(context.Context) report.Report { return reading }
	for path, first := range map[string]string{
		control.Path(dir, "none"):            "no agent is running: this is what one would offer\n",
		control.Path(dir+"/none", "k8s-gpu"): "no agent is running: this is what one would offer\n",
		"":                                   "no agent is running: this is what one would offer\n",
		mute:                                 "the agent does not answer (" + mute + ": context deadline exceeded): this is what one would offer\n",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		var table, text bytes.Buffer
		if err := errors.Join(control.Inspect(ctx, path, read, &table, false), control.Inspect(ctx, path, read, &text, true)); err != nil {
			t.Error(err)
		}
		if !strings.HasPrefix(table.String(), first+"driver ready") {
			t.Errorf("at %q: %s", path, table.String())
		}
		var r report.Report
		if err := json.Unmarshal(text.Bytes(), &r); err != nil || r.Source != report.FromReading || len(r.Devices) != 1 {
			t.Errorf("at %q: %v, %+v", path, err, r)
		}
	}
}

func TestOrdersNeedAnAgent(t *testing.T) {
	t.Parallel()
	path := control.Path(shortDir(t), "k8s-gpu")
	for name, err := range map[string]error{
		"clear":    control.Clear(t.Context(), path, control.ClearArgs{}, nil),
		"ignore":   control.Ignore(t.Context(), path, control.IgnoreArgs{}, nil),
		"simulate": control.Simulate(t.Context(), path, control.SimulateArgs{}, nil),
		"no path":  control.Clear(t.Context(), "", control.ClearArgs{}, nil),
	} {
		if !errors.Is(err, control.ErrNotRunning) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClear(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2))
	pci := string(coretest.GPUs(2).Devices[1].PCI)
	for _, words := range []control.ClearArgs{
		{GPU: "1", Cause: "xid 95"}, {GPU: " 1 ", Cause: "XID-95"}, {GPU: pci, Cause: "95"}, {GPU: strings.TrimPrefix(pci, "0000:"), Cause: "xid95"},
		{GPU: string(coretest.GPU(1)), Cause: "Xid_95"}, {GPU: strings.ToLower(string(coretest.GPU(1))), Cause: " XID_95\n"}, {GPU: "1"},
	} {
		r.xid(1, 95)
		out := r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
			return control.Clear(ctx, path, words, out)
		})
		if !strings.HasPrefix(out, "GPU 1 XID_95 (") || !strings.HasSuffix(out, "): cleared\n") || strings.Count(out, "\n") != 1 {
			t.Errorf("%+v: %s", words, out)
		}
		if c := r.cause(1); c != "" {
			t.Errorf("%+v leaves %s", words, c)
		}
	}
	wants(t, r.log.String(), `level=WARN msg="operator cleared"`, "cause=XID_95", "by.uid=", "by.pid=")

	r.xid(1, 95)
	r.xid(1, 79)
	wants(t, r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Clear(ctx, path, control.ClearArgs{GPU: "1", Cause: "95"}, out)
	}), "GPU 1 XID_95 (", "still standing: GPU 1 XID_79 (")
}

func TestIgnore(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	r.xid(0, 95)
	until := time.Now().Add(4 * time.Hour).UTC().Truncate(time.Second)
	ignore := func(args control.IgnoreArgs) string {
		return r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
			return control.Ignore(ctx, path, args, out)
		})
	}
	wants(t, ignore(control.IgnoreArgs{GPU: "0", Cause: "95", Until: until.Format(time.RFC3339)}),
		"GPU 0 XID_95 (", "): ignored until "+until.Format("2006-01-02T15:04:05Z"))
	if c := r.cause(0); c != "" {
		t.Errorf("still %s", c)
	}
	ignore(control.IgnoreArgs{GPU: "0", Until: "30m"})
	got, err := control.Dial(r.path).Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if left := time.Until(got.Conditions[0].IgnoredUntil); left > 30*time.Minute || left < 29*time.Minute {
		t.Errorf("ignored for %v", left)
	}
	r.xid(0, 95) // again: of this one the operator knew nothing
	wants(t, r.log.String(), `msg="operator ignores"`)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), simulation)
	longAgo := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	r.xid(0, 95)
	r.machine.FailGPU(coretest.GPU(1), core.Lost)
	r.await("the loss", func() bool { return r.cause(1) == "LOST" })
	client := control.Dial(r.path)
	clearing := func(a control.ClearArgs) error { _, err := client.Clear(t.Context(), a); return err }
	ignoring := func(a control.IgnoreArgs) error { _, err := client.Ignore(t.Context(), a); return err }
	simulating := func(a control.SimulateArgs) error { _, err := client.Simulate(t.Context(), a); return err }
	for name, c := range map[string]struct {
		err    error
		status int
		want   string // joined lines, all of them
	}{
		"a newer fault": {clearing(control.ClearArgs{GPU: "0", VerifiedAt: longAgo}), http.StatusConflict, "newer than the verification: XID_95 happened at "},
		"silence":       {clearing(control.ClearArgs{GPU: "1"}), http.StatusConflict, string(coretest.GPU(1)) + " does not respond"},
		"nothing there": {clearing(control.ClearArgs{GPU: "0", Cause: "xid 48"}), http.StatusNotFound, "no condition XID_48 on GPU " + string(coretest.GPU(0))},
		"no GPU":        {clearing(control.ClearArgs{}), http.StatusBadRequest, `gpu = "": want a UUID`},
		"no such GPU":   {clearing(control.ClearArgs{GPU: "7"}), http.StatusBadRequest, `gpu = "7": there is no such GPU`},
		"no index":      {clearing(control.ClearArgs{GPU: "-1"}), http.StatusBadRequest, `gpu = "-1": want a UUID`},
		"two GPUs":      {clearing(control.ClearArgs{GPU: "GPU-0000"}), http.StatusBadRequest, "write more of it"},
		"not yet": {clearing(control.ClearArgs{GPU: "0", VerifiedAt: time.Now().Add(time.Hour).Format(time.RFC3339)}),
			http.StatusBadRequest, "not in the future"},
		"all at once": {ignoring(control.IgnoreArgs{GPU: "first", VerifiedAt: "noon", Until: "later"}), http.StatusBadRequest,
			`gpu = "first": |verified-at = "noon": want a time such as|until = "later": want a duration such as 4h`},
		"no time":    {ignoring(control.IgnoreArgs{GPU: "0"}), http.StatusBadRequest, `until = "": want a duration`},
		"time gone":  {ignoring(control.IgnoreArgs{GPU: "0", Until: "-1h"}), http.StatusBadRequest, "want a time to come"},
		"no XID":     {simulating(control.SimulateArgs{GPU: "0", Code: "zero"}), http.StatusBadRequest, `code = "zero": want the number of an XID`},
		"no event":   {simulating(control.SimulateArgs{Kind: "event", GPU: "0", Code: "1"}), http.StatusBadRequest, "FatalPoisonError"},
		"no kind":    {simulating(control.SimulateArgs{Kind: "lost", GPU: "0"}), http.StatusBadRequest, `kind = "lost": want xid or event`},
		"no GI":      {simulating(control.SimulateArgs{GPU: "0", Code: "94", GI: "1"}), http.StatusBadRequest, "there is no " + string(coretest.GPU(0)) + " GI 1"},
		"CI alone":   {simulating(control.SimulateArgs{GPU: "0", Code: "94", CI: "0"}), http.StatusBadRequest, "give gi too"},
		"GI no such": {simulating(control.SimulateArgs{GPU: "9", Code: "x", GI: "4294967295"}), http.StatusBadRequest, `gpu = "9"|gi = "4294967295"|code = "x"`},
	} {
		refused := (*control.RefusedError)(nil)
		if !errors.As(c.err, &refused) || refused.Status != c.status {
			t.Errorf("%s: %+v, want status %d", name, c.err, c.status)
			continue
		}
		parts := strings.Split(c.want, "|")
		wants(t, refused.Text, parts...)
		if n := strings.Count(refused.Text, "\n") + 1; n != len(parts) {
			t.Errorf("%s: %d reasons in %q", name, n, refused.Text)
		}
	}
	if c := r.cause(0); c != "XID_95" {
		t.Errorf("GPU 0 has %q now", c)
	}
	wants(t, r.log.String(), `level=WARN msg="operator's order refused" order=/v1/clear`)
}

func TestSimulate(t *testing.T) {
	t.Parallel()
	s := coretest.GPUs(1)
	s.Devices[0].MIG = true
	instance := s.Devices[0]
	instance.ID, instance.At.GI, instance.At.CI, instance.Profile, instance.MIG = "MIG-1", 3, 0, "1g.10gb", false
	s.Devices = append(s.Devices, instance)
	r := start(t, s, simulation)
	simulate := func(args control.SimulateArgs) string {
		return r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
			return control.Simulate(ctx, path, args, out)
		})
	}
	health := func() core.Health {
		u, _ := r.monitor.Current().Unit("MIG-1")
		return u.Health
	}
	wants(t, simulate(control.SimulateArgs{GPU: "MIG-1", Code: "XID 95"}), "simulated: GPU 0 XID_95 (", "): unhealthy; clears: reset seen or reboot, or an order to clear it\n")
	if h := health(); !h.Simulated || h.State != core.Unhealthy {
		t.Errorf("health is %s", h)
	}
	wants(t, simulate(control.SimulateArgs{GPU: "0", Kind: "event", Code: "gpuUnavailableError"}), "simulated: GPU 0 EVENT_0x4000 (")
	wants(t, simulate(control.SimulateArgs{GPU: "0", GI: "3", CI: "0", Code: "94"}), "simulated: GPU 0 GI 3 CI 0 XID_94 (", "still standing: simulated: GPU 0 XID_95")
	wants(t, simulate(control.SimulateArgs{GPU: "0", Code: "31"}), "simulated: nothing follows from this fault alone\n")
	for line := range strings.Lines(r.log.String()) {
		wants(t, line, `msg="operator simulates"`, "simulated=true")
	}
	r.says(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Clear(ctx, path, control.ClearArgs{GPU: "0"}, out)
	})
	if h := health(); h.State != core.Healthy {
		t.Errorf("health is %s", h)
	}
}

func TestSimulationIsOffUnlessAllowed(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	_, err := control.Dial(r.path).Simulate(t.Context(), control.SimulateArgs{GPU: "0", Code: "95"})
	refused := (*control.RefusedError)(nil)
	if !errors.As(err, &refused) || refused.Status != http.StatusForbidden || !strings.HasPrefix(refused.Text, "simulation is off: ") {
		t.Errorf("got %v", err)
	}
	if n := len(r.monitor.State().Ledger.Conditions()); n != 0 {
		t.Errorf("%d conditions", n)
	}
}

// An order that the agent has no time for is given up on.
func TestBusyAgent(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	r.xid(0, 95)
	path := serveAt(t, shortDir(t), stalled{r.monitor})
	r.await("an answer", func() bool { _, err := control.Dial(path).Report(t.Context()); return err == nil })
	_, err := control.Dial(path).Clear(t.Context(), control.ClearArgs{GPU: "0"})
	refused := (*control.RefusedError)(nil)
	if !errors.As(err, &refused) || refused.Status != http.StatusServiceUnavailable || !strings.Contains(refused.Text, "try again") {
		t.Errorf("got %v", err)
	}
}

// stalled is an agent that obeys nothing.
type stalled struct{ control.Agent }

func (stalled) Clear(ctx context.Context, _ core.Command) ([]core.Condition, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
