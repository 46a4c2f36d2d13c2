// Package kubelettest has a small kubelet for the tests of device plugins: the registration service and
// the client of one folder, with the kubelet's habits. It serves tests and the demo; nothing in the
// agents imports it.
//
// Its habits are those of kubelet 1.37 (pkg/kubelet/cm/devicemanager): when it starts it removes every
// socket in the folder and then listens; inside Register it dials back and asks for the options; then
// it opens ListAndWatch once and never again; a stream that ends makes every device of the resource
// unhealthy. What differed in 1.34 to 1.36 can be chosen.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Behaviour is how a kubelet treats plugins. The zero value is kubelet 1.37 in good health.
type Behaviour struct {
	OneClientPerResource bool          // 1.34 to 1.36: the end of an older stream tears down the newest
	Refuse               error         // what Register answers
	Delay                time.Duration // before Register is looked at
	NoStream             bool          // registers, but never opens ListAndWatch
}

// Registration is one accepted Register.
type Registration struct{ Resource, Endpoint string }

// Kubelet is a kubelet of one folder. Its methods are safe for concurrent use.
type Kubelet struct {
	v1beta1.UnimplementedRegistrationServer
	dir string

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced when anything below changes
	behaviour Behaviour
	server    *grpc.Server
	listener  *net.UnixListener
	clients   []*client // in the order in which they registered
	accepted  []Registration
	lists     map[string][][]*v1beta1.Device
	running   *sync.WaitGroup // of one start
}

// New returns a kubelet that is not running, for a folder that need not exist.
func New(dir string) *Kubelet {
	return &Kubelet{dir: dir, changed: make(chan struct{}), lists: map[string][][]*v1beta1.Device{}}
}

// Socket is the path of the registration socket.
func (k *Kubelet) Socket() string { return filepath.Join(k.dir, "kubelet.sock") }

// Behave changes how the kubelet treats plugins from now on.
func (k *Kubelet) Behave(b Behaviour) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.behaviour = b
}

// Start wipes the folder's sockets and listens.
func (k *Kubelet) Start() error {
	if err := os.MkdirAll(k.dir, 0o750); err != nil {
		return err
	}
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type() == os.ModeSocket {
			if err := os.Remove(filepath.Join(k.dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: k.Socket(), Net: "unix"})
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	running := &sync.WaitGroup{}
	server := grpc.NewServer()
	v1beta1.RegisterRegistrationServer(server, k)
	k.server, k.listener, k.running = server, listener, running
	running.Go(func() { _ = server.Serve(listener) })
	return nil
}

// Stop ends the kubelet in good order: its socket is removed and every stream is closed.
func (k *Kubelet) Stop() { k.stop(true) }

// Crash ends the kubelet as SIGKILL does: a socket file stays behind that nobody listens on.
func (k *Kubelet) Crash() { k.stop(false) }

func (k *Kubelet) stop(unlink bool) {
	k.mu.Lock()
	server, running, clients := k.server, k.running, k.clients
	if server == nil {
		k.mu.Unlock()
		return
	}
	k.listener.SetUnlinkOnClose(unlink)
	k.server, k.clients = nil, nil
	k.wake()
	k.mu.Unlock()
	server.Stop()
	for _, c := range clients {
		c.close()
	}
	running.Wait()
}

// Register implements the registration service.
func (k *Kubelet) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	k.mu.Lock()
	b := k.behaviour
	k.mu.Unlock()
	select {
	case <-time.After(b.Delay):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if b.Refuse != nil {
		return nil, b.Refuse
	}
	if r.GetVersion() != v1beta1.Version {
		return nil, status.Errorf(codes.Unknown, "requested API version %q is not supported by kubelet", r.GetVersion())
	}
	c, err := k.connect(ctx, r)
	if err != nil {
		return nil, status.Error(codes.Unknown, err.Error())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server == nil {
		c.close()
		return nil, status.Error(codes.Unavailable, "the kubelet is stopping")
	}
	if !b.OneClientPerResource && slices.ContainsFunc(k.clients, func(o *client) bool { return o.path == c.path }) {
		c.close()
		return nil, status.Errorf(codes.Unknown, "device plugin already connected: %s", c.path)
	}
	k.clients = append(k.clients, c)
	k.accepted = append(k.accepted, Registration{r.GetResourceName(), r.GetEndpoint()})
	k.wake()
	if !b.NoStream {
		k.running.Go(func() { k.watch(c) })
	}
	return &v1beta1.Empty{}, nil
}

// client is a connected plugin.
type client struct {
	resource, path string
	conn           *grpc.ClientConn
	plugin         v1beta1.DevicePluginClient
	ctx            context.Context // ends with close; of the stream
	cancel         context.CancelFunc
	devices        []*v1beta1.Device
}

func (c *client) close() {
	c.cancel()
	_ = c.conn.Close()
}

// connect dials back while Register is pending, as the kubelet does, and asks for the options.
func (k *Kubelet) connect(ctx context.Context, r *v1beta1.RegisterRequest) (*client, error) {
	path := filepath.Join(k.dir, r.GetEndpoint())
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	c := &client{resource: r.GetResourceName(), path: path, conn: conn, plugin: v1beta1.NewDevicePluginClient(conn)}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	// The kubelet's dial blocks for up to 10 s, also on a path that is not there.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := c.plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true)); err != nil {
		c.close()
		return nil, fmt.Errorf("failed to get device plugin options: %w", err)
	}
	return c, nil
}

// watch is ListAndWatch from its opening to its end.
func (k *Kubelet) watch(c *client) {
	defer k.disconnect(c)
	stream, err := c.plugin.ListAndWatch(c.ctx, &v1beta1.Empty{})
	if err != nil {
		return
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return
		}
		k.mu.Lock()
		c.devices = r.GetDevices()
		k.lists[c.resource] = append(k.lists[c.resource], r.GetDevices())
		k.wake()
		k.mu.Unlock()
	}
}

func (k *Kubelet) disconnect(c *client) {
	k.mu.Lock()
	defer k.mu.Unlock()
	victim := c
	if k.behaviour.OneClientPerResource {
		victim, _ = k.newest(c.resource)
	}
	k.clients = slices.DeleteFunc(k.clients, func(o *client) bool { return o == c || o == victim })
	c.close()
	if victim != nil {
		victim.close()
	}
	k.wake()
}

// newest is the client that calls go to: the last one that registered.
func (k *Kubelet) newest(resource string) (*client, bool) {
	for _, c := range slices.Backward(k.clients) {
		if c.resource == resource {
			return c, true
		}
	}
	return nil, false
}

func (k *Kubelet) wake() {
	close(k.changed)
	k.changed = make(chan struct{})
}
