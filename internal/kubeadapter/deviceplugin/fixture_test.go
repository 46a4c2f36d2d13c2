package deviceplugin

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

// fastTimings are short, in the same order as defaultTimings, except for what the kubelet may take on a busy machine.
var fastTimings = timings{
	register: 15 * time.Second, openStream: 15 * time.Second,
	restart: 10 * time.Millisecond, retry: 10 * time.Millisecond, retryMax: 100 * time.Millisecond, stable: time.Second,
	heartbeat: time.Hour, listInterval: time.Millisecond, pollInterval: 20 * time.Millisecond, pollIntervalNoEvents: 5 * time.Millisecond,
}

// rig are device plugins over a source that the test sets, and a kubelet with faults that the test chooses.
type rig struct {
	*testing.T
	ctx     context.Context // ends before the test times out
	dir     string
	kubelet *kubelettest.Kubelet
	src     *coretest.Source
	plugins *Plugins
	stop    func()
}

// newRig returns a rig without a running kubelet or plugins, for 30 s.
func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigFor(t, 30*time.Second)
}

func newRigFor(t *testing.T, limit time.Duration) *rig {
	t.Helper()
	dir := coretest.ShortDir(t)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	r := &rig{T: t, ctx: ctx, dir: dir, kubelet: kubelettest.New(dir), src: coretest.NewSource(), stop: func() {}}
	t.Cleanup(func() {
		r.stop()
		r.kubelet.Stop()
		cancel()
	})
	return r
}

// startRig returns a rig with a running kubelet and running plugins of an inventory.
func startRig(t *testing.T, inv *inventory.Allocatable, change ...func(*Plugins)) *rig {
	t.Helper()
	r := newRig(t)
	r.startKubelet()
	r.start(inv, change...)
	return r
}

// newRunning returns a rig with plugins that offer n GPUs to a kubelet.
func newRunning(t *testing.T, n int, change ...func(*Plugins)) *rig {
	t.Helper()
	r := startRig(t, gpus(n), change...)
	r.awaitHealthy(kubeadapter.GPUResource, n)
	r.awaitReady()
	return r
}

// start runs the plugins of an inventory until stop or the end of the test.
func (r *rig) start(inv *inventory.Allocatable, change ...func(*Plugins)) {
	r.src.Set(inv)
	p := New(r.src, Options{KubeletSocket: r.kubelet.Socket()})
	p.timings = fastTimings
	for _, c := range change {
		c(p)
	}
	ctx, cancel := context.WithCancel(r.ctx)
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	r.plugins, r.stop = p, sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.Errorf("Run: %v", err)
		}
	})
}

// stopInTime fails if the plugins have not stopped in 10 s, or leave a socket.
func (r *rig) stopInTime() {
	r.Helper()
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	if !watch.Await(r.ctx, stopped, 10*time.Second) {
		r.Fatal("still running after 10 s")
	}
	if s := r.sockets(); len(s) > 0 {
		r.Errorf("sockets left: %v", s)
	}
}

func (r *rig) startKubelet() {
	r.Helper()
	check.NoError(r, r.kubelet.Start())
}

// restartKubelet restarts the kubelet after a stop or a crash.
func (r *rig) restartKubelet(crash bool) {
	r.Helper()
	if crash {
		r.kubelet.Crash()
	} else {
		r.kubelet.Stop()
	}
	r.startKubelet()
}

func (r *rig) awaitHealthy(resource string, n int) {
	r.Helper()
	check.NoError(r, r.kubelet.AwaitHealthy(r.ctx, resource, n))
}

// awaitEmpty waits for an empty list of a connected plugin.
func (r *rig) awaitEmpty(resource string) {
	r.Helper()
	check.Until(r, "an empty list of "+resource, func() bool {
		devices, connected := r.kubelet.Devices(resource)
		return connected && len(devices) == 0 && !r.kubelet.Listed(resource).IsZero()
	})
}

// awaitReady waits until Ready returns nil.
func (r *rig) awaitReady() {
	r.Helper()
	check.Until(r, "ready", func() bool { return r.plugins.Ready() == nil })
}

