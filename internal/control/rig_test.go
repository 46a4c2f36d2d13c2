package control_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// rig is a monitor of a scripted machine, served at a socket.
type rig struct {
	*testing.T
	machine *coretest.Machine
	monitor *monitor.Monitor
	path    string
	socket  *control.Socket
	log     *record
	options control.Options
	stop    func() // ends the agent and waits for it
}

// record is a log to be read while it is written.
type record struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// shortDir is a folder in which the path of a socket is short enough, whatever the test is called.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// start runs an agent on a machine, whose GPUs are checked often and get well slowly.
func start(t *testing.T, s core.Snapshot, change ...func(*control.Options)) *rig {
	t.Helper()
	return startWith(t, s, nil, change...)
}

// startWith is start for an agent with a history.
func startWith(t *testing.T, s core.Snapshot, store monitor.Store, change ...func(*control.Options)) *rig {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG = core.MIGMixed
	cfg.Probe, cfg.Rescan, cfg.Health.Dwell = 10*time.Millisecond, 10*time.Millisecond, time.Hour
	r := &rig{
		T: t, machine: coretest.NewMachine(s), log: &record{},
		path: control.Path(filepath.Join(shortDir(t), "tandem"), "k8s-gpu"),
	}
	log := slog.New(slog.NewTextHandler(r.log, nil))
	r.options = control.Options{Config: cfg, Log: log}
	for _, c := range change {
		c(&r.options)
	}
	r.monitor = monitor.New(r.machine.Open, r.options.Config, slog.New(slog.DiscardHandler), store)
	ctx, cancel := context.WithCancel(context.Background())
	var agent sync.WaitGroup
	agent.Go(func() {
		if err := r.monitor.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r.socket = control.NewSocket(r.path)
	agent.Go(func() { r.socket.Serve(ctx, r.monitor, r.options) })
	r.stop = sync.OnceFunc(func() {
		cancel()
		agent.Wait()
	})
	t.Cleanup(r.stop)
	r.await("an answer", func() bool {
		report, err := control.Dial(r.path).Report(t.Context())
		return err == nil && report.Driver.State == "ready"
	})
	return r
}

// await polls for what comes by itself.
func (r *rig) await(what string, is func() bool) {
	r.Helper()
	await(r.T, what, is)
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("never came: %s", what)
		}
	}
}

// xid has a GPU report an XID, and waits until that counts.
func (r *rig) xid(gpu int, code uint64) {
	r.Helper()
	r.machine.SendEvent(core.Observation{At: core.WholeGPU(coretest.GPU(gpu)), Kind: core.XID, Code: code})
	r.await("the XID", func() bool { return r.cause(gpu) != "" })
}

// cause is what is behind the health of a GPU.
func (r *rig) cause(gpu int) string {
	return r.monitor.State().Ledger.Health(core.WholeGPU(coretest.GPU(gpu))).Cause()
}

// says runs a verb and returns what it writes.
func (r *rig) says(verb func(ctx context.Context, path string, out *bytes.Buffer) error) string {
	r.Helper()
	var out bytes.Buffer
	if err := verb(r.Context(), r.path, &out); err != nil {
		r.Errorf("refused: %v", err)
	}
	return out.String()
}

// wants checks that a text has all the parts.
func wants(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in:\n%s", part, text)
		}
	}
}
