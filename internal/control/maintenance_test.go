package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/report"
)

func quiesce(args control.QuiesceArgs) func(context.Context, string, *bytes.Buffer) error {
	return func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Quiesce(ctx, path, args, out)
	}
}

func resume(ctx context.Context, path string, out *bytes.Buffer) error {
	return control.Resume(ctx, path, out)
}

func TestQuiesceAndResume(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(8))
	contains(t, r.output(quiesce(control.QuiesceArgs{})), "driver released (driver released by order); devices: 8 unknown;", "not on disk", "resume")
	if n := r.machine.Sessions(); n != 0 {
		t.Errorf("%d sessions are open", n)
	}
	report, err := control.Dial(r.path).Report(t.Context())
	if err != nil || report.Driver.State != "released" || report.Devices[0].Cause != "MAINTENANCE" || report.Devices[0].Schedulable {
		t.Errorf("%v, driver %+v, device %+v", err, report.Driver, report.Devices[0])
	}
	if got := r.output(resume); got != "driver ready 580.95.05; devices: 8 healthy\n" {
		t.Errorf("resume writes %q", got)
	}
	var out bytes.Buffer
	refused, ok := errors.AsType[*control.RefusedError](resume(t.Context(), r.path, &out))
	if !ok || refused.Status != http.StatusConflict {
		t.Errorf("resume twice: %v", refused)
	}
	contains(t, r.log.String(), "driver quiesced by operator", "driver resumed by operator", "uid=")
}

func TestQuiesceUntilATime(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	for _, arg := range []string{"soon", "-1h", "2020-01-01T00:00:00Z"} {
		refused, ok := errors.AsType[*control.RefusedError](quiesce(control.QuiesceArgs{For: arg})(t.Context(), r.path, &bytes.Buffer{}))
		if !ok || refused.Status != http.StatusBadRequest {
			t.Errorf("%q: %v", arg, refused)
		}
	}
	if r.cause(0) != "" {
		t.Error("a rejected command had an effect")
	}
	contains(t, r.output(quiesce(control.QuiesceArgs{For: "3s"})), "until 20")
	r.await("the end", func() bool { return r.cause(0) == "" })
}

// Quiesce fails while a driver call hangs.
func TestQuiesceWhileACallHangs(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2))
	release := r.machine.Hang("Probe", gpu.WholeGPU(coretest.GPU(1)))
	defer release()
	r.await("the call", func() bool { return len(r.monitor.Stats().Calls) > 0 })
	err := quiesce(control.QuiesceArgs{})(t.Context(), r.path, &bytes.Buffer{})
	refused, ok := errors.AsType[*control.RefusedError](err)
	if !ok || !strings.Contains(refused.Text, "nvmlProbe") || !strings.Contains(refused.Text, "has begun") {
		t.Fatalf("got %v", err)
	}
	if r.cause(0) != "MAINTENANCE" {
		t.Errorf("GPU 0: %s", r.cause(0))
	}
}

// Quiesce fails if a device node is still open: the driver could not be unloaded.
func TestQuiesceChecksOpenFiles(t *testing.T) {
	r := start(t, coretest.GPUs(1))
	path := filepath.Join(t.TempDir(), "dev/nvidia0")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	left, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	err = quiesce(control.QuiesceArgs{})(t.Context(), r.path, &bytes.Buffer{})
	if refused, ok := errors.AsType[*control.RefusedError](err); !ok || !strings.Contains(refused.Text, path) {
		t.Errorf("got %v", err)
	}
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	r.output(quiesce(control.QuiesceArgs{}))
}

func TestSignals(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	signals := make(chan os.Signal, 1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		control.Follow(ctx, signals, r.monitor, slog.New(slog.NewTextHandler(r.log, nil)))
	}()
	signals <- control.QuiesceSignal
	r.await("maintenance", func() bool { return r.cause(0) == "MAINTENANCE" })
	signals <- control.ResumeSignal
	r.await("its end", func() bool { return r.cause(0) == "" })
	signals <- control.ResumeSignal
	r.await("the rejection", func() bool { return strings.Contains(r.log.String(), "nothing to resume") })
	cancel()
	<-ended
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
	release := r.machine.Hang("Probe", gpu.WholeGPU(coretest.GPU(1)))
	defer release()
	r.await("the call", func() bool { return len(r.monitor.Stats().Calls) > 0 })
	contains(t, r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Debug(ctx, path, out, false)
	}), "pid ", "open device nodes: none", "monitor ", "event wait ", "nvmlProbe", "2026-11-21T15:00:00.000Z the kubelet's stream ended",
		"control_test.TestDebug", "goroutine ")
	var d report.Debug
	err := json.Unmarshal([]byte(r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Debug(ctx, path, out, true)
	})), &d)
	if err != nil || d.PID != os.Getpid() || d.Threads == 0 || d.FileDescriptors == 0 || d.HeapBytes == 0 || d.HealthChecks == 0 || len(d.Tasks) < 2 {
		t.Errorf("%v: %+v", err, d)
	}
	for _, p := range d.Tasks {
		if p.Overdue {
			t.Errorf("overdue: %+v", p)
		}
	}
}
