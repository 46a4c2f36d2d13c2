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

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

func simulation(o *control.Options) { o.Simulation = true }

// shared gives each device a hundred replicas.
func shared(o *control.Options) {
	o.Config.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 100}}}
}

func TestInspectReadsTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), func(o *control.Options) {
		o.Problems = func() []problem.Problem {
			return problem.Each(problem.HistorySave, "health history is not kept: the disk is full")
		}
	})
	r.xid(1, 95)
	contains(t, r.output(inspect(false)),
		"driver ready", "warning: health history is not kept: the disk is full\n", "  unhealthy  ", "CONDITIONS\nGPU 1  XID_95  unhealthy  since ")
	var got report.Report
	check.NoError(t, json.Unmarshal([]byte(r.output(inspect(true))), &got))
	if got.Source != report.FromAgent || len(got.Conditions) != 1 || got.Conditions[0].Cause != "XID_95" || len(got.Warnings) != 1 {
		t.Errorf("%+v", got)
	}
}

func TestInspectWithoutAgent(t *testing.T) {
	t.Parallel()
	dir := coretest.ShortDir(t)
	mute := control.Path(dir, "mute") // accepts connections and never responds
	listener, err := net.Listen("unix", mute)
	check.NoError(t, err)
	defer func() { _ = listener.Close() }()
	cfg := core.DefaultConfig()
	machine := coretest.NewMachine(coretest.GPUs(1))
	state, _ := report.Read(t.Context(), machine.Open, cfg, nil, false)
	reading := report.DescribeState(state, cfg)
	read := func(context.Context) report.Report { return reading }
	for path, first := range map[string]string{
		control.Path(dir, "none"):            "no agent is running: this is what an agent that starts now would offer\n",
		control.Path(dir+"/none", "k8s-gpu"): "no agent is running: this is what an agent that starts now would offer\n",
		"":                                   "no agent was asked, as the state directory is empty: this is what an agent that starts now would offer\n",
		mute:                                 "the agent does not answer (" + mute + ": context deadline exceeded): this is what an agent that starts now would offer\n",
	} {
		ctx := t.Context()
		if path == mute {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
		}
		var table, text bytes.Buffer
		check.NoError(t, control.Inspect(ctx, path, read, &table, false), control.Inspect(ctx, path, read, &text, true))
		if !strings.HasPrefix(table.String(), first+"driver ready") {
			t.Errorf("at %q: %s", path, table.String())
		}
		var r report.Report
		if err := json.Unmarshal(text.Bytes(), &r); err != nil || r.Source != report.FromDriver || len(r.Devices) != 1 || !strings.HasPrefix(first, r.Warnings[0]) {
			t.Errorf("at %q: %v, %+v", path, err, r)
		}
	}
}

func TestCommandsNeedAnAgent(t *testing.T) {
	t.Parallel()
	path := control.Path(coretest.ShortDir(t), "k8s-gpu")
	for name, err := range map[string]error{
		"clear":    control.Clear(t.Context(), path, control.ClearArgs{}, nil),
		"reload":   control.Reload(t.Context(), path, nil),
		"ignore":   control.Ignore(t.Context(), path, control.IgnoreArgs{}, nil),
		"simulate": control.Simulate(t.Context(), path, control.SimulateArgs{}, nil),
		"no path":  control.Clear(t.Context(), "", control.ClearArgs{}, nil),
	} {
		if !errors.Is(err, control.ErrNotRunning) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A GPU is named by its UUID, PCI address or index, and by the ID of an instance or of a unit, as the orchestrators show it.
func TestClear(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "3g.40gb"), shared)
	pci, instance := string(coretest.GPUs(2).Devices[1].PCI), string(coretest.Instance(1, 1))
	for _, args := range []control.ClearArgs{
		{GPU: "1", Cause: "xid 95"}, {GPU: " 1 ", Cause: "XID-95"}, {GPU: pci, Cause: "95"}, {GPU: strings.TrimPrefix(pci, "0000:"), Cause: "xid95"},
		{GPU: string(coretest.GPU(1)), Cause: "Xid_95"}, {GPU: strings.ToLower(string(coretest.GPU(1))), Cause: " XID_95\n"}, {GPU: "1"},
		{GPU: instance + "::7"}, {GPU: instance + "::99"}, {GPU: string(coretest.GPU(1)) + "::0"}, {GPU: strings.ToLower(string(coretest.Instance(1, 0))) + "::1"},
		{GPU: " 1:0 "}, {GPU: "1:1"},
	} {
		r.xid(1, 95)
		out := r.output(with(control.Clear, args))
		if !strings.HasPrefix(out, "GPU 1 XID_95 (") || !strings.HasSuffix(out, "): cleared\n") || strings.Count(out, "\n") != 1 {
			t.Errorf("%+v: %s", args, out)
		}
		if c := r.cause(1); c != "" {
			t.Errorf("%+v leaves %s", args, c)
		}
	}
	for arg, remedy := range map[string]string{
		"GPU-00000000::1":               "no such GPU", // a prefix of several UUIDs
		string(coretest.GPU(7)) + "::1": "no such GPU",
		string(coretest.GPU(1)) + "::":  "want a UUID",
		string(coretest.GPU(1)) + "::a": "want a UUID",
		string(coretest.GPU(1)) + "::-": "want a UUID",
		"1:2":                           "no such GPU",
		"0:0":                           "no such GPU",
		"1:":                            "want a UUID",
		"1:0:0":                         "want a UUID",
	} {
		r.rejects(with(control.Clear, control.ClearArgs{GPU: arg}), http.StatusBadRequest, `gpu = "`+arg+`": `, remedy)
	}
	contains(t, r.log.String(), `level=WARN msg="condition cleared by operator"`, "cause=XID_95", "peer.uid=", "peer.pid=")

	r.xid(1, 95)
	r.xid(1, 79)
	contains(t, r.output(with(control.Clear, control.ClearArgs{GPU: "1", Cause: "95"})), "GPU 1 XID_95 (", "still active: GPU 1 XID_79 (")
}