// awaitRegistrations waits until the kubelet has accepted n registrations.
func (r *rig) awaitRegistrations(n int) {
	r.Helper()
	check.NoError(r, r.kubelet.Await(r.ctx, fmt.Sprint(n, " registrations"), func() bool { return len(r.kubelet.Registrations()) >= n }))
}

// stats returns the statistics of the first resource; zero if there is none.
func (r *rig) stats() ResourceStats {
	if all := r.plugins.Stats(); len(all) > 0 {
		return all[0]
	}
	return ResourceStats{}
}

// sockets returns the names of the plugin sockets in the directory.
func (r *rig) sockets() []string {
	r.Helper()
	paths, err := filepath.Glob(filepath.Join(r.dir, socketPrefix+"*"))
	check.NoError(r, err)
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	return paths
}

// buildInventory returns the inventory of a snapshot in which some GPUs are lost.
func buildInventory(s gpu.Snapshot, c core.Config, lost ...int) *inventory.Allocatable {
	var l health.Ledger
	for _, n := range lost {
		l = l.Apply(c.Health, time.Unix(0, 0), health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Lost})
	}
	return core.Build(s, l, c).WithoutHost()
}

// gpus is the inventory of n GPUs, some of which are lost, with the default policy.
func gpus(n int, lost ...int) *inventory.Allocatable {
	return buildInventory(coretest.GPUs(n), core.DefaultConfig(), lost...)
}

// migGPU is a full GPU, and one with three MIG instances of two profiles.
func migGPU(lost ...int) *inventory.Allocatable {
	return buildInventory(coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "1g.10gb+me", "1g.10gb"), mixedConfig(), lost...)
}

func mixedConfig() core.Config {
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	return c
}

// cutInSeven is n GPUs with seven MIG instances each.
func cutInSeven(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	for i := range n {
		s = coretest.WithMIG(s, i, slices.Repeat([]string{"1g.10gb"}, 7)...)
	}
	return s
}

// shared shares each device, also MIG instances, among replicas units of the same resource.
func shared(replicas int) core.Config {
	c := mixedConfig()
	for _, pool := range []string{inventory.DefaultPool, inventory.MIGPool("1g.10gb")} {
		c.Policy.Shares = append(c.Policy.Shares, inventory.Share{
			Pool: pool, Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas},
		})
	}
	return c
}

// renamedShares shares each GPU among replicas units of nvidia.com/gpu.shared.
func renamedShares(replicas int) core.Config {
	c := shared(replicas)
	c.Policy.Shares[0].Rename = "gpu.shared"
	return c
}

// newTestServer returns the service of a resource over an inventory.
func newTestServer(resource string, inv *inventory.Allocatable) *server {
	src := coretest.NewSource()
	src.Set(inv)
	return newServer(resource, src, podresources.New(podresources.Options{}))
}

func newServer(resource string, src Source, pods *podresources.Poller) *server {
	log := slog.New(slog.DiscardHandler)
	o := Options{Handover: &Handover{}, Lock: &sync.Mutex{}, Log: log}
	e := &endpoint{resource: resource, opts: o, timings: defaultTimings, tracker: newTracker(src, o, pods), log: log}
	return &server{endpoint: e, streams: newStreams()}
}

// allocateRequest requests the device IDs of each container.
func allocateRequest(containers ...[]string) *v1beta1.AllocateRequest {
	r := &v1beta1.AllocateRequest{}
	for _, ids := range containers {
		r.ContainerRequests = append(r.ContainerRequests, &v1beta1.ContainerAllocateRequest{DevicesIds: ids})
	}
	return r
}

func ids(devices []*v1beta1.Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.GetID()
	}
	return names
}

// gpuIDs returns the IDs of GPUs by index.
func gpuIDs(numbers ...int) []string {
	names := make([]string, len(numbers))
	for i, n := range numbers {
		names[i] = string(coretest.GPU(n))
	}
	return names
}

// replica returns the ID of the n-th unit of GPU i.
func replica(i, n int) string { return fmt.Sprintf("%s::%d", coretest.GPU(i), n) }
