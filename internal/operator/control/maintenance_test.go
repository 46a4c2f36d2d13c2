package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
)

// quiesce releases the driver until it is resumed.
var quiesce = with(control.Quiesce, control.QuiesceArgs{})

func TestQuiesceAndResume(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(8))
	contains(t, r.output(quiesce), "driver released (driver released by quiesce); devices: 8 unknown;", "not on disk", "resume")
	if n := r.machine.Sessions(); n != 0 {
		t.Errorf("%d sessions are open", n)
	}
	if got := r.report(); got.Driver.State != "released" || got.Devices[0].Cause != "MAINTENANCE" || got.Devices[0].Schedulable {
		t.Errorf("driver %+v, device %+v", got.Driver, got.Devices[0])
	}
	if got := r.output(control.Resume); got != "driver ready 580.95.05; devices: 8 healthy\n" {
		t.Errorf("resume writes %q", got)
	}
	r.rejects(control.Resume, http.StatusConflict)
	contains(t, r.log.String(), "driver quiesced by operator", "driver resumed by operator", "uid=")
}

func TestQuiesceUntilATime(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	for _, arg := range []string{"soon", "-1h", "2020-01-01T00:00:00Z"} {
		r.rejects(with(control.Quiesce, control.QuiesceArgs{For: arg}), http.StatusBadRequest)
	}
	if r.cause(0) != "" {
		t.Error("a rejected command had an effect")
	}
	contains(t, r.output(with(control.Quiesce, control.QuiesceArgs{For: "3s"})), "until 20")
	check.Until(r, "the end", func() bool { return r.cause(0) == "" })
}

// Quiesce fails while a driver call hangs. The maintenance is active nevertheless: the error also has the reason why it is not on disk.
func TestQuiesceWhileACallHangs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		store monitor.Store
		parts []string
	}{
		"on disk":     {&disk{}, []string{"nvmlProbe", "has begun"}},
		"not on disk": {&disk{err: errors.New(full)}, []string{"nvmlProbe", "a restart of the agent ends the maintenance: not on disk: " + full}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startWith(t, coretest.GPUs(2), c.store)
			r.hang()
			r.rejects(quiesce, http.StatusConflict, c.parts...)
			if r.cause(0) != "MAINTENANCE" {
				t.Errorf("GPU 0: %s", r.cause(0))
			}
		})
	}
}

// Quiesce fails if a device node is still open: the driver could not be unloaded.
func TestQuiesceChecksOpenFiles(t *testing.T) {
	r := start(t, coretest.GPUs(1))
	path := filepath.Join(t.TempDir(), "dev/nvidia0")
	check.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	left, err := os.Create(path)
	check.NoError(t, err)
	r.rejects(quiesce, http.StatusServiceUnavailable, path)
	check.NoError(t, left.Close())
	r.output(quiesce)
}

func TestSignals(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	signals := make(chan os.Signal, 1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		control.Follow(ctx, signals, agentOf{r.monitor}, slog.New(slog.NewTextHandler(r.log, nil)))
	}()
	signals <- control.QuiesceSignal
	check.Until(r, "maintenance", func() bool { return r.cause(0) == "MAINTENANCE" })
	signals <- control.ResumeSignal
	check.Until(r, "its end", func() bool { return r.cause(0) == "" })
	signals <- control.ResumeSignal
	check.Until(r, "the rejection", func() bool { return strings.Contains(r.log.String(), "nothing to resume") })
	contains(t, r.log.String(), `msg="command by signal executed" persisted=false error="not on disk`, "persisted=true command=resume")
	cancel()
	<-ended
}

// A GPU is removed. The rule selects the same GPU until the command rebind.
func TestRebind(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(3), func(o *control.Options) {
		o.Config.Policy.Rules = []inventory.Rule{{
			Select:     inventory.Selector{At: "policy.yaml:3: rules[0].select", Indices: []gpu.DeviceIndex{{GPU: 1, Instance: -1}}},
			NotOffered: "display",
		}}
	})
	const at = "policy.yaml:3: rules[0].select: index 1 is bound to "
	contains(t, r.output(control.Rebind), "as the driver lists them now", at+string(coretest.GPU(1))+": unchanged")
	s := coretest.GPUs(3)
	s.Devices = s.Devices[1:]
	for i := range s.Devices {
		s.Devices[i].Index = i
	}
	r.machine.Set(s)
	check.Until(r, "the policy warning", func() bool { return len(r.monitor.Current().OutdatedBindings()) > 0 })
	inspected := r.output(inspect(false))
	contains(t, inspected, "policy warning: "+at+string(coretest.GPU(1))+"; by the present order", "run the command rebind",
		"binding: "+at+string(coretest.GPU(1)), "1 (policy: 2)")
	contains(t, r.output(control.Rebind), at+string(coretest.GPU(2))+", previously to "+string(coretest.GPU(1)))
	if f := r.monitor.Current().OutdatedBindings(); len(f) != 0 {
		t.Errorf("drift after rebind: %q", f)
	}
	contains(t, r.log.String(), "policy position rebound by operator", "uid=")
	r.machine.FailSession(gpu.ErrDriverLost)
	check.Until(r, "the loss of the driver", func() bool { return r.monitor.Current().Driver().State != gpu.DriverReady })
	r.rejects(control.Rebind, http.StatusConflict, "present order of devices is unknown")
}

