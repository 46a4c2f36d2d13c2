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
)

// process is one life of a kubelet, from Start to Stop or Crash.
type process struct {
	v1beta1.UnimplementedRegistrationServer
	k        *Kubelet
	server   *grpc.Server
	listener *net.UnixListener
	running  sync.WaitGroup
	gone     chan struct{} // closed when it ends

	books books     // guarded by k.mu, as what follows
	open  []*client // every connection, also those that the books lost
}

func newProcess(k *Kubelet, oneClient bool) (*process, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: k.Socket(), Net: "unix"})
	if err != nil {
		return nil, err
	}
	p := &process{
		k: k, server: grpc.NewServer(grpc.WaitForHandlers(true)), listener: listener,
		gone: make(chan struct{}), books: newBooks(oneClient),
	}
	v1beta1.RegisterRegistrationServer(p.server, p)
	p.running.Go(func() { _ = p.server.Serve(listener) })
	return p, nil
}

// end closes what the end of a process closes.
func (p *process) end() {
	close(p.gone)
	p.server.Stop()
	p.k.mu.Lock()
	open := slices.Clone(p.open)
	p.k.mu.Unlock()
	for _, c := range open {
		c.close()
	}
	p.running.Wait()
}

// Register implements the registration service.
func (p *process) Register(ctx context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	p.k.attempt(r)
	b := p.k.behaviourTo(r.GetResourceName())
	select {
	case <-time.After(b.Delay):
	case <-ctx.Done():
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
	p.locked(func() { p.books.register(c) })
	if err := p.connect(ctx, c); err != nil {
		p.locked(func() { p.books.deregister(c) }) // the connection stays open, as in a kubelet
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
	p.k.wake()
}

// connect asks for the options while Register is pending.
func (p *process) connect(ctx context.Context, c *client) error {
	// The kubelet's dial blocks for up to 10 s, also on a path that is not there.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := c.plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true)); err != nil {
		return fmt.Errorf("failed to get device plugin options: %w", err)
	}
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if p.over() {
		return errors.New("the kubelet is stopping")
	}
	return p.books.connect(c)
}

func (p *process) over() bool {
	select {
	case <-p.gone:
		return true
	default:
		return false
	}
}

// run is runClient: ListAndWatch from its opening to its end, and then whoever counts as disconnected.
func (p *process) run(c *client, b Behaviour) {
	if !p.pause(b.StreamDelay) {
		return
	}
	if stream, err := c.plugin.ListAndWatch(c.ctx, &v1beta1.Empty{}); err == nil {
		for {
			r, err := stream.Recv()
			if err != nil {
				break
			}
			p.k.receive(p, c, r.GetDevices())
		}
	}
	if !p.pause(b.Lag) {
		return
	}
	var victim *client
	p.locked(func() { victim = p.books.victim(c) })
	if victim != nil {
		p.disconnect(victim, b.Lag)
	}
}

// disconnect is disconnectClient.
func (p *process) disconnect(c *client, lag time.Duration) {
	p.locked(func() {
		p.books.deregister(c)
		p.open = slices.DeleteFunc(p.open, func(o *client) bool { return o == c })
	})
	c.close()
	if p.pause(lag) {
		p.locked(func() { p.books.disconnect(c) })
	}
}

func (p *process) disconnectAll() {
	var all []*client
	p.locked(func() {
		for _, clients := range p.books.clients {
			all = append(all, clients...)
		}
	})
	for _, c := range all {
		p.disconnect(c, 0)
	}
}

// pause waits for d; false if the process ends first.
func (p *process) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-p.gone:
		return false
	}
}

// client is a connected plugin.
type client struct {
	resource, path string
	conn           *grpc.ClientConn
	plugin         v1beta1.DevicePluginClient
	ctx            context.Context // of the stream; ends with hangUp
	hangUp         context.CancelFunc

	stopped bool      // counts as disconnected; guarded by the kubelet's lock, as what follows
	listed  time.Time // when its first list came
}

func (p *process) newClient(r *v1beta1.RegisterRequest) (*client, error) {
	path := filepath.Join(p.k.dir, r.GetEndpoint())
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	c := &client{resource: r.GetResourceName(), path: path, conn: conn, plugin: v1beta1.NewDevicePluginClient(conn)}
	c.ctx, c.hangUp = context.WithCancel(context.Background())
	p.locked(func() { p.open = append(p.open, c) })
	return c, nil
}

func (c *client) close() {
	c.hangUp()
	_ = c.conn.Close()
}
