// Package kubelettest has a kubelet for tests of device plugins and for the demo: the registration service and the client of
// one plugin directory. The agents do not import it.
//
// It behaves as kubelet 1.37 (pkg/kubelet/cm/devicemanager): at the start it removes all sockets in the directory and then
// listens; within Register it connects to the plugin and gets its options; then it opens ListAndWatch once and never again;
// when a stream ends, all devices of the resource become unhealthy. Its records of plugins have the bugs of that kubelet, or
// those of 1.34 to 1.36, see manager.
package kubelettest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Behaviour is how a kubelet treats plugins. The zero value is a kubelet 1.37 without faults.
type Behaviour struct {
	OneClientPerResource bool          // records of 1.34 to 1.36; takes effect when the kubelet starts
	Refuse               error         // the error of Register; nil = none
	Delay                time.Duration // before Register is processed
	NoStream             bool          // ListAndWatch is never opened
	StreamDelay          time.Duration // from the answer to Register to ListAndWatch
	Lag                  time.Duration // from the end of a stream to the disconnection, and from there to the records
}

// Registration is one Register call.
type Registration struct{ Resource, Endpoint string }

// Kubelet is a kubelet of one plugin directory. Its methods are safe for concurrent use.
type Kubelet struct {
	dir     string
	changes *watch.Value[struct{}] // stored when anything below changes

	mu        sync.Mutex
	behaviour Behaviour
	special   map[string]Behaviour // by resource, in place of behaviour
	process   *process             // nil = not running
	attempts  []Registration
	accepted  []Registration
	lists     map[string][][]*v1beta1.Device
	recorded  []CheckpointEntry
}

// New returns a kubelet that is not running. The directory need not exist.
func New(dir string) *Kubelet {
	return &Kubelet{
		dir: dir, changes: watch.NewValue(struct{}{}),
		special: map[string]Behaviour{}, lists: map[string][][]*v1beta1.Device{},
	}
}

// Socket returns the path of the registration socket.
func (k *Kubelet) Socket() string { return filepath.Join(k.dir, "kubelet.sock") }

// Behave changes how the kubelet treats all plugins from now on, and ends each BehaveTo.
func (k *Kubelet) Behave(b Behaviour) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.behaviour = b
	clear(k.special)
}

// BehaveTo changes how the kubelet treats the plugins of one resource, until the next Behave.
func (k *Kubelet) BehaveTo(resource string, b Behaviour) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.special[resource] = b
}

func (k *Kubelet) behaviourTo(resource string) Behaviour {
	k.mu.Lock()
	defer k.mu.Unlock()
	if b, ok := k.special[resource]; ok {
		return b
	}
	return k.behaviour
}

// Start removes the sockets in the directory and listens. The kubelet must not be running.
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
	k.mu.Lock()
	defer k.mu.Unlock()
	p, err := newProcess(k, k.behaviour.OneClientPerResource)
	if err != nil {
		return err
	}
	k.process = p
	return nil
}

// Stop ends the kubelet as SIGTERM does: the plugins are disconnected, then its socket is removed. A plugin can register
// between the two.
func (k *Kubelet) Stop() {
	if p := k.takeProcess(true); p != nil {
		p.disconnectAll()
		p.end()
	}
}

// Crash ends the kubelet as SIGKILL does: its socket remains and refuses connections.
func (k *Kubelet) Crash() {
	if p := k.takeProcess(false); p != nil {
		p.end()
	}
}

// takeProcess returns the process, nil if there is none, and the kubelet is no longer running.
func (k *Kubelet) takeProcess(unlink bool) *process {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.process
	if p != nil {
		p.listener.SetUnlinkOnClose(unlink)
		k.process = nil
		k.notify()
	}
	return p
}

// EndStream cancels the stream of a resource, as kubelets up to 1.36 do by mistake.
func (k *Kubelet) EndStream(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.endpoint(resource); c != nil {
		c.cancel()
	}
}

// endpoint returns the plugin of a resource that is called; nil if none is connected.
func (k *Kubelet) endpoint(resource string) *client {
	if k.process == nil {
		return nil
	}
	if c := k.process.manager.endpoints[resource]; c != nil && !c.stopped {
		return c
	}
	return nil
}

func (k *Kubelet) notify() { k.changes.Store(struct{}{}) }

// recordAttempt records a Register call.
func (k *Kubelet) recordAttempt(r *v1beta1.RegisterRequest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attempts = append(k.attempts, Registration{r.GetResourceName(), r.GetEndpoint()})
	k.notify()
}

// recordList records a ListAndWatch response. Two streams of one resource write the same records.
func (k *Kubelet) recordList(p *process, c *client, devices []*v1beta1.Device) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.manager.devices[c.resource] = slices.Clone(devices)
	k.lists[c.resource] = append(k.lists[c.resource], devices)
	if c.listed.IsZero() {
		c.listed = time.Now()
	}
	_ = k.writeCheckpoint() // a kubelet logs the error
	k.notify()
}