func TestIgnore(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	r.xid(0, 95)
	until := time.Now().Add(4 * time.Hour).UTC().Truncate(time.Second)
	contains(t, r.output(with(control.Ignore, control.IgnoreArgs{GPU: "0", Cause: "95", Until: until.Format(time.RFC3339)})),
		"GPU 0 XID_95 (", "): ignored until "+until.Format("2006-01-02T15:04:05Z"))
	if c := r.cause(0); c != "" {
		t.Errorf("still %s", c)
	}
	r.output(with(control.Ignore, control.IgnoreArgs{GPU: "0", Until: "30m"}))
	if left := time.Until(r.report().Conditions[0].IgnoredUntil); left > 30*time.Minute || left < 29*time.Minute {
		t.Errorf("ignored for %v", left)
	}
	r.xid(0, 95) // a new occurrence ends the ignoring
	contains(t, r.log.String(), `msg="condition ignored by operator"`)
}

func TestRejectedCommands(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), simulation)
	longAgo := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	r.xid(0, 95)
	r.machine.FailGPU(coretest.GPU(1), health.Lost)
	check.Until(r, "the loss", func() bool { return r.cause(1) == "LOST" })
	clearing := func(a control.ClearArgs) command { return with(control.Clear, a) }
	simulating := func(a control.SimulateArgs) command { return with(control.Simulate, a) }
	for name, c := range map[string]struct {
		command command
		status  int
		want    string // all lines, joined by |
	}{
		"a newer fault": {clearing(control.ClearArgs{GPU: "0", VerifiedAt: longAgo}), http.StatusConflict, "newer than the verification: XID_95 happened at "},
		"silence":       {clearing(control.ClearArgs{GPU: "1"}), http.StatusConflict, string(coretest.GPU(1)) + " does not respond"},
		"nothing there": {clearing(control.ClearArgs{GPU: "0", Cause: "xid 48"}), http.StatusNotFound, "no condition XID_48 on GPU " + string(coretest.GPU(0))},
		"no GPU":        {clearing(control.ClearArgs{}), http.StatusBadRequest, `gpu = "": want a UUID`},
		"no such GPU":   {clearing(control.ClearArgs{GPU: "7"}), http.StatusBadRequest, `gpu = "7": no such GPU`},
		"no index":      {clearing(control.ClearArgs{GPU: "-1"}), http.StatusBadRequest, `gpu = "-1": want a UUID`},
		"two GPUs":      {clearing(control.ClearArgs{GPU: "GPU-0000"}), http.StatusBadRequest, "write more of the UUID"},
		"not yet": {clearing(control.ClearArgs{GPU: "0", VerifiedAt: time.Now().Add(time.Hour).Format(time.RFC3339)}),
			http.StatusBadRequest, "not in the future"},
		"all at once": {with(control.Ignore, control.IgnoreArgs{GPU: "first", VerifiedAt: "noon", Until: "later"}), http.StatusBadRequest,
			`gpu = "first": |verified-at = "noon": want a time such as|until = "later": want a duration such as 4h`},
		"no time":    {with(control.Ignore, control.IgnoreArgs{GPU: "0"}), http.StatusBadRequest, `until = "": want a duration`},
		"time gone":  {with(control.Ignore, control.IgnoreArgs{GPU: "0", Until: "-1h"}), http.StatusBadRequest, "want a time to come"},
		"no XID":     {simulating(control.SimulateArgs{GPU: "0", Code: "zero"}), http.StatusBadRequest, `code = "zero": want the number of an XID`},
		"no event":   {simulating(control.SimulateArgs{Kind: "event", GPU: "0", Code: "1"}), http.StatusBadRequest, "FatalPoisonError"},
		"no kind":    {simulating(control.SimulateArgs{Kind: "lost", GPU: "0"}), http.StatusBadRequest, `kind = "lost": want xid or event`},
		"no GI":      {simulating(control.SimulateArgs{GPU: "0", Code: "94", GI: "1"}), http.StatusBadRequest, "there is no " + string(coretest.GPU(0)) + " GI 1"},
		"CI alone":   {simulating(control.SimulateArgs{GPU: "0", Code: "94", CI: "0"}), http.StatusBadRequest, "give gi too"},
		"GI no such": {simulating(control.SimulateArgs{GPU: "9", Code: "x", GI: "4294967295"}), http.StatusBadRequest, `gpu = "9"|gi = "4294967295"|code = "x"`},
	} {
		parts := strings.Split(c.want, "|")
		if lines := strings.Split(r.rejects(c.command, c.status, parts...), "\n"); len(lines) != len(parts) {
			t.Errorf("%s: %q", name, lines)
		}
	}
	if c := r.cause(0); c != "XID_95" {
		t.Errorf("GPU 0 has %q now", c)
	}
	contains(t, r.log.String(), `level=WARN msg="command rejected" command=/v1/clear`)
}

