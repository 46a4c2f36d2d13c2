package kubeadapter

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

func TestNothingIsRegisteredBeforeAUnitExists(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.start()
	if err := r.adapter.Ready(); err == nil || isIdle(err) {
		t.Errorf("pending driver: Ready = %v, want an error that is not an IdleError", err)
	}
	r.offer(gpu.NoDriver(gpu.DriverAbsent, "libnvidia-ml.so.1 not found"))
	if err := r.adapter.Ready(); !isIdle(err) || err.Error() != "no driver: libnvidia-ml.so.1 not found" {
		t.Errorf("absent driver: Ready = %v", err)
	}
	r.offer(gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady},
		Excluded: []gpu.Exclusion{{Index: 3, Reason: "GPU is lost"}}})
	if err := r.adapter.Ready(); !isIdle(err) || err.Error() != "no GPU to offer: GPU 3: GPU is lost" {
		t.Errorf("only excluded GPUs: Ready = %v", err)
	}
	if s := r.sockets(); len(s) > 0 {
		t.Errorf("sockets without a unit: %v", s)
	}
	r.offer(coretest.GPUs(1)) // a driver that is loaded later
	r.awaitHealthy(GPUResource, 1)
	r.awaitReady()
}

// After a registration that fails the next one has a new socket, and the old one is removed.
func TestFailedRegistrationIsRetried(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet kubelettest.Behaviour
		timeout time.Duration // of Register
	}{
		"refused":   {kubelettest.Behaviour{Refuse: errors.New("refused")}, time.Minute},
		"no answer": {kubelettest.Behaviour{Delay: time.Hour}, 20 * time.Millisecond},
		"no stream": {kubelettest.Behaviour{NoStream: true}, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.kubelet.Behave(c.kubelet)
			r.startKubelet()
			r.offer(coretest.GPUs(1))
			r.start(func(a *Adapter) { a.timings.register = c.timeout })
			r.await("three attempts", func() bool {
				s := r.adapter.Stats()
				return len(s) == 1 && s[0].RegistrationErrors+s[0].Registrations >= 3
			})
			if err := r.adapter.Ready(); err == nil || isIdle(err) {
				t.Errorf("Ready = %v", err)
			}
			r.kubelet.Behave(kubelettest.Behaviour{})
			r.awaitReady()
			if s := r.sockets(); len(s) != 1 {
				t.Errorf("sockets %v, want one", s)
			}
			assertFreshSockets(t, r.kubelet)
		})
	}
}

func TestSlowKubelet(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{Delay: 500 * time.Millisecond})
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.awaitReady()
	if n := len(r.kubelet.Registrations()); n != 1 {
		t.Errorf("%d registrations with a slow kubelet, want 1", n)
	}
}

func TestKubeletRestarts20Times(t *testing.T) {
	r := newRunning(t, 2)
	for i := range 20 {
		before := len(r.kubelet.Registrations())
		r.restartKubelet(i%2 == 1)
		r.awaitHealthy(GPUResource, 2)
		r.awaitReady()
		if n := len(r.kubelet.Registrations()) - before; n != 1 {
			t.Errorf("restart %d: %d registrations, want 1", i, n)
		}
	}
	if s := r.sockets(); len(s) != 1 {
		t.Errorf("sockets: %v, want one", s)
	}
	assertFreshSockets(t, r.kubelet)
}

// assertFreshSockets fails if a socket was registered twice: kubelet 1.37 corrupts its records then.
func assertFreshSockets(t *testing.T, k *kubelettest.Kubelet) {
	t.Helper()
	seen := map[string]bool{}
	for _, reg := range k.Attempts() {
		if seen[reg.Endpoint] {
			t.Errorf("%s registered twice", reg.Endpoint)
		}
		seen[reg.Endpoint] = true
	}
}

func TestKubeletRestartsBeforeTheStreamOpens(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet kubelettest.Behaviour
		reached func(*kubelettest.Kubelet) []kubelettest.Registration
	}{
		"during Register": {kubelettest.Behaviour{Delay: time.Hour}, (*kubelettest.Kubelet).Attempts},
		"after Register":  {kubelettest.Behaviour{StreamDelay: time.Hour}, (*kubelettest.Kubelet).Registrations},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.kubelet.Behave(c.kubelet)
			r.startKubelet()
			r.offer(coretest.GPUs(1))
			r.start(func(a *Adapter) { a.timings.openStream = time.Hour })
			r.must(r.kubelet.Await(r.ctx, name, func() bool { return len(c.reached(r.kubelet)) == 1 }))
			r.kubelet.Crash()
			r.kubelet.Behave(kubelettest.Behaviour{})
			r.startKubelet()
			r.awaitHealthy(GPUResource, 1)
			r.awaitReady()
		})
	}
}

