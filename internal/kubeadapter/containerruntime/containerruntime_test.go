package containerruntime

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tandem-gpu/tandem/test/check"
)

// fakeRuntime has the generated service of the CRI.
type fakeRuntime struct {
	cri.UnimplementedRuntimeServiceServer
	version, config string
	err             error
	hang            chan struct{}
}

func (f *fakeRuntime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	name, version, _ := strings.Cut(f.version, " ")
	return &cri.VersionResponse{Version: "0.1.0", RuntimeName: name, RuntimeVersion: version, RuntimeApiVersion: "v1"}, nil
}

func (f *fakeRuntime) Status(_ context.Context, r *cri.StatusRequest) (*cri.StatusResponse, error) {
	if f.hang != nil {
		<-f.hang
	}
	s := &cri.StatusResponse{Status: &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{{Type: cri.RuntimeReady, Status: true}}}}
	if r.GetVerbose() {
		s.Info = map[string]string{"golang": `"go1.26"`, "config": f.config, "lastCNILoadStatus": "OK"}
	}
	return s, f.err
}

// serve serves a runtime until the end of the test, and returns its socket.
func serve(t *testing.T, f *fakeRuntime) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	check.NoError(t, err)
	g := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(g, f)
	var running sync.WaitGroup
	running.Go(func() { _ = g.Serve(listener) })
	t.Cleanup(func() { g.Stop(); running.Wait() })
	return path
}

// The configurations are abridged from those of the runtimes.
func TestRead(t *testing.T) {
	folders := []string{"/etc/cdi", "/var/run/cdi"}
	for name, c := range map[string]struct {
		runtime *fakeRuntime
		want    Info
	}{
		"containerd 1.7": {
			&fakeRuntime{version: "containerd 1.7.29", config: `{"containerd":{"defaultRuntimeName":"runc","runtimes":{"runc":{},"nvidia":{}}},"enableCDI":false,"cdiSpecDirs":["/etc/cdi","/var/run/cdi"],"rootDir":"/var/lib"}`},
			Info{"containerd", "1.7.29", new(false), folders, "runc", []string{"nvidia", "runc"}},
		},
		"containerd 2.2": {
			&fakeRuntime{version: "containerd v2.2.0", config: `{"enableCDI":true,"cdiSpecDirs":["/etc/cdi","/var/run/cdi"]}`},
			Info{Name: "containerd", Version: "v2.2.0", CDI: new(true), Folders: folders},
		},
		"containerd 2.4": {
			&fakeRuntime{version: "containerd v2.4.2", config: `{"cdiSpecDirs":["/etc/cdi","/var/run/cdi"]}`},
			Info{Name: "containerd", Version: "v2.4.2", Folders: folders},
		},
		"CRI-O": {
			&fakeRuntime{version: "cri-o 1.37.0", config: `{"sandboxImage":"pause","crio":{"DefaultRuntime":"crun","CDISpecDirs":["/etc/cdi","/var/run/cdi"]}}`},
			Info{Name: "cri-o", Version: "1.37.0", Folders: folders, DefaultRuntime: "crun"},
		},
		"an older CRI-O": {&fakeRuntime{version: "cri-o 1.24.0", config: `{"sandboxImage":"pause"}`}, Info{Name: "cri-o", Version: "1.24.0"}},
		"another":        {&fakeRuntime{version: "other 1", config: "no JSON"}, Info{Name: "other", Version: "1"}},
	} {
		got, err := Read(t.Context(), serve(t, c.runtime))
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}

// A runtime that refuses, hangs or is absent costs about a second; what it responded before is known.
func TestReadFails(t *testing.T) {
	hanging := make(chan struct{})
	defer close(hanging)
	for name, c := range map[string]struct {
		socket, want string
		info         Info
	}{
		"refuses": {serve(t, &fakeRuntime{version: "containerd 1", err: errors.New("not ready")}), "container runtime: Status: not ready", Info{Name: "containerd", Version: "1"}},
		"hangs":   {serve(t, &fakeRuntime{version: "containerd 1", hang: hanging}), "container runtime: Status: context deadline exceeded", Info{Name: "containerd", Version: "1"}},
		"absent":  {"/nowhere/containerd.sock", "container runtime: Version: ", Info{}},
	} {
		start := time.Now()
		got, err := Read(t.Context(), c.socket)
		if diff := cmp.Diff(c.info, got); diff != "" || err == nil || !strings.HasPrefix(err.Error(), c.want) || time.Since(start) > 10*time.Second {
			t.Errorf("%s: after %v: %v %s", name, time.Since(start), err, diff)
		}
	}
}

// lateTimer is a context with a deadline that this process has not noticed, as on a busy machine.
type lateTimer struct {
	context.Context
	deadline time.Time
}

func (c lateTimer) Deadline() (time.Time, bool) { return c.deadline, true }

// The runtime has the deadline, too, and resets the stream when it has passed: the error is that of the deadline, whichever of both is first.
func TestReadFailsByTheDeadlineOfTheRuntime(t *testing.T) {
	hanging := make(chan struct{})
	defer close(hanging)
	socket := serve(t, &fakeRuntime{version: "containerd 1", hang: hanging})
	_, err := Read(lateTimer{t.Context(), time.Now().Add(100 * time.Millisecond)}, socket)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// Whatever a socket responds is a message or an error.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{0x12, 3, 'a', 'b', 'c', 0x08, 1})
	f.Add([]byte{0x12, 200})
	f.Fuzz(func(t *testing.T, raw []byte) {
		if m, err := decode(raw); err == nil {
			for number := range m {
				if len(m.text(number)) > len(raw) {
					t.Error("longer than the message")
				}
			}
		}
	})
}