func TestSimulate(t *testing.T) {
	t.Parallel()
	instance := coretest.Instance(0, 0)
	r := start(t, coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb"), simulation)
	simulate := func(args control.SimulateArgs) string { return r.output(with(control.Simulate, args)) }
	healthID := func() health.Health {
		u, _ := r.monitor.Current().Unit(inventory.UnitID(instance))
		return u.Health
	}
	contains(t, simulate(control.SimulateArgs{GPU: string(instance), Code: "XID 95"}), "simulated: GPU 0 XID_95 (", "): unhealthy; cleared by: a reset or a reboot; the command clear clears it at once\n")
	if h := healthID(); !h.Simulated || h.State != health.Unhealthy {
		t.Errorf("health is %s", h)
	}
	contains(t, simulate(control.SimulateArgs{GPU: "0", Kind: "event", Code: "gpuUnavailableError"}), "simulated: GPU 0 EVENT_0x4000 (")
	contains(t, simulate(control.SimulateArgs{GPU: "0", GI: "1", CI: "0", Code: "94"}), "simulated: GPU 0 GI 1 CI 0 XID_94 (", "still active: simulated: GPU 0 XID_95")
	contains(t, simulate(control.SimulateArgs{GPU: "0", Code: "31"}), "simulated: this fault alone causes no condition\n")
	for line := range strings.Lines(r.log.String()) {
		contains(t, line, `msg="fault simulated by operator"`, "simulated=true")
	}
	r.output(with(control.Clear, control.ClearArgs{GPU: "0"}))
	if h := healthID(); h.State != health.Healthy {
		t.Errorf("health is %s", h)
	}
}

func TestSimulationIsOffUnlessAllowed(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	r.rejects(with(control.Simulate, control.SimulateArgs{GPU: "0", Code: "95"}), http.StatusForbidden, "simulation is off: ")
	if n := len(r.monitor.State().Ledger.Conditions()); n != 0 {
		t.Errorf("%d conditions", n)
	}
}

// A command that the agent does not execute in time fails.
func TestBusyAgent(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	r.xid(0, 95)
	r.path = serveAt(t, coretest.ShortDir(t), stalled{agentOf{r.monitor}})
	awaitReport(t, r.path)
	r.rejects(with(control.Clear, control.ClearArgs{GPU: "0"}), http.StatusServiceUnavailable, "try again")
}

// stalled is an agent that does not execute Clear.
type stalled struct{ control.Agent }

func (stalled) Clear(ctx context.Context, _ health.Command) ([]health.Condition, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Reports count devices, not units.
func TestReportsCountDevices(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2), shared)
	contains(t, r.output(quiesce), "devices: 2 unknown")
	contains(t, r.output(inspect(false)), "gpu.shared, time-slicing by 100")
	if devices := r.report().Devices; len(devices) != 2 || devices[1].ID != coretest.GPU(1) || devices[1].Replicas != 100 {
		t.Errorf("%+v", devices)
	}
}
