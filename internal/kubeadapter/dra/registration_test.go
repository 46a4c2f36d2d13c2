package dra

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// The kubelet takes the first version that it knows, and is answered without a driver. A refusal is in the status, in a warning and once
// in the log.
func TestRegistration(t *testing.T) {
	log := &logbuffer.Buffer{}
	r := newRig(t, nil, func(a *Adapter) { a.opts.Log = slog.New(slog.NewTextHandler(log, nil)) })
	refused := &registration.RegistrationStatus{Error: "invalid versions:\n too old"}
	for range 3 {
		info := r.register(refused)
		if info.GetType() != "DRAPlugin" || info.GetName() != "gpu.nvidia.com" || info.GetEndpoint() != "" ||
			!slices.Equal(info.GetSupportedVersions(), []string{"v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"}) {
			t.Error(info)
		}
	}
	const text = "the kubelet refuses the driver: invalid versions: too old"
	if err := r.adapter.Ready(); err == nil || err.Error() != text {
		t.Error(err)
	}
	if !slices.Equal(problem.Lines(r.adapter.Problems()), []string{text}) || strings.Count(log.String(), text) != 1 {
		t.Errorf("%q, log %s", problem.Lines(r.adapter.Problems()), log)
	}
	if s := r.adapter.Stats(); s.Registered || !s.Refused || s.RegistrationErrors != 3 || s.Infos != 3 || s.LastError != text {
		t.Errorf("%+v", s)
	}
	r.register(&registration.RegistrationStatus{PluginRegistered: true})
	r.await("readiness", func() bool { return r.adapter.Ready() == nil })
	if s := r.adapter.Stats(); !s.Registered || s.Refused || s.Reason != "" || s.Registrations != 1 || len(problem.Lines(r.adapter.Problems())) > 0 {
		t.Errorf("%+v, %q", s, problem.Lines(r.adapter.Problems()))
	}
	r.must(r.adapter.Alive(r.ctx))
}

// A path of 107 bytes is served; a longer one fails before anything is made, with the numbers and the remedy.
func TestSocketPathLength(t *testing.T) {
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Mkdir(filepath.Join(dir, registryDir), 0o755); err != nil {
		t.Fatal(err)
	}
	room := pluginsocket.MaxPath - len(filepath.Join(dir, registryDir, SocketPrefix+socketSuffix))
	for n, ok := range map[int]bool{room: true, room + 1: false} {
		a := New(coretest.NewSource(), Options{Node: node, KubeletDir: dir, StateDir: dir, API: &api{}, Instance: strings.Repeat("x", n)})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		for ok && a.Stats().Socket == "" && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		if socket := a.Stats().Socket; ok && len(socket) != pluginsocket.MaxPath {
			t.Errorf("socket %q", socket)
		} else if ok {
			cancel()
		}
		err := <-ended
		cancel()
		if _, long := errors.AsType[*pluginsocket.PathError](err); long == ok || !ok && !strings.Contains(err.Error(), "has 108 bytes, and a socket can have 107: the kubelet's --root-dir") {
			t.Errorf("%d: %v", n, err)
		}
		if left, _ := os.ReadDir(filepath.Join(dir, registryDir)); len(left) > 0 {
			t.Errorf("%d: %v is left", n, left)
		}
	}
}

