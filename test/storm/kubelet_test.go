package storm

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// kubelet is one kubelet after another in one directory.
type kubelet struct {
	w   *oneAgent
	dir string

	mu        sync.Mutex
	running   *kubelettest.Kubelet // nil while it is down
	since     time.Time            // when it was last disturbed
	disturbed int                  // how often
	seen      map[string]int       // lists that were checked, by resource
}

// newKubelet starts the adapter and a kubelet.
func newKubelet(t testing.TB, w *oneAgent, running *sync.WaitGroup) *kubelet {
	dir, err := os.MkdirTemp("", "storm") // t.TempDir's names are too long for a socket
	must(t, err)
	k := &kubelet{w: w, dir: dir}
	must(t, k.start(kubelettest.Behaviour{}))
	t.Cleanup(func() { k.stop((*kubelettest.Kubelet).Stop); _ = os.RemoveAll(dir) })
	podSocket := filepath.Join(dir, "pod-resources", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(podSocket) // no pod holds a device
	must(t, err)
	t.Cleanup(pods.Close)
	adapter := kubeadapter.New(w.monitor, kubeadapter.Options{
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

// resources are those that are registered with a kubelet.
func resources(running *kubelettest.Kubelet) []string {
	if running == nil {
		return nil
	}
	var names []string
	for _, r := range running.Registrations() {
		names = append(names, r.Resource)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// view is what the kubelet has now.
func (k *kubelet) view() map[string]unit {
	running, _ := k.now()
	units := map[string]unit{}
	for _, resource := range resources(running) {
		devices, _ := running.Devices(resource)
		for _, d := range devices {
			units[d.GetID()] = unit{d.GetHealth() == v1beta1.Healthy, resource}
		}
	}
	return units
}

// newLists are the devices in the lists that arrived since the last call.
func (k *kubelet) newLists() (units []*v1beta1.Device) {
	running, _ := k.now()
	for _, resource := range resources(running) {
		lists := running.Lists(resource)
		k.mu.Lock()
		seen := k.seen[resource]
		if k.running == running {
			k.seen[resource] = len(lists)
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
