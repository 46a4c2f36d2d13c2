package dra

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	"k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	// DefaultKubeletDir is the kubelet's default --root-dir.
	DefaultKubeletDir = "/var/lib/kubelet"

	// registryDir is the folder below it in which the kubelet looks for sockets of plugins (pkg/kubelet/kubelet_getters.go).
	registryDir = "plugins_registry"

	// SocketPrefix begins the names of this agent's sockets. Those of NVIDIA's driver are gpu.nvidia.com-reg.sock and
	// gpu.nvidia.com-UID-reg.sock.
	SocketPrefix = resourceslice.Driver + "-tandem-"
	socketSuffix = "-reg.sock"

	// maxSocketPath is the size of sun_path without its final NUL (unix(7)).
	maxSocketPath = 107
)

// supportedVersions are the services of a socket. Of those of DRA the kubelet takes the first that it knows.
func supportedVersions() []string {
	return []string{dra.DRAPluginService, v1beta1Name, health.DRAResourceHealthService, v1alpha1.DRAResourceHealthService}
}

// SocketPathError means that the path of the socket is too long for a socket.
type SocketPathError struct{ Path string }

// Error has the path and the remedy.
func (e *SocketPathError) Error() string {
	return fmt.Sprintf("socket path %s has %d bytes, and a socket can have %d: the kubelet's --root-dir, or the instance name, must be shorter",
		e.Path, len(e.Path), maxSocketPath)
}

// instanceName is a name that no other process has.
func instanceName() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// registrar is the registration service.
type registrar struct {
	registration.UnimplementedRegistrationServer
	*Adapter
}

// GetInfo implements the API. The kubelet waits for 1 s; it does not depend on anything.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	r.count(func(n *Stats) { n.Infos++ })
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: resourceslice.Driver, SupportedVersions: supportedVersions()}, nil
}

// NotifyRegistrationStatus implements the API. The kubelet tries again by itself after it has refused.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	reason, refused := "", !s.GetPluginRegistered()
	if refused {
		reason = "the kubelet refuses the driver: " + strings.Join(strings.Fields(s.GetError()), " ")
	}
	before := r.setRegistered(reason, refused)
	switch {
	case !refused:
		r.opts.Log.Info("registered", "driver", resourceslice.Driver)
	case before != reason:
		r.opts.Log.Error(reason)
	}
	watch.Notify(r.queries) // it may be another kubelet
	return &registration.RegistrationStatusResponse{}, nil
}

// serve serves all services on a socket in the kubelet's folder until ctx ends. If the socket or the folder is removed or replaced, it
// listens again; calls on connections of before go on.
func (a *Adapter) serve(ctx context.Context) error {
	dir := filepath.Join(a.opts.KubeletDir, registryDir)
	instance := a.opts.Instance
	if instance == "" {
		instance = instanceName()
	}
	path := filepath.Join(dir, SocketPrefix+instance+socketSuffix)
	if len(path) > maxSocketPath {
		return &SocketPathError{path}
	}
	g := a.newServer()
	var serving sync.WaitGroup
	var l *socket
	task := a.opts.Watchdog.Register("plugin registry")
	dirwatch.Directory{
		Path: dir, Interval: a.limits.socketPoll, PollInterval: a.limits.socketPoll, Log: a.opts.Log.With("directory", dir), Task: task,
		Relevant: func(name string) bool { return name == filepath.Base(path) },
	}.Watch(ctx, func() {
		if l.present() {
			return
		}
		l.close()
		var err error
		if l, err = a.listen(ctx, path); err != nil {
			a.setReason(err.Error())
			return
		}
		current := l
		serving.Go(func() {
			_ = g.Serve(current) // ends with the listener
			current.ended.Store(true)
		})
	})
	task.Done()
	l.close()
	a.setReason("stopped")
	close(a.stopping)
	stopped := make(chan struct{})
	go func() { g.GracefulStop(); close(stopped) }()
	watch.Await(context.Background(), stopped, a.limits.stop)
	g.Stop()
	serving.Wait()
	return nil
}

func (a *Adapter) newServer() *grpc.Server {
	g := grpc.NewServer()
	registration.RegisterRegistrationServer(g, &registrar{Adapter: a})
	s := &server{Adapter: a}
	dra.RegisterDRAPluginServer(g, s)
	g.RegisterService(&v1beta1, s)
	h := &healthServer{Adapter: a}
	health.RegisterDRAResourceHealthServer(g, h)
	v1alpha1.RegisterDRAResourceHealthServer(g, health.V1ServerWrapper{Server: h})
	return g
}

// socket is a listening socket. All methods of a nil *socket do nothing.
type socket struct {
	net.Listener
	path  string
	info  os.FileInfo
	ended atomic.Bool // no connection is accepted any more
}

// listen makes the socket. The folder is the kubelet's, which makes it.
func (a *Adapter) listen(ctx context.Context, path string) (*socket, error) {
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("waiting for the kubelet: %w", err)
	}
	a.removeStaleSockets(ctx, filepath.Dir(path))
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	a.setSocket(path)
	a.opts.Log.Info("serving, waiting for the kubelet to register the driver", "socket", path)
	return &socket{Listener: listener, path: path, info: info}, nil
}

// present reports whether the socket is still the one at its path.
func (s *socket) present() bool {
	if s == nil || s.ended.Load() {
		return false
	}
	now, err := os.Lstat(s.path)
	return err == nil && os.SameFile(s.info, now)
}

// close closes the listener and removes the socket, unless another one is in its place.
func (s *socket) close() {
	if s == nil {
		return
	}
	if u, ok := s.Listener.(*net.UnixListener); ok {
		now, err := os.Lstat(s.path)
		u.SetUnlinkOnClose(err == nil && os.SameFile(s.info, now))
	}
	_ = s.Close() // it may be closed
}

// removeStaleSockets removes the sockets of agents that have ended. One that accepts connections belongs to a running agent, as during
// an update. It is tried twice: a socket refuses connections between bind(2) and listen(2).
func (a *Adapter) removeStaleSockets(ctx context.Context, dir string) {
	paths, _ := filepath.Glob(filepath.Join(dir, SocketPrefix+"*"+socketSuffix)) // fails on a bad pattern only
	for _, path := range paths {
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
			continue
		}
		if !refuses(ctx, path) || !watch.Sleep(ctx, 20*time.Millisecond) || !refuses(ctx, path) {
			continue
		}
		if err := os.Remove(path); err != nil {
			a.opts.Log.Warn("stale socket not removed", "error", err)
			continue
		}
		a.opts.Log.Info("stale socket removed", "socket", path)
	}
}

// refuses reports whether no process listens on a socket.
func refuses(ctx context.Context, path string) bool {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// Alive calls the plugin over its socket, as the kubelet does. It fails if a socket that is served does not answer.
func (a *Adapter) Alive(ctx context.Context) error {
	path := a.Stats().Socket
	if path == "" {
		return nil
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := dra.NewDRAPluginClient(conn).NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{}); err != nil && a.Stats().Socket == path {
		return fmt.Errorf("socket %s: %s", filepath.Base(path), status.Convert(err).Message())
	}
	return nil
}