// Sockets of agents that were killed are removed; those of running agents, of other drivers and other files stay. Two agents have two
// sockets, and the end of one does not touch the other.
func TestSockets(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	dir := filepath.Join(r.dir, registryDir)
	listen := func(name string, dead bool) string {
		path := filepath.Join(dir, name)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		r.must(err)
		if dead {
			l.SetUnlinkOnClose(false)
			_ = l.Close()
		} else {
			t.Cleanup(func() { _ = l.Close() })
		}
		return path
	}
	first := r.adapter.Stats().Socket
	killed := listen("gpu.nvidia.com-tandem-0badcafe-reg.sock", true)
	stay := []string{
		first, listen("gpu.nvidia.com-tandem-12345678-reg.sock", false), listen("gpu.nvidia.com-reg.sock", true),
		listen("gpu.nvidia.com-3f0e-reg.sock", true), listen("nic.example.com-reg.sock", true), filepath.Join(dir, "gpu.nvidia.com-tandem-file-reg.sock"),
	}
	r.must(os.WriteFile(stay[len(stay)-1], nil, 0o600))
	stopFirst := r.stop
	r.stop = func() {}
	firstAdapter := r.adapter
	r.start()
	r.wantFile(killed, false)
	second := r.adapter.Stats().Socket
	for _, path := range append(slices.Clone(stay), second) {
		r.wantFile(path, true)
	}
	if second == first {
		t.Error("two agents have one socket")
	}
	r.register(&registration.RegistrationStatus{PluginRegistered: true})
	stopSecond, conn := r.stop, r.conn
	r.conn = nil
	stopFirst()
	if r.wantFile(first, false); firstAdapter.Stats().Socket != "" {
		t.Error("an agent that has ended has a socket")
	}
	r.wantFile(second, true)
	r.conn, r.stop = conn, stopSecond
	r.register(&registration.RegistrationStatus{PluginRegistered: true})
}

// Without the kubelet's folder the agent waits. When the folder or the socket is removed or replaced, it serves on a new socket.
func TestFolderOfTheKubelet(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	dir := filepath.Join(r.dir, registryDir)
	served := func() bool {
		s := r.adapter.Stats()
		if s.Socket == "" {
			return false
		}
		conn, err := net.Dial("unix", s.Socket)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}
	r.must(os.Rename(dir, dir+".1"))
	r.await("a wait for the kubelet", func() bool {
		s := r.adapter.Stats()
		return strings.HasPrefix(s.Reason, "waiting for the kubelet") && s.Socket == ""
	})
	r.must(os.Mkdir(dir, 0o755))
	r.await("a socket in the new folder", served)
	r.must(os.Remove(r.adapter.Stats().Socket))
	r.await("a socket in place of the one that was removed", served)
	r.must(os.Rename(dir, dir+".old"))
	r.must(os.Mkdir(dir, 0o755))
	r.await("a socket in the folder that replaced the other", served)
	path := r.adapter.Stats().Socket
	r.must(os.WriteFile(path+".file", nil, 0o600))
	r.must(os.Rename(path+".file", path))
	r.await("a reason", func() bool { return strings.HasPrefix(r.adapter.Stats().Reason, "socket: ") })
	r.must(os.Rename(dir, dir+".2"))
	r.must(os.Mkdir(dir, 0o755))
	r.await("a socket", served)
	r.conn = nil
	r.connect()
	r.register(&registration.RegistrationStatus{PluginRegistered: true})
}

// When the agent ends, its socket is removed and streams end, also of a call that waits; nothing is unprepared.
func TestEnd(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()))
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.mustPrepare("a")
	path := r.adapter.Stats().Socket
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	r.must(err)
	defer func() { _ = conn.Close() }()
	stream, err := healthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(r.ctx, &healthv1.NodeWatchResourcesRequest{})
	r.must(err)
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	r.api.fail(errors.New("connection refused"))
	done, calls := make(chan error, 1), r.api.count()
	go func() {
		_, err := dra.NewDRAPluginClient(conn).NodePrepareResources(r.ctx, &dra.NodePrepareResourcesRequest{Claims: claimsOf("b")})
		done <- err
	}()
	r.await("a call that waits", func() bool { return r.api.count() > calls })
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > 10*time.Second { // 1 s on a machine that has time
		t.Errorf("took %v", took)
	}
	r.wantFile(path, false)
	if _, err := stream.Recv(); err == nil {
		t.Error("the stream has not ended")
	}
	if err := <-done; err == nil {
		t.Error("the call has not ended")
	}
	r.await("end of all tasks", func() bool { return len(r.tasks.Tasks()) == 0 })
	r.wantRecord("a", prepared.Complete)
	if s := r.adapter.Stats(); s.Reason != "stopped" {
		t.Error(s.Reason)
	}
}
