package control_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("16") // the tests wait more than they compute
	}
	os.Exit(m.Run())
}

// rig is a monitor of a simulated node, served at a socket.
type rig struct {
	*testing.T
	machine *coretest.Machine
	monitor *monitor.Monitor
	path    string
	socket  *control.Socket
	log     *logbuffer.Buffer
	options control.Options
	stop    func() // ends the agent and waits for it
}

// start runs an agent that checks its GPUs every 10 ms and has a dwell of an hour.
func start(t *testing.T, s gpu.Snapshot, change ...func(*control.Options)) *rig {
	t.Helper()
	return startWith(t, s, nil, change...)
}

// startWith is start for an agent with a store.
func startWith(t *testing.T, s gpu.Snapshot, store monitor.Store, change ...func(*control.Options)) *rig {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	cfg.Probe, cfg.Rescan, cfg.Health.RecoveryDwell = 10*time.Millisecond, 10*time.Millisecond, time.Hour
	r := &rig{
		T: t, machine: coretest.NewMachine(s), log: &logbuffer.Buffer{},
		path: control.Path(filepath.Join(coretest.ShortDir(t), "tandem"), "k8s-gpu"),
	}
	log := slog.New(slog.NewTextHandler(r.log, nil))
	r.options = control.Options{Config: cfg, Log: log}
	for _, c := range change {
		c(&r.options)
	}
	r.monitor = monitor.New(r.open, r.options.Config, slog.New(slog.DiscardHandler), store)
	ctx, cancel := context.WithCancel(context.Background())
	var agent sync.WaitGroup
	agent.Go(func() {
		check.NoError(t, r.monitor.Run(ctx))
	})
	r.socket = control.NewSocket(r.path)
	agent.Go(func() { r.socket.Serve(ctx, agentOf{r.monitor}, r.options) })
	r.stop = sync.OnceFunc(func() {
		cancel()
		agent.Wait()
	})
	t.Cleanup(r.stop)
	check.Until(r, "a report", func() bool {
		report, err := control.Report(t.Context(), r.path)
		return err == nil && report.Driver.State == "ready"
	})
	return r
}

// shortWaits is a session whose event waits take 20 ms instead of a second: the monitor ends when the wait has.
type shortWaits struct{ monitor.Session }

func (s shortWaits) Wait(most time.Duration) ([]health.Observation, error) {
	return s.Session.Wait(min(most, 20*time.Millisecond))
}

func (r *rig) open() (monitor.Session, error) {
	s, err := r.machine.Open()
	if err != nil {
		return nil, err
	}
	return shortWaits{s}, nil
}

// xid has a GPU report an XID, and waits until it has an effect.
func (r *rig) xid(id int, code uint64) {
	r.Helper()
	r.machine.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(id)), Kind: health.XID, Code: code})
	check.Until(r, "the XID", func() bool {
		return slices.ContainsFunc(r.monitor.State().Ledger.Conditions(), func(c health.Condition) bool { return c.Code == code })
	})
}

// cause is the cause of the health of a GPU.
func (r *rig) cause(id int) string {
	return r.monitor.State().Ledger.Health(gpu.WholeGPU(coretest.GPU(id))).Cause()
}

// command is a command of an operator to the agent at a path, such as control.Resume.
type command func(ctx context.Context, path string, out io.Writer) error

// with gives a command its arguments.
func with[Args any](verb func(context.Context, string, Args, io.Writer) error, args Args) command {
	return func(ctx context.Context, path string, out io.Writer) error { return verb(ctx, path, args, out) }
}

// inspect is control.Inspect of an agent that runs.
func inspect(asJSON bool) command {
	return func(ctx context.Context, path string, out io.Writer) error {
		return control.Inspect(ctx, path, nil, out, asJSON)
	}
}

// output runs a command and returns its output.
func (r *rig) output(c command) string {
	r.Helper()
	var out bytes.Buffer
	if err := c(r.Context(), r.path, &out); err != nil {
		r.Errorf("rejected: %v", err)
	}
	return out.String()
}

// rejects runs a command that the agent must reject, with this status of HTTP and a text that has all the parts.
func (r *rig) rejects(c command, status int, parts ...string) (text string) {
	r.Helper()
	refused, ok := errors.AsType[*control.RefusedError](c(r.Context(), r.path, io.Discard))
	if !ok || refused.Status != status {
		r.Errorf("got %+v, want status %d", refused, status)
		return ""
	}
	contains(r.T, refused.Error(), parts...)
	return refused.Text
}

// report is the report of the agent.
func (r *rig) report() report.Report {
	r.Helper()
	got, err := control.Report(r.Context(), r.path)
	if err != nil {
		r.Error(err)
	}
	return got
}

// hang has the health check of GPU 1 hang, and waits until it does.
func (r *rig) hang() {
	r.Helper()
	r.Cleanup(r.machine.Hang("Probe", gpu.WholeGPU(coretest.GPU(1))))
	check.Until(r, "the call", func() bool { return len(r.monitor.Stats().Calls) > 0 })
}

// contains checks that a text has all the parts.
func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in:\n%s", part, text)
		}
	}
}

// serveAt serves a socket in a directory until the test ends.
func serveAt(t *testing.T, dir string, a control.Agent) (path string) {
	t.Helper()
	path = control.Path(dir, "k8s-gpu")
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait) // after the context of the test has ended
	serving.Go(func() { control.NewSocket(path).Serve(t.Context(), a, quiet()) })
	return path
}

// agentOf is a monitor as an agent that does not read what the devices do.
type agentOf struct{ *monitor.Monitor }

func (agentOf) Use() use.Table { return use.Table{} }

func newAgent() control.Agent {
	return agentOf{monitor.New(coretest.NewMachine(coretest.GPUs(1)).Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), nil)}
}

// awaitReport waits until the agent at path answers.
func awaitReport(t *testing.T, path string) {
	t.Helper()
	check.Until(t, "a report", func() bool {
		_, err := control.Report(t.Context(), path)
		return err == nil
	})
}

// deadSocket creates a socket on which no process listens.
func deadSocket(t *testing.T, path string) {
	t.Helper()
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	check.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	check.NoError(t, dead.Close())
}

func quiet() control.Options {
	return control.Options{Config: core.DefaultConfig(), Log: slog.New(slog.DiscardHandler)}
}
