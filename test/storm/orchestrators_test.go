package storm

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
)

// nomad is Nomad's side: the plugin behind real gRPC, a stream of fingerprints and one of statistics.
type nomad struct {
	w      *oneAgent
	plugin device.DevicePlugin

	mu      sync.Mutex
	latest  rig.Fingerprint
	streams map[string]context.CancelFunc // the open ones, by name
}

// newNomad starts the adapter and opens both streams.
func newNomad(t testing.TB, w *oneAgent) *nomad {
	n := &nomad{w: w, plugin: inprocess.Nomad(w.ctx, t, w.monitor), streams: map[string]context.CancelFunc{}}
	must(t, n.fingerprint(), n.stats())
	return n
}

// open returns the context of a stream, and ends the earlier stream of that name.
func (n *nomad) open(name string) context.Context {
	ctx, cancel := context.WithCancel(n.w.ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	if last := n.streams[name]; last != nil {
		last()
	}
	n.streams[name] = cancel
	return ctx
}

// fingerprint opens the stream of fingerprints again.
func (n *nomad) fingerprint() error {
	ctx := n.open("fingerprint")
	stream, err := n.plugin.Fingerprint(ctx)
	if err != nil {
		return err
	}
	go func() {
		for r := range stream {
			if ctx.Err() != nil {
				continue
			}
			if r.Error != nil {
				n.w.fail("Nomad's fingerprint stream: %w", r.Error)
				continue
			}
			now, latest := time.Now(), rig.Fingerprint{Groups: r.Devices}
			n.mu.Lock()
			n.latest = latest
			n.mu.Unlock()
			for id, u := range latest.Devices() {
				n.w.check("Nomad received", id, u.Healthy, now)
			}
		}
		if ctx.Err() == nil {
			n.w.fail("Nomad's fingerprint stream has ended")
		}
	}()
	return nil
}

// statsLimit is the longest time between two messages of statistics: there is one each second, and the adapter waits for the driver no
// longer than that.
const statsLimit = 8 * time.Second

// stats opens the stream of statistics again.
func (n *nomad) stats() error {
	ctx := n.open("stats")
	stream, err := n.plugin.Stats(ctx, time.Second)
	if err != nil {
		return err
	}
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for late := n.w.late(statsLimit); ; {
			select {
			case r, open := <-stream:
				late = n.w.late(statsLimit)
				switch {
				case ctx.Err() != nil && !open:
					return
				case ctx.Err() != nil:
				case !open:
					n.w.fail("Nomad's stream of statistics has ended")
					return
				case r.Error != nil:
					n.w.fail("Nomad's stream of statistics: %w", r.Error)
				}
			case <-tick.C:
				if late() && ctx.Err() == nil {
					n.w.fail("Nomad had no statistics for %v", n.w.o.limit(statsLimit))
				}
			}
		}
	}()
	return nil
}

// view is what Nomad has now.
func (n *nomad) view() map[string]rig.View {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.latest.Devices()
}

// kubelet is one kubelet after another in one directory.
type kubelet struct {
	w   *oneAgent
	dir string

	allocating sync.Mutex // a kubelet allocates to one container after the other

	mu        sync.Mutex
	running   *kubelettest.Kubelet // nil while it is down
	since     time.Time            // when it was last disturbed
	disturbed int                  // how often
	seen      map[string]int       // lists that were checked, by resource
}

// newKubelet starts the adapter and a kubelet.
func newKubelet(t testing.TB, w *oneAgent, running *sync.WaitGroup) *kubelet {
	dir := coretest.ShortDir(t)
	k := &kubelet{w: w, dir: dir}
	must(t, k.start(kubelettest.Behaviour{}))
	t.Cleanup(func() { k.stop((*kubelettest.Kubelet).Stop) })
	podSocket := filepath.Join(dir, "pod-resources", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(podSocket) // no pod holds a device
	must(t, err)
	t.Cleanup(pods.Close)
	adapter := deviceplugin.New(w.monitor, deviceplugin.Options{
		KubeletSocket: kubelettest.New(dir).Socket(), PodResourcesSocket: podSocket, Reserved: w.monitor.Reserved,
	})
	running.Go(func() { _ = adapter.Run(w.ctx) })
	return k
}

// start starts another kubelet, without state.
func (k *kubelet) start(b kubelettest.Behaviour) error {
	next := kubelettest.New(k.dir)
	next.Behave(b)
	if err := next.Start(); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running, k.since, k.seen = next, time.Now(), map[string]int{}
	return nil
}

// stop ends the kubelet, if it runs.
func (k *kubelet) stop(how func(*kubelettest.Kubelet)) {
	k.mu.Lock()
	was := k.running
	k.running, k.since, k.disturbed = nil, time.Now(), k.disturbed+1
	k.mu.Unlock()
	if was != nil {
		how(was)
	}
}

// disturb changes the running kubelet.
func (k *kubelet) disturb(how func(*kubelettest.Kubelet)) {
	k.mu.Lock()
	now := k.running
	k.since, k.disturbed = time.Now(), k.disturbed+1
	k.mu.Unlock()
	if now != nil {
		how(now)
	}
}

// now is the running kubelet, nil if there is none, and how often it was disturbed.
func (k *kubelet) now() (running *kubelettest.Kubelet, disturbed int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.running, k.disturbed
}

// view is what the kubelet has now.
func (k *kubelet) view() map[string]rig.View {
	running, _ := k.now()
	if running == nil {
		return nil
	}
	return rig.KubeletDevices(running)
}

// newLists are the devices in the lists that arrived since the last call.
func (k *kubelet) newLists() (units []*v1beta1.Device) {
	running, _ := k.now()
	if running == nil {
		return nil
	}
	for _, r := range running.Registrations() {
		lists := running.Lists(r.Resource)
		k.mu.Lock()
		seen := k.seen[r.Resource]
		if k.running == running {
			k.seen[r.Resource] = len(lists)
		}
		k.mu.Unlock()
		for _, list := range lists[min(seen, len(lists)):] {
			units = append(units, list...)
		}
	}
	return units
}

// allocate requests units. disturbed: the kubelet was restarted or had no plugin, and the answer does not count.
func (k *kubelet) allocate(ctx context.Context, resource string, ids ...string) (disturbed bool, err error) {
	running, before := k.now()
	if running == nil {
		return true, nil
	}
	if _, err := running.Plugin(resource); err != nil { // it has not registered again yet
		return true, err
	}
	k.allocating.Lock()
	defer k.allocating.Unlock()
	_, err = running.Allocate(ctx, resource, ids...)
	_, after := k.now()
	return before != after, err
}

// registrationLimit is how long a kubelet may be without its plugins after it was disturbed: for one that registers and never
// opens the stream the plugin waits ten seconds.
const registrationLimit = 20 * time.Second

// undisturbed reports whether the kubelet was last disturbed so long ago that it must have its plugins.
func (k *kubelet) undisturbed(now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.running != nil && now.Sub(k.since) > k.w.o.limit(registrationLimit)
}
