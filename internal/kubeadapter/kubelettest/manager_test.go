package kubelettest

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/check"
)

const resource = "example.com/gpu"

// plugin is a device plugin with one healthy device.
type plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	device  string
	refuse  error // of GetDevicePluginOptions
	endings chan struct{}
	server  *grpc.Server
}

func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, p.refuse
}

// ListAndWatch ends its stream, and no other, after each receive from endings.
func (p *plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: []*v1beta1.Device{{ID: p.device, Health: v1beta1.Healthy}}})
	if err != nil {
		return err
	}
	select {
	case <-p.endings:
	case <-stream.Context().Done():
	}
	return nil
}

type bench struct {
	*testing.T
	ctx     context.Context
	dir     string
	kubelet *Kubelet
}

func newBench(t *testing.T, b Behaviour) *bench {
	t.Helper()
	dir := coretest.ShortDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	k := New(dir)
	k.Behave(b)
	t.Cleanup(func() {
		k.Stop()
		cancel()
	})
	check.NoError(t, k.Start())
	return &bench{t, ctx, dir, k}
}

// serve starts a plugin on a socket of the directory.
func (b *bench) serve(name, device string) *plugin {
	b.Helper()
	l, err := net.Listen("unix", filepath.Join(b.dir, name))
	check.NoError(b, err)
	p := &plugin{device: device, endings: make(chan struct{}), server: grpc.NewServer()}
	v1beta1.RegisterDevicePluginServer(p.server, p)
	go func() { _ = p.server.Serve(l) }()
	b.Cleanup(p.server.Stop)
	return p
}

func (b *bench) register(name string) error {
	b.Helper()
	conn, err := grpc.NewClient("unix:"+b.kubelet.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.NoError(b, err)
	defer func() { _ = conn.Close() }()
	_, err = v1beta1.NewRegistrationClient(conn).Register(b.ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: name, ResourceName: resource,
	})
	return err
}

// connect starts a plugin on a socket, registers it and waits for its device.
func (b *bench) connect(name, device string) *plugin {
	b.Helper()
	p := b.serve(name, device)
	check.NoError(b, b.register(name))
	b.has(device, true, true)
	return p
}

// has waits until the kubelet has one device, healthy or not, from a plugin that is connected or not.
func (b *bench) has(device string, healthy, connected bool) {
	b.Helper()
	err := b.kubelet.Await(b.ctx, device, func() bool {
		devices, ok := b.kubelet.Devices(resource)
		return ok == connected && len(devices) == 1 && devices[0].GetID() == device &&
			(devices[0].GetHealth() == v1beta1.Healthy) == healthy
	})
	if err != nil {
		devices, ok := b.kubelet.Devices(resource)
		b.Fatalf("%v: have %v, connected %v; want healthy %v, connected %v", err, devices, ok, healthy, connected)
	}
}

func TestEndOfStreamMakesDevicesUnhealthy(t *testing.T) {
	for _, old := range []bool{false, true} {
		b := newBench(t, Behaviour{OneClientPerResource: old})
		p := b.connect("a.sock", "A")
		p.endings <- struct{}{}
		b.has("A", false, false)
		if c := b.kubelet.Connected(resource); len(c) > 0 {
			t.Errorf("connected after the end: %v", c)
		}
	}
}

// 1.37: two paths of a resource are connected. The latest list is used, and the end of one stream does not change the devices.
func TestTwoPathsOfOneResource(t *testing.T) {
	b := newBench(t, Behaviour{})
	b.connect("a.sock", "A")
	next := b.connect("b.sock", "B")
	next.endings <- struct{}{}
	check.NoError(b, b.kubelet.Await(b.ctx, "b is gone", func() bool {
		return slices.Equal(b.kubelet.Connected(resource), []string{"a.sock"})
	}))
	b.has("B", true, true) // the list of a is not received again
}

// 1.37: a path that registers again corrupts the records until the kubelet restarts.
func TestOnePathTwice(t *testing.T) {
	b := newBench(t, Behaviour{})
	p := b.connect("a.sock", "A")
	if err := b.register("a.sock"); err == nil {
		t.Fatal("registered twice")
	}
	if c := b.kubelet.Connected(resource); len(c) > 0 {
		t.Errorf("clients %v, want the first deleted, too", c)
	}
	p.server.Stop() // the end of the plugin is not noticed
	b.connect("a2.sock", "A2")
	b.serve("a.sock", "A")
	if err := b.register("a.sock"); err == nil {
		t.Error("the path works again without a restart")
	}
	b.kubelet.Crash()
	check.NoError(b, b.kubelet.Start())
	b.connect("a.sock", "A")
}

// 1.34 to 1.36: the end of the older stream disconnects the newer plugin.
func TestOldStreamEndsNewPlugin(t *testing.T) {
	b := newBench(t, Behaviour{OneClientPerResource: true})
	old := b.connect("a.sock", "A")
	b.connect("b.sock", "B")
	old.endings <- struct{}{}
	b.has("B", false, false)
}

// 1.34 to 1.36: a registration that fails deletes the record of the connected plugin, whose end is then not noticed. In 1.37 it
// does not affect others.
func TestFailedRegistration(t *testing.T) {
	for _, old := range []bool{false, true} {
		b := newBench(t, Behaviour{OneClientPerResource: old})
		first := b.connect("a.sock", "A")
		b.serve("b.sock", "B").refuse = errors.New("not yet")
		if err := b.register("b.sock"); err == nil {
			t.Fatal("registered without options")
		}
		first.server.Stop()
		if old {
			check.NoError(b, b.kubelet.Await(b.ctx, "dead", func() bool {
				_, err := b.kubelet.Allocate(b.ctx, resource, "A")
				return status.Code(err) == codes.Unavailable
			}))
		}
		b.has("A", old, old)
	}
}
