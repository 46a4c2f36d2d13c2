package kubelettest

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// manager has the records of plugins of a running kubelet: the clients of the server
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go), and the endpointStore, endpoints and devices of the manager
// (pkg/kubelet/cm/devicemanager/manager.go). They are written in the same steps.
//
// The keys of 1.37 are resource and path. A path that registers again while it counts as connected is refused, and by then
// both clients are deleted: when the stream of the first one ends, no plugin is disconnected, the devices stay healthy, and
// the path is refused until the kubelet restarts.
//
// The key of 1.34 to 1.36 is the resource. When a stream ends, the plugin that registered last is disconnected.
type manager struct {
	oneClient     bool // 1.34 to 1.36
	clients       map[string][]*client
	endpointStore map[string]map[string]*client // by resource and path; not in 1.36
	endpoints     map[string]*client            // the plugins that are called; never deleted
	devices       map[string][]*v1beta1.Device
}

func newManager(oneClient bool) manager {
	return manager{
		oneClient: oneClient, clients: map[string][]*client{}, endpointStore: map[string]map[string]*client{},
		endpoints: map[string]*client{}, devices: map[string][]*v1beta1.Device{},
	}
}

// register is registerClient, which is called before the plugin has answered.
func (m *manager) register(c *client) {
	if m.oneClient {
		m.clients[c.resource] = []*client{c}
		return
	}
	m.clients[c.resource] = append(m.clients[c.resource], c)
}

// deregister is deregisterClient.
func (m *manager) deregister(c *client) {
	m.clients[c.resource] = slices.DeleteFunc(m.clients[c.resource], func(o *client) bool {
		return m.oneClient || o.path == c.path
	})
}

// connect is PluginConnected, which is called after the plugin has returned its options.
func (m *manager) connect(c *client) error {
	if !m.oneClient {
		if m.endpointStore[c.resource][c.path] != nil {
			return fmt.Errorf("device plugin already connected: %s", c.path)
		}
		if m.endpointStore[c.resource] == nil {
			m.endpointStore[c.resource] = map[string]*client{}
		}
		m.endpointStore[c.resource][c.path] = c
	}
	m.endpoints[c.resource] = c
	return nil
}

// toDisconnect is getClient: the client that is disconnected because the stream of c ended; nil = none.
func (m *manager) toDisconnect(c *client) *client {
	i := slices.IndexFunc(m.clients[c.resource], func(o *client) bool { return m.oneClient || o.path == c.path })
	if i < 0 {
		return nil
	}
	return m.clients[c.resource][i]
}

// disconnect is PluginDisconnected.
func (m *manager) disconnect(c *client) {
	if m.oneClient {
		if last := m.endpoints[c.resource]; last != nil {
			last.stopped = true
			m.markUnhealthy(c.resource)
		}
		return
	}
	stored := m.endpointStore[c.resource]
	if stored[c.path] == nil {
		return
	}
	stored[c.path].stopped = true
	delete(stored, c.path)
	for _, other := range stored { // any of them
		m.endpoints[c.resource] = other
		return
	}
	m.markUnhealthy(c.resource)
}

func (m *manager) markUnhealthy(resource string) {
	for i, d := range m.devices[resource] {
		d = proto.CloneOf(d)
		d.Health = v1beta1.Unhealthy
		m.devices[resource][i] = d
	}
}
