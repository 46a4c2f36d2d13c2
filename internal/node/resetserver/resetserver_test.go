package resetserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// machine is a node whose resets end as a test sets it.
type machine struct {
	mu    sync.Mutex
	calls []string
	look  gpureset.Look
	err   error         // of each call but Look
	hold  chan struct{} // a reset waits for its end; may be nil
}

func (m *machine) call(what string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, what)
	return m.err
}

func (m *machine) made() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.calls, ", ")
}

func (m *machine) Ready(context.Context) error { return m.call("ready") }

func (m *machine) Look(_ context.Context, t gpureset.Target) (gpureset.Look, error) {
	_ = m.call(fmt.Sprint("look ", t.GPU, " ", t.Minor))
	return m.look, nil
}

func (m *machine) Reset(ctx context.Context, t gpureset.Target) error {
	err := m.call(fmt.Sprint("reset ", t.GPU, " ", t.Minor))
	if m.hold != nil {
		select {
		case <-m.hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (m *machine) Restore(_ context.Context, id gpu.DeviceID) error {
	return m.call("restore " + string(id))
}

var target = gpureset.Target{GPU: "GPU-1", Minor: 3}

// rig is a server with its client. The GPU is taken for a reset.
type rig struct {
	*machine
	Client
	dir  string
	log  *logbuffer.Buffer
	stop func() // SIGTERM, and waits for the end
}

func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{machine: &machine{}, dir: coretest.ShortDir(t), log: &logbuffer.Buffer{}}
	r.Client = Client{Socket: Path(r.dir)}
	r.mark(t, inventory.Reset)
	s := &Server{StateDir: r.dir, Resetter: r.machine, Lock: gpureset.NewLock(r.dir), Log: slog.New(slog.NewTextHandler(r.log, nil))}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	r.stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(r.stop)
	check.Until(t, "the server listens", func() bool { return r.Client.Ready(ctx) == nil })
	r.calls = nil
	return r
}

func (r *rig) mark(t *testing.T, p inventory.Purpose) {
	t.Helper()
	check.NoError(t, ownership.Write(r.dir, ownership.File{Taken: map[gpu.DeviceID]ownership.Mark{"GPU-1": {Agent: ownership.Agents()[0], Purpose: p}}}))
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the server serves root only")
	}
}

// What the client returns is what the resetter of the server does.
func TestErrorsSurviveTheWire(t *testing.T) {
	needRoot(t)
	r := start(t)
	refusedError := &gpureset.RefusedError{GPU: "GPU-1", Refusal: gpureset.Linked, Text: "nvidia-smi's text"}
	for name, err := range map[string]error{
		"none":        nil,
		"in use":      &gpureset.InUseError{GPU: "GPU-1", Clients: []gpureset.Client{{PID: 7, Name: "python3", Group: "/pod"}, {PID: 8}}},
		"refused":     refusedError,
		"unavailable": &gpureset.UnavailableError{Remedy: "install it", Err: errors.New("there is no nvidia-smi")},
		"persistence": &gpureset.PersistenceError{GPU: "GPU-1", Err: refusedError},
		"both":        errors.Join(refusedError, &gpureset.PersistenceError{GPU: "GPU-1", Err: errors.New("it hangs")}),
		"another":     errors.New("another"),
	} {
		r.err = err
		for call, got := range map[string]error{"ready": r.Client.Ready(t.Context()), "reset": r.Client.Reset(t.Context(), target), "restore": r.Client.Restore(t.Context(), "GPU-1")} {
			if !reflect.DeepEqual(got, err) {
				t.Errorf("%s: %s: %v, want %v", name, call, got, err)
			}
		}
	}
	for _, look := range []gpureset.Look{{}, {Persistence: true}, {Clients: []gpureset.Client{{PID: 7, Name: "python3", Group: "/pod"}}}} {
		r.look, r.calls = look, nil
		if got, err := r.Client.Look(t.Context(), target); err != nil || !reflect.DeepEqual(got, look) || r.made() != "look GPU-1 3" {
			t.Errorf("%+v, %v, %q", got, err, r.made())
		}
	}
}

// The server does not rely on the agent that asks.
func TestServerChecksWhatItResets(t *testing.T) {
	needRoot(t)
	r := start(t)
	isUnavailable := func(err error) bool { _, ok := errors.AsType[*gpureset.UnavailableError](err); return ok }
	r.mark(t, inventory.Proof)
	if err := r.Client.Reset(t.Context(), target); !isUnavailable(err) || r.made() != "" {
		t.Errorf("taken for a proof: %v, %q", err, r.made())
	}
	check.NoError(t, os.Remove(r.dir+"/"+ownership.FileName))
	if err := r.Client.Reset(t.Context(), target); !isUnavailable(err) || r.made() != "" {
		t.Errorf("not taken: %v, %q", err, r.made())
	}
	check.NoError(t, os.WriteFile(r.dir+"/"+ownership.FileName, []byte("{"), 0o600))
	if err := r.Client.Reset(t.Context(), target); err == nil || r.made() != "" {
		t.Errorf("not known: %v, %q", err, r.made())
	}
	r.mark(t, inventory.Reset)
	r.look.Clients = []gpureset.Client{{PID: 7}}
	err := r.Client.Reset(t.Context(), target)
	if e, ok := errors.AsType[*gpureset.InUseError](err); !ok || len(e.Clients) != 1 || strings.Contains(r.made(), "reset") {
		t.Errorf("open in a process: %v, %q", err, r.made())
	}
	for _, id := range []gpu.DeviceID{"", "0", "GPU-1,GPU-2", "GPU-", "MIG-1", "-L"} {
		if _, err := r.Client.Look(t.Context(), gpureset.Target{GPU: id}); err == nil {
			t.Errorf("%q is a GPU", id)
		}
	}
	if !strings.Contains(r.log.String(), "GPU is not reset") || !strings.Contains(r.log.String(), "GPU-1") {
		t.Errorf("log %s", r.log)
	}
}

func TestOneResetAtATime(t *testing.T) {
	needRoot(t)
	r := start(t)
	r.hold = make(chan struct{})
	ended := make(chan error)
	go func() { ended <- r.Client.Reset(t.Context(), target) }()
	check.Until(t, "it is reset", func() bool { return strings.Contains(r.made(), "reset") })
	if _, ok := errors.AsType[*gpureset.BusyError](r.Client.Reset(t.Context(), target)); !ok {
		t.Error("two resets at once")
	}
	if held, err := filelock.IsHeld(gpureset.LockPath(filepath.Dir(r.Socket))); !held || err != nil {
		t.Errorf("other processes of the node do not see it: %t, %v", held, err)
	}
	if _, ok := errors.AsType[*gpureset.BusyError](r.Client.Restore(t.Context(), "GPU-2")); !ok || strings.Contains(r.made(), "restore") {
		t.Error("a persistence mode is turned on during a reset")
	}
	close(r.hold)
	check.NoError(t, <-ended, r.Client.Reset(t.Context(), target))
}

// A client that leaves does not end a reset that has begun.
func TestClientThatLeaves(t *testing.T) {
	needRoot(t)
	r := start(t)
	r.hold = make(chan struct{})
	conn, err := net.Dial("unix", r.Socket)
	check.NoError(t, err)
	body := `{"gpu":"GPU-1","minor":3}`
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", resetURL, len(body), body)
	check.NoError(t, err)
	check.Until(t, "it is reset", func() bool { return strings.Contains(r.made(), "reset") })
	check.NoError(t, conn.Close())
	<-time.After(50 * time.Millisecond) // for the server to notice it
	close(r.hold)
	check.Until(t, "it was reset", func() bool { return strings.Contains(r.log.String(), "GPU was reset") })
}

// TERM does not end a reset that has begun.
func TestResetThatHasBegunGoesOn(t *testing.T) {
	needRoot(t)
	r := start(t)
	r.hold = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Client.Reset(ctx, target) }()
	check.Until(t, "it is reset", func() bool { return strings.Contains(r.made(), "reset") })
	cancel() // the agent ends, and waits for it
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		r.stop()
	}()
	check.Until(t, "the server takes no request", func() bool { return r.Client.Ready(t.Context()) != nil })
	select {
	case <-stopped:
		t.Error("the server has ended during a reset")
	case err := <-ended:
		t.Errorf("the client has not waited: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(r.hold)
	check.NoError(t, <-ended)
	<-stopped
	if err := r.Client.Reset(ctx, target); !errors.Is(err, context.Canceled) {
		t.Errorf("begun after the end: %v", err)
	}
}

// The GPU may be in any state.
func TestServerThatIsKilled(t *testing.T) {
	for name, c := range map[string]struct {
		answers     string
		persistence bool
	}{
		"before its answer":        {"", false},
		"with persistence mode on": {"HTTP/1.1 200 OK\r\n" + persistenceHeader + ": on\r\nTransfer-Encoding: chunked\r\n\r\n", true},
	} {
		socket := coretest.ShortDir(t) + "/s"
		l, err := net.Listen("unix", socket)
		check.NoError(t, err)
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = http.ReadRequest(bufio.NewReader(conn))
				_, _ = conn.Write([]byte(c.answers))
				_ = conn.Close()
			}
		}()
		err = Client{socket}.Reset(t.Context(), target)
		e, ok := errors.AsType[*gpureset.RefusedError](err)
		_, left := errors.AsType[*gpureset.PersistenceError](err)
		if !ok || e.Refusal != gpureset.Other || e.GPU != "GPU-1" || left != c.persistence {
			t.Errorf("%s: %v", name, err)
		}
		if err := (Client{socket}).Ready(t.Context()); err == nil {
			t.Errorf("%s: it is ready", name)
		}
		check.NoError(t, l.Close())
	}
}

func TestPersistenceModeIsToldBeforeTheReset(t *testing.T) {
	needRoot(t)
	r := start(t)
	r.look.Persistence, r.hold = true, make(chan struct{})
	defer close(r.hold)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.Socket)
	}}}
	body, err := json.Marshal(target)
	check.NoError(t, err)
	resp, err := client.Post("http://a"+resetURL, "application/json", strings.NewReader(string(body)))
	check.NoError(t, err)
	if resp.Header.Get(persistenceHeader) == "" {
		t.Error("a client does not know that the mode was on")
	}
	check.NoError(t, resp.Body.Close())
}

func TestNoComponent(t *testing.T) {
	c := Client{Socket: t.TempDir() + "/reset.sock"}
	_, look := c.Look(t.Context(), target)
	for what, err := range map[string]error{"ready": c.Ready(t.Context()), "look": look, "reset": c.Reset(t.Context(), target), "restore": c.Restore(t.Context(), "GPU-1")} {
		if e, ok := errors.AsType[*gpureset.UnavailableError](err); !ok || !strings.Contains(e.Remedy, "deploy/reset") || strings.Contains(err.Error(), "http:") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