func TestAdapterWaitsForTheKubelet(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*rig)
		reason  string
	}{
		"socket of a killed kubelet": {func(r *rig) { r.startKubelet(); r.kubelet.Crash() }, "connection refused"},
		"no directory":               {func(r *rig) { r.must(os.Remove(r.dir)) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c.prepare(r)
			r.offer(coretest.GPUs(1))
			r.start()
			r.await("the reason", func() bool {
				err := r.adapter.Ready()
				return err != nil && strings.Contains(err.Error(), c.reason)
			})
			if n := len(r.sockets()); n > 0 {
				t.Errorf("%d sockets without a kubelet", n)
			}
			r.startKubelet()
			r.awaitReady()
		})
	}
}

// A rolling update with maxSurge: the new pod registers while the old one still runs. If the newer one ends, the older one is
// called again (kubelet 1.37).
func TestTwoProcesses(t *testing.T) {
	r := newRunning(t, 2)
	next, stopNext := r.another()
	r.await("the next is ready", func() bool { return next.Ready() == nil })
	stopNext()
	r.await("a call of the older one", func() bool {
		_, err := r.kubelet.Allocate(r.ctx, GPUResource, gpuIDs(1)...)
		return err == nil && r.adapter.Stats()[0].Allocations > 0
	})
	r.awaitHealthy(GPUResource, 2)
	if n := len(r.kubelet.Attempts()); n != 2 {
		t.Errorf("%d registrations, want one of each", n)
	}
	lists := len(r.kubelet.Lists(GPUResource))
	next, stopNext = r.another()
	defer stopNext()
	r.await("the next is ready", func() bool { return next.Ready() == nil })
	if r.adapter.Ready() != nil || len(r.sockets()) != 2 {
		t.Errorf("the next process disturbed the first: ready %v, sockets %v", r.adapter.Ready(), r.sockets())
	}
	r.stop()
	if capacity, allocatable := r.kubelet.Capacity(GPUResource); capacity != 2 || allocatable != 2 {
		t.Errorf("capacity %d, allocatable %d after the old process ended, want 2 and 2", capacity, allocatable)
	}
	for _, l := range r.kubelet.Lists(GPUResource)[lists:] {
		if len(l) != 2 || l[0].GetHealth() != v1beta1.Healthy {
			t.Errorf("a list during the stop: %v", l)
		}
	}
}

func TestStopIsQuickAndSendsNoList(t *testing.T) {
	r := startRig(t, buildInventory(migGPU(), mixedConfig()))
	r.awaitReady()
	r.awaitHealthy(GPUResource, 1)
	r.awaitHealthy("nvidia.com/mig-1g.10gb", 2)
	r.awaitHealthy("nvidia.com/mig-1g.10gb.me", 1)
	lists := len(r.kubelet.Lists(GPUResource))
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > time.Second {
		t.Errorf("stopping took %v", took)
	}
	if s := r.sockets(); len(s) > 0 {
		t.Errorf("sockets left: %v", s)
	}
	r.must(r.kubelet.Await(r.ctx, "disconnected", func() bool { _, ok := r.kubelet.Devices(GPUResource); return !ok }))
	if n := len(r.kubelet.Lists(GPUResource)); n != lists {
		t.Errorf("%d lists sent during the stop", n-lists)
	}
}

func TestAliveCallsItsOwnSockets(t *testing.T) {
	r := newRunning(t, 1, func(a *Adapter) { a.timings.pollInterval = time.Hour })
	r.must(r.adapter.Alive(r.ctx))
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	if err := r.adapter.Alive(ctx); err == nil {
		t.Error("alive although the socket did not answer in time")
	}
}

func TestStreamsLeakNoGoroutine(t *testing.T) {
	r := newRunning(t, 1)
	plugin, err := r.kubelet.Plugin(GPUResource)
	r.must(err)
	before := runtime.NumGoroutine()
	for range 100 { // a second stream, opened and closed
		ctx, cancel := context.WithCancel(r.ctx)
		stream, err := plugin.ListAndWatch(ctx, &v1beta1.Empty{})
		r.must(err)
		list, err := stream.Recv()
		r.must(err)
		if len(list.GetDevices()) != 1 {
			t.Fatalf("second stream: %v", list)
		}
		cancel()
	}
	r.await("no more goroutines than before", func() bool { return runtime.NumGoroutine() <= before })
	if n := len(r.kubelet.Registrations()); n != 1 || r.adapter.Ready() != nil {
		t.Errorf("a second stream that ended disturbed the first: %d registrations, %v", n, r.adapter.Ready())
	}
}
