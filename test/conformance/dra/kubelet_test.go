package dra

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
)

const driverName = "gpu.nvidia.com"

// kubelet is one run of the parts of a kubelet that deal with DRA drivers: its DRA manager and plugin manager, on the files and sockets
// of a root directory.
type kubelet struct {
	*dra.Manager
	registry *registrations
	started  time.Time
	stop     func()
}

// startKubelet starts the managers as a kubelet does, on the directory as it is.
func (n *node) startKubelet() *kubelet {
	n.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: n.api.url(), BearerToken: "t0ken", QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAFile: n.api.file("ca.crt")},
	})
	n.Must(err)
	n.Must(os.MkdirAll(n.registryDir(), 0o750))
	k := &kubelet{started: time.Now()}
	k.Manager, err = dra.NewManager(n.logger, client, n.kubeletDir)
	n.Must(err)
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), n.logger))
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	n.Must(k.Start(ctx, n.activePods, n.api.nodeOf, ready))
	k.registry = &registrations{PluginHandler: k.GetWatcherHandler(), changed: make(chan struct{})}
	manager := pluginmanager.NewPluginManager(n.registryDir(), record.NewFakeRecorder(1000))
	manager.AddHandler(registerapi.DRAPlugin, k.registry)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil { // it ends early where the machine has no inotify instance left
			runPlugins(ctx, manager, ready)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}()
	k.stop = sync.OnceFunc(func() {
		cancel()
		k.GetWatcherHandler().(*plugin.DRAPluginManager).Stop()
		<-ended
	})
	n.Cleanup(k.stop)
	n.kubelet = k
	return k
}

func (n *node) registryDir() string { return filepath.Join(n.kubeletDir, "plugins_registry") }

// registrations counts what the plugin manager does with drivers.
type registrations struct {
	cache.PluginHandler

	mu      sync.Mutex
	refusal error // of every driver; nil = none
	all     []registration
	changed chan struct{}
}

// registration is an attempt to register a driver, or the end of one.
type registration struct {
	at       time.Time
	ended    bool // deregistered
	endpoint string
	versions []string
	err      error
}

func (r *registrations) add(one registration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one.at = time.Now()
	r.all = append(r.all, one)
	close(r.changed)
	r.changed = make(chan struct{})
}

// refuse makes the kubelet refuse drivers, as it does with one whose versions it does not have; nil ends it.
func (r *registrations) refuse(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refusal = err
}

func (r *registrations) validated(endpoint string, versions []string, err error) error {
	r.mu.Lock()
	if err == nil {
		err = r.refusal
	}
	r.mu.Unlock()
	if err != nil {
		r.add(registration{endpoint: endpoint, versions: versions, err: err})
	}
	return err
}

func (r *registrations) registered(endpoint string, versions []string, err error) error {
	r.add(registration{endpoint: endpoint, versions: versions, err: err})
	return err
}

func (r *registrations) deregistered(endpoint string) {
	r.add(registration{endpoint: endpoint, ended: true})
}

// state are all attempts so far, and a channel that is closed at the next.
func (r *registrations) state() ([]registration, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all), r.changed
}

// succeeded are the registrations that the kubelet accepted.
func (r *registrations) succeeded() (ok []registration) {
	all, _ := r.state()
	for _, one := range all {
		if !one.ended && one.err == nil {
			ok = append(ok, one)
		}
	}
	return ok
}

// await waits until a condition holds.
func (r *registrations) await(t *testing.T, what string, ok func([]registration) bool) {
	t.Helper()
	late := time.After(plenty)
	for {
		all, changed := r.state()
		if ok(all) {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("%s: not in time: %+v", what, all)
		}
	}
}

// awaitRegistered waits for the driver's first registration.
func (k *kubelet) awaitRegistered(t *testing.T) registration {
	t.Helper()
	return k.awaitRegistrations(t, 1)[0]
}

func (k *kubelet) awaitRegistrations(t *testing.T, count int) []registration {
	t.Helper()
	k.registry.await(t, "registration of the driver", func([]registration) bool { return len(k.registry.succeeded()) >= count })
	return k.registry.succeeded()
}

// driver is the kubelet's connection to the driver: that to which it sends the next call.
func (n *node) driver() *plugin.DRAPlugin {
	n.Helper()
	d, err := n.driverOrError()
	n.Must(err)
	return d
}

func (n *node) driverOrError() (*plugin.DRAPlugin, error) {
	return n.kubelet.GetWatcherHandler().(*plugin.DRAPluginManager).GetPlugin(driverName)
}

// call sends NodePrepareResources for claims, as the kubelet does, without its record of what is prepared.
func (n *node) call(claims ...*drapb.Claim) (map[string]*drapb.NodePrepareResourceResponse, error) {
	n.Helper()
	answer, err := n.driver().NodePrepareResources(n.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}

// callUnprepare sends NodeUnprepareResources for claims.
func (n *node) callUnprepare(claims ...*drapb.Claim) (map[string]*drapb.NodeUnprepareResourceResponse, error) {
	n.Helper()
	answer, err := n.driver().NodeUnprepareResources(n.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}