// disk is a store that discards what it saves, or fails. It is safe for concurrent use.
type disk struct {
	mu   sync.Mutex
	err  error
	hang chan struct{} // Save waits until it is closed; nil = it does not
}

func (d *disk) Load() (core.Checkpoint, string) { return core.Checkpoint{}, "boot" }
func (d *disk) Missing() bool                   { return false }
func (d *disk) SetAside(error)                  {}
func (d *disk) Save(core.Checkpoint) error {
	d.mu.Lock()
	err, hang := d.err, d.hang
	d.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return err
}

func (d *disk) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

const full = "no space left on device"

// The output of a command has the reason if a restart of the agent reverts it.
func TestCommandsThatAreNotOnDisk(t *testing.T) {
	t.Parallel()
	d := &disk{}
	r := startWith(t, coretest.GPUs(8), d)
	r.xid(1, 95)
	for _, c := range []struct {
		name string
		verb command
		want string // before the reason; not in the output if the command is on disk
	}{
		{"ignore", with(control.Ignore, control.IgnoreArgs{GPU: "1", Until: "4h"}), "a restart of the agent reverts it: "},
		{"clear", with(control.Clear, control.ClearArgs{GPU: "1"}), "a restart of the agent reverts it: "},
		{"quiesce", quiesce, "maintenance is active, but a restart of the agent ends it: "},
		{"resume", control.Resume, "a restart of the agent may begin it again: "},
	} {
		d.fail(errors.New(full))
		if got := r.output(c.verb); !strings.Contains(got, c.want+"not on disk: "+full) {
			t.Errorf("%s, which is not on disk: %q", c.name, got)
		}
		d.fail(nil)
		if c.name == "clear" {
			r.xid(1, 95)
		}
		if c.name == "resume" {
			r.output(quiesce)
		}
		if got := r.output(c.verb); strings.Contains(got, c.want) || strings.Contains(got, "disk") {
			t.Errorf("%s, which is on disk: %q", c.name, got)
		}
	}
	contains(t, r.log.String(), "persisted=false", "persisted=true", full)
}

// A disk that hangs delays the command by a second.
func TestQuiesceWithADiskThatHangs(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	r := startWith(t, coretest.GPUs(1), &disk{hang: hang})
	defer close(hang)
	contains(t, r.output(quiesce), "driver released", "a restart of the agent ends it: not on disk yet")
}

// Without a state directory a restart ends the maintenance; it also drops the conditions that were cleared.
func TestCommandsWithoutAStateDirectory(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2))
	r.xid(1, 95)
	if got := r.output(with(control.Ignore, control.IgnoreArgs{GPU: "1", Until: "4h"})); strings.Contains(got, "restart") {
		t.Errorf("ignore: %q", got)
	}
	contains(t, r.output(quiesce), "a restart of the agent ends it: not on disk: no state directory is set")
	if got := r.output(control.Resume); strings.Contains(got, "restart") {
		t.Errorf("resume: %q", got)
	}
}

func TestDebug(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 11, 21, 15, 0, 0, 0, time.UTC)
	r := start(t, coretest.GPUs(2), func(o *control.Options) {
		o.Endpoints = func() []report.Endpoint {
			return []report.Endpoint{{
				Resource: "nvidia.com/gpu", Status: "connected", Since: since, Registrations: 3, Responses: 7,
				LastError: "the kubelet's stream ended", LastErrorAt: since,
			}}
		}
	})
	r.hang()
	debug := func(asJSON bool) command {
		return func(ctx context.Context, path string, out io.Writer) error {
			return control.Debug(ctx, path, out, asJSON)
		}
	}
	contains(t, r.output(debug(false)), "pid ", "open device nodes: none", "monitor ", "event wait ", "nvmlProbe", "2026-11-21T15:00:00.000Z the kubelet's stream ended",
		"control_test.TestDebug", "goroutine ")
	var d report.Debug
	err := json.Unmarshal([]byte(r.output(debug(true))), &d)
	if err != nil || d.PID != os.Getpid() || d.Threads == 0 || d.FileDescriptors == 0 || d.HeapBytes == 0 || d.HealthChecks == 0 || len(d.Tasks) < 2 {
		t.Errorf("%v: %+v", err, d)
	}
	for _, p := range d.Tasks {
		if p.Overdue {
			t.Errorf("overdue: %+v", p)
		}
	}
}
