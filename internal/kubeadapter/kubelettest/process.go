package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// process is one run of a kubelet, from Start to Stop or Crash.
type process struct {
	v1beta1.UnimplementedRegistrationServer
	k        *Kubelet
	server   *grpc.Server
	listener *net.UnixListener
	running  sync.WaitGroup
	ended    chan struct{} // closed by end

	manager manager   // guarded by k.mu, as open
	open    []*client // all connections, also those without a record
}

func newProcess(k *Kubelet, oneClient bool) (*process, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: k.Socket(), Net: "unix"})
	if err != nil {
		return nil, err
	}
	p := &process{
		k: k, server: grpc.NewServer(grpc.WaitForHandlers(true)), listener: listener,
		ended: make(chan struct{}), manager: newManager(oneClient),
	}
	v1beta1.RegisterRegistrationServer(p.server, p)
	p.running.Go(func() { _ = p.server.Serve(listener) })
	return p, nil
}

// end stops the server and closes all connections.
func (p *process) end() {
	close(p.ended)
	p.server.Stop()
	p.k.mu.Lock()
	open := slices.Clone(p.open)
	p.k.mu.Unlock()
	for _, c := range open {
		c.close()
	}
	p.running.Wait()
}

// Register implements the registration API.
func (p *process) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	p.k.recordAttempt(r)
	b := p.k.behaviourTo(r.GetResourceName())
	if !watch.Sleep(ctx, b.Delay) {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if b.Refuse != nil {
		return nil, b.Refuse
	}
	if r.GetVersion() != v1beta1.Version {
		return nil, status.Errorf(codes.Unknown, "requested API version %q is not supported by kubelet", r.GetVersion())
	}
	c, err := p.newClient(r)
	if err != nil {
		return nil, err
	}
	p.locked(func() { p.manager.register(c) })
	if err := p.connect(ctx, c); err != nil {
		p.locked(func() { p.manager.deregister(c) }) // the connection stays open, as in a kubelet
		return nil, status.Error(codes.Unknown, err.Error())
	}
	p.locked(func() {
		p.k.accepted = append(p.k.accepted, Registration{r.GetResourceName(), r.GetEndpoint()})
	})
	if !b.NoStream {
		p.running.Go(func() { p.run(c, b) })
	}
	return &v1beta1.Empty{}, nil
}

func (p *process) locked(f func()) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	f()
	p.k.notify()
}

// connect gets the options of a plugin, before Register returns.
func (p *process) connect(ctx context.Context, c *client) error {
	// The kubelet waits for a connection for up to 10 s, also if the path is missing.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := c.plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true)); err != nil {
		return fmt.Errorf("failed to get device plugin options: %w", err)
	}
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	select {
	case <-p.ended:
		return errors.New("the kubelet is stopping")
	default:
		return p.manager.connect(c)
	}
}

// run is runClient: it receives the lists of a stream until that ends, and disconnects a client then.
func (p *process) run(c *client, b Behaviour) {
	if watch.Await(context.Background(), p.ended, b.StreamDelay) {
		return
	}
	if stream, err := c.plugin.ListAndWatch(c.ctx, &v1beta1.Empty{}); err == nil {
		for {
			r, err := stream.Recv()
			if err != nil {
				break
			}
			p.k.recordList(p, c, r.GetDevices())
		}
	}
	if watch.Await(context.Background(), p.ended, b.Lag) {
		return
	}
	var other *client
	p.locked(func() { other = p.manager.toDisconnect(c) })
	if other != nil {
		p.disconnect(other, b.Lag)
	}
}

// disconnect is disconnectClient.
func (p *process) disconnect(c *client, lag time.Duration) {
	p.locked(func() {
		p.manager.deregister(c)
		p.open = slices.DeleteFunc(p.open, func(o *client) bool { return o == c })
	})
	c.close()
	if !watch.Await(context.Background(), p.ended, lag) {
		p.locked(func() { p.manager.disconnect(c) })
	}
}

func (p *process) disconnectAll() {
	var all []*client
	p.locked(func() {
		for _, clients := range p.manager.clients {
			all = append(all, clients...)
		}
	})
	for _, c := range all {
		p.disconnect(c, 0)
	}
}

// client is a connected plugin.
type client struct {
	resource, path string
	conn           *grpc.ClientConn
	plugin         v1beta1.DevicePluginClient
	ctx            context.Context // of the stream; ends with cancel
	cancel         context.CancelFunc

	stopped bool      // disconnected; guarded by the kubelet's lock, as listed
	listed  time.Time // when the first list was received; zero = not yet
}

func (p *process) newClient(r *v1beta1.RegisterRequest) (*client, error) {
	path := filepath.Join(p.k.dir, r.GetEndpoint())
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	c := &client{resource: r.GetResourceName(), path: path, conn: conn, plugin: v1beta1.NewDevicePluginClient(conn)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	p.locked(func() { p.open = append(p.open, c) })
	return c, nil
}

func (c *client) close() {
	c.cancel()
	_ = c.conn.Close()
}
