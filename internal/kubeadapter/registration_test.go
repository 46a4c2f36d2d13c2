package kubeadapter

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// Each test is a case of the kubelet contract: something that kubelets or their neighbours do to plugins.

func TestNothingIsRegisteredBeforeAUnitExists(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.start()
	if err := r.adapter.Ready(); err == nil || isIdle(err) {
		t.Errorf("pending driver: Ready = %v, want an error that is not idleness", err)
	}
	r.offer(core.NoDriver(core.DriverAbsent, "libnvidia-ml.so.1 not found"))
	if err := r.adapter.Ready(); !isIdle(err) || err.Error() != "no driver: libnvidia-ml.so.1 not found" {
		t.Errorf("absent driver: Ready = %v", err)
	}
	r.offer(core.Snapshot{Driver: core.Driver{State: core.DriverReady},
		Excluded: []core.Exclusion{{Index: 3, Reason: "GPU is lost"}}})
	if err := r.adapter.Ready(); !isIdle(err) || err.Error() != "no GPU to offer: GPU 3: GPU is lost" {
		t.Errorf("only excluded GPUs: Ready = %v", err)
	}
	if s := r.sockets(); len(s) > 0 {
		t.Errorf("sockets without a unit: %v", s)
	}
	r.offer(coretest.GPUs(1)) // a driver that comes late
	r.awaitHealthy(GPUResource, 1)
	r.awaitReady()
}

func TestRefusedRegistrationBacksOffAndRecovers(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{Refuse: errors.New("not today")})
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.await("three refusals", func() bool {
		s := r.adapter.Stats()
		return len(s) == 1 && s[0].RegistrationErrors >= 3
	})
	if err := r.adapter.Ready(); err == nil || isIdle(err) {
		t.Errorf("Ready = %v while refused", err)
	}
	r.kubelet.Behave(kubelettest.Behaviour{})
	r.awaitReady()
	if s := r.sockets(); len(s) != 1 {
		t.Errorf("sockets after refusals: %v, want one", s)
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
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(2))
	r.start()
	r.awaitReady()
	for i := range 20 {
		before := len(r.kubelet.Registrations())
		if i%2 == 0 {
			r.kubelet.Stop()
		} else {
			r.kubelet.Crash() // leaves a stale kubelet.sock
		}
		r.startKubelet()
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

// assertFreshSockets fails if a path was registered twice: kubelet 1.37 corrupts its books then.
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

func TestKubeletRestartsWhileRegisterIsInFlight(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{Delay: time.Hour})
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.await("registering", func() bool {
		err := r.adapter.Ready()
		return err != nil && strings.Contains(err.Error(), "registering")
	})
	r.kubelet.Crash()
	r.kubelet.Behave(kubelettest.Behaviour{})
	r.startKubelet()
	r.awaitReady()
}

func TestKubeletSocketPresentButRefusing(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.kubelet.Crash()
	if _, err := os.Stat(r.kubelet.Socket()); err != nil {
		t.Fatal("the crash left no socket:", err)
	}
	r.offer(coretest.GPUs(1))
	r.start()
	r.await("a reason", func() bool {
		err := r.adapter.Ready()
		return err != nil && strings.Contains(err.Error(), "connection refused")
	})
	if n := len(r.sockets()); n > 0 {
		t.Errorf("%d sockets made without a kubelet", n)
	}
	r.startKubelet()
	r.awaitReady()
}

func TestFolderAppearsLater(t *testing.T) {
	r := newRig(t)
	r.must(os.Remove(r.dir))
	r.offer(coretest.GPUs(1))
	r.start()
	r.await("a reason", func() bool {
		err := r.adapter.Ready()
		return err != nil && strings.Contains(err.Error(), "no such file")
	})
	r.startKubelet()
	r.awaitReady()
}

func TestOwnSocketDeleted(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.awaitReady()
	first := r.sockets()
	r.must(os.Remove(filepath.Join(r.dir, first[0])))
	r.must(r.kubelet.Await(r.ctx, "another registration", func() bool { return len(r.kubelet.Registrations()) == 2 }))
	r.awaitReady()
	if now := r.sockets(); len(now) != 1 || now[0] == first[0] {
		t.Errorf("sockets %v, then %v", first, now)
	}
}

func TestStreamEnds(t *testing.T) {
	for _, old := range []bool{false, true} {
		r := newRig(t)
		r.kubelet.Behave(kubelettest.Behaviour{OneClientPerResource: old})
		r.startKubelet()
		r.offer(coretest.GPUs(1))
		r.start()
		r.awaitReady()
		r.kubelet.EndStream(GPUResource)
		r.must(r.kubelet.Await(r.ctx, "another registration", func() bool { return len(r.kubelet.Registrations()) == 2 }))
		r.awaitHealthy(GPUResource, 1)
		r.awaitReady()
	}
}

func TestStreamNeverOpens(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{NoStream: true})
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.must(r.kubelet.Await(r.ctx, "a second try", func() bool { return len(r.kubelet.Registrations()) == 2 }))
	r.kubelet.Behave(kubelettest.Behaviour{})
	r.awaitReady()
	assertFreshSockets(t, r.kubelet)
}

// A rolling update with maxSurge: the new pod registers while the old one still runs.
func TestTwoProcesses(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(2))
	r.start()
	r.awaitReady()
	lists := len(r.kubelet.Lists(GPUResource))
	next, stopNext := r.another()
	defer stopNext()
	r.await("the next is ready", func() bool { return next.Ready() == nil })
	if r.adapter.Ready() != nil || len(r.sockets()) != 2 {
		t.Errorf("the next process disturbed the first: ready %v, sockets %v", r.adapter.Ready(), r.sockets())
	}
	r.stop()
	if capacity, allocatable := r.kubelet.Capacity(GPUResource); capacity != 2 || allocatable != 2 {
		t.Errorf("capacity %d, allocatable %d after the old process left, want 2 and 2", capacity, allocatable)
	}
	for _, l := range r.kubelet.Lists(GPUResource)[lists:] {
		if len(l) != 2 || l[0].GetHealth() != v1beta1.Healthy {
			t.Errorf("a list on the way out: %v", l)
		}
	}
}

func TestStopIsQuickAndSaysNothing(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.src.Set(buildInventory(migMachine(), mixedConfig()))
	r.start()
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
		t.Errorf("%d lists sent on the way out", n-lists)
	}
}

func TestAliveCallsItsOwnSockets(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start(func(a *Adapter) { a.timings.pollInterval = time.Hour })
	r.awaitReady()
	r.must(r.adapter.Alive(r.ctx))
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	if err := r.adapter.Alive(ctx); err == nil {
		t.Error("alive although the socket did not answer in time")
	}
}

func TestNoGoroutineIsLeftBehind(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(1))
	r.start()
	r.awaitReady()
	plugin, err := r.kubelet.Plugin(GPUResource)
	r.must(err)
	before := runtime.NumGoroutine()
	for range 100 { // a second stream beside the kubelet's, opened and left
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
