package kubelettest

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// books are what a running kubelet knows of plugins, step by step as
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go and .../manager.go write them: the server's
// clients, and the manager's endpointStore, endpoints and devices.
//
// 1.37 goes by (resource, path). A path that registers again while it counts as connected is refused, and
// by then both are gone from the clients: when the first one's stream ends nobody is disconnected, the
// devices stay healthy, and the path is refused for good.
//
// 1.34 to 1.36 go by resource alone. Who is disconnected when a stream ends is whoever registered last.
type books struct {
	oneClient bool
	clients   map[string][]*client
	store     map[string]map[string]*client // by resource and path; not in 1.36
	calls     map[string]*client            // whom Allocate goes to; never deleted
	devices   map[string][]*v1beta1.Device
}

func newBooks(oneClient bool) books {
	return books{
		oneClient: oneClient, clients: map[string][]*client{}, store: map[string]map[string]*client{},
		calls: map[string]*client{}, devices: map[string][]*v1beta1.Device{},
	}
}

// register is registerClient: before the plugin has answered anything.
func (b *books) register(c *client) {
	if b.oneClient {
		b.clients[c.resource] = []*client{c}
		return
	}
	b.clients[c.resource] = append(b.clients[c.resource], c)
}

// deregister is deregisterClient.
func (b *books) deregister(c *client) {
	b.clients[c.resource] = slices.DeleteFunc(b.clients[c.resource], func(o *client) bool {
		return b.oneClient || o.path == c.path
	})
}

// connect is PluginConnected, after the options have come.
func (b *books) connect(c *client) error {
	if !b.oneClient {
		if b.store[c.resource][c.path] != nil {
			return fmt.Errorf("device plugin already connected: %s", c.path)
		}
		if b.store[c.resource] == nil {
			b.store[c.resource] = map[string]*client{}
		}
		b.store[c.resource][c.path] = c
	}
	b.calls[c.resource] = c
	return nil
}

// victim is getClient: who is disconnected because the stream of c ended; nil = nobody.
func (b *books) victim(c *client) *client {
	i := slices.IndexFunc(b.clients[c.resource], func(o *client) bool { return b.oneClient || o.path == c.path })
	if i < 0 {
		return nil
	}
	return b.clients[c.resource][i]
}

// disconnect is PluginDisconnected.
func (b *books) disconnect(c *client) {
	if b.oneClient {
		if last := b.calls[c.resource]; last != nil {
			last.stopped = true
			b.markUnhealthy(c.resource)
		}
		return
	}
	stored := b.store[c.resource]
	if stored[c.path] == nil {
		return
	}
	stored[c.path].stopped = true
	delete(stored, c.path)
	for _, other := range stored { // an arbitrary one
		b.calls[c.resource] = other
		return
	}
	b.markUnhealthy(c.resource)
}

func (b *books) markUnhealthy(resource string) {
	for i, d := range b.devices[resource] {
		d = proto.CloneOf(d)
		d.Health = v1beta1.Unhealthy
		b.devices[resource][i] = d
	}
}
