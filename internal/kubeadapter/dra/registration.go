package dra

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/grpc"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	"k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
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
)

// supportedVersions are the services of a socket. Of those of DRA the kubelet takes the first that it knows.
func supportedVersions() []string {
	return []string{dra.DRAPluginService, v1beta1Name, health.DRAResourceHealthService, v1alpha1.DRAResourceHealthService}
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
		instance = pluginsocket.Nonce()
	}
	path := filepath.Join(dir, SocketPrefix+instance+socketSuffix)
	if len(path) > pluginsocket.MaxPath {
		return &pluginsocket.PathError{Path: path, Remedy: "the kubelet's --root-dir, or the instance name, must be shorter"}
	}
	g := a.newServer()
	var serving sync.WaitGroup
	var l *pluginsocket.Socket
	task := a.opts.Watchdog.Register("plugin registry")
	dirwatch.Directory{
		Path: dir, Interval: a.limits.socketPoll, PollInterval: a.limits.socketPoll, Log: a.opts.Log.With("directory", dir), Task: task,
		Relevant: func(name string) bool { return name == filepath.Base(path) },
	}.Watch(ctx, func() {
		if l.Present() {
			return
		}
		_ = l.Close() // its file is gone
		var err error
		if l, err = a.listen(ctx, path); err != nil {
			a.setReason(err.Error())
			return
		}
		current := l
		serving.Go(func() { _ = g.Serve(current) }) // ends with the listener, and closes it
	})
	task.Done()
	_ = l.Close() // a socket that is left is removed by the next agent
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

// listen makes the socket. The folder is the kubelet's, which makes it.
func (a *Adapter) listen(ctx context.Context, path string) (*pluginsocket.Socket, error) {
	dir := filepath.Dir(path)
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("waiting for the kubelet: %w", err)
	}
	pluginsocket.RemoveStale(ctx, filepath.Join(dir, SocketPrefix+"*"+socketSuffix), a.opts.Log)
	s, err := pluginsocket.Listen(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	a.setSocket(path)
	a.opts.Log.Info("serving, waiting for the kubelet to register the driver", "socket", path)
	return s, nil
}

// Alive calls the plugin over its socket, as the kubelet does. It fails if a socket that is served does not answer.
func (a *Adapter) Alive(ctx context.Context) error {
	return pluginsocket.CallOwn(ctx, func() string { return a.Stats().Socket }, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := dra.NewDRAPluginClient(conn).NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{})
		return err
	})
}
