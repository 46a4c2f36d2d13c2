// Package kubelettest has a small kubelet for the tests of device plugins: the registration service and
// the client of one folder, with the kubelet's habits. It serves tests and the demo; nothing in the
// agents imports it.
//
// Its habits are those of kubelet 1.37 (pkg/kubelet/cm/devicemanager): when it starts it removes every
// socket in the folder and then listens; inside Register it dials back and asks for the options; then
// it opens ListAndWatch once and never again; a stream that ends makes every device of the resource
// unhealthy. Its books of plugins go wrong where those of kubelets do, see books; those of 1.34 to 1.36
// can be chosen.
package kubelettest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Behaviour is how a kubelet treats plugins. The zero value is kubelet 1.37 in good health.
type Behaviour struct {
	OneClientPerResource bool          // the books of 1.34 to 1.36; read when the kubelet starts
	Refuse               error         // what Register answers
	Delay                time.Duration // before Register is looked at
	NoStream             bool          // registers, but never opens ListAndWatch
	StreamDelay          time.Duration // from the answer to Register to ListAndWatch
	Lag                  time.Duration // from the end of a stream to its being noticed, and from there to the books
}

// Registration is one Register.
type Registration struct{ Resource, Endpoint string }

// Kubelet is a kubelet of one folder. Its methods are safe for concurrent use.
type Kubelet struct {
	dir string

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced when anything below changes
	behaviour Behaviour
	special   map[string]Behaviour // by resource
	process   *process             // nil = not running
	attempts  []Registration
	accepted  []Registration
	lists     map[string][][]*v1beta1.Device
}

// New returns a kubelet that is not running, for a folder that need not exist.
func New(dir string) *Kubelet {
	return &Kubelet{
		dir: dir, changed: make(chan struct{}),
		special: map[string]Behaviour{}, lists: map[string][][]*v1beta1.Device{},
	}
}

// Socket is the path of the registration socket.
func (k *Kubelet) Socket() string { return filepath.Join(k.dir, "kubelet.sock") }

// Behave changes how the kubelet treats plugins from now on, those of special treatment too.
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

// Start wipes the folder's sockets and listens. A kubelet that runs must end before.
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

// Stop ends the kubelet in good order: the plugins are disconnected, then its socket is removed. A plugin
// that is quick can register between the two.
func (k *Kubelet) Stop() {
	if p := k.leave(true); p != nil {
		p.disconnectAll()
		p.end()
	}
}

// Crash ends the kubelet as SIGKILL does: a socket file stays behind that nobody listens on.
func (k *Kubelet) Crash() {
	if p := k.leave(false); p != nil {
		p.end()
	}
}

// leave takes the process that runs, if one does.
func (k *Kubelet) leave(unlink bool) *process {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.process
	if p != nil {
		p.listener.SetUnlinkOnClose(unlink)
		k.process = nil
		k.wake()
	}
	return p
}

// Hangup ends the stream of a resource, as kubelets up to 1.36 do by mistake.
func (k *Kubelet) Hangup(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.called(resource); c != nil {
		c.hangUp()
	}
}

// called is the plugin of a resource that calls go to; nil if there is none.
func (k *Kubelet) called(resource string) *client {
	if k.process == nil {
		return nil
	}
	if c := k.process.books.calls[resource]; c != nil && !c.stopped {
		return c
	}
	return nil
}

func (k *Kubelet) wake() {
	close(k.changed)
	k.changed = make(chan struct{})
}

// attempt notes a Register.
func (k *Kubelet) attempt(r *v1beta1.RegisterRequest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attempts = append(k.attempts, Registration{r.GetResourceName(), r.GetEndpoint()})
	k.wake()
}

// receive notes a list. Two streams of one resource write the same table.
func (k *Kubelet) receive(p *process, c *client, devices []*v1beta1.Device) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.books.devices[c.resource] = slices.Clone(devices)
	k.lists[c.resource] = append(k.lists[c.resource], devices)
	if c.listed.IsZero() {
		c.listed = time.Now()
	}
	k.wake()
}
