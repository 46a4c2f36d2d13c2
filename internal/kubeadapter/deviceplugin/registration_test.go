package deviceplugin

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestNothingIsRegisteredBeforeAUnitExists(t *testing.T) {
	r := startRig(t, coretest.NewSource().Current())
	for _, c := range []struct {
		snapshot gpu.Snapshot
		idle     bool
		want     string
	}{
		{gpu.NoDriver(gpu.DriverPending, ""), false, "the driver has not answered yet"},
		{gpu.NoDriver(gpu.DriverAbsent, "libnvidia-ml.so.1 not found"), true, "no driver: libnvidia-ml.so.1 not found"},
		{gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}, Excluded: []gpu.Exclusion{{Index: 3, Reason: "GPU is lost"}}}, true,
			"no GPU to offer: GPU 3: GPU is lost"},
	} {
		r.src.Set(core.Build(c.snapshot, health.Ledger{}, core.DefaultConfig()).WithoutHost())
		err := r.plugins.Ready()
		if _, idle := errors.AsType[*IdleError](err); idle != c.idle || err == nil || err.Error() != c.want {
			t.Errorf("Ready = %v, want %s", err, c.want)
		}
	}
	if s := r.sockets(); len(s) > 0 {
		t.Errorf("sockets without a unit: %v", s)
	}
	if err := idle(gpus(1)); !errors.Is(err, errNotOffered) { // before the endpoint is there
		t.Errorf("Ready = %v, want %v", err, errNotOffered)
	}
	r.src.Set(gpus(1)) // a driver that is loaded later
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	r.awaitReady()
}

// Until it is known whether CDI can be used nothing is offered: not as healthy, without the names, and not as unhealthy.
func TestNothingIsOfferedBeforeCDIIsKnown(t *testing.T) {
	src := coretest.NewSource()
	tr := newTracker(src, Options{Log: slog.New(slog.DiscardHandler), Handover: new(Handover)}, podresources.New(podresources.Options{}))
	cfg := core.DefaultConfig()
	cfg.Injection.CDI = inventory.CDIAuto
	ready := core.Build(coretest.GPUs(1), health.Ledger{}, cfg).WithoutHost()
	tr.setInventory(ready)
	if err := idle(ready); !errors.Is(err, errNotOffered) {
		t.Errorf("Ready = %v, want %v", err, errNotOffered)
	}
	if lists := tr.published.Load().byResource; len(lists) > 0 {
		t.Errorf("offered before CDI is known: %v", lists)
	}
	tr.setInventory(ready.WithHost(inventory.Host{CDI: &inventory.CDI{Problem: "no hooks"}}, inventory.OverlapWarn))
	if list := tr.published.Load().byResource[kubeadapter.GPUResource]; len(list) != 1 || !list[0].healthy {
		t.Errorf("offered when CDI is known: %v", list)
	}
}

// After a registration that fails the next one has a new socket, and the old one is removed.
func TestFailedRegistrationIsRetried(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet        kubelettest.Behaviour
		answer, stream time.Duration // for which it waits
	}{
		"refused":   {kubelettest.Behaviour{Refuse: errors.New("refused")}, time.Minute, time.Minute},
		"no answer": {kubelettest.Behaviour{Delay: time.Hour}, 20 * time.Millisecond, time.Minute},
		"no stream": {kubelettest.Behaviour{NoStream: true}, time.Minute, 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.kubelet.Behave(c.kubelet)
			r.startKubelet()
			r.start(gpus(1), func(p *Plugins) { p.timings.register, p.timings.openStream = c.answer, c.stream })
			check.Until(r, "three attempts", func() bool { return r.stats().RegistrationErrors+r.stats().Registrations >= 3 })
			if err := r.plugins.Ready(); err == nil {
				t.Error("ready")
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

func TestPluginsWaitForTheKubelet(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*rig)
		reason  string
	}{
		"socket of a killed kubelet": {func(r *rig) { r.startKubelet(); r.kubelet.Crash() }, "connection refused"},
		"no directory":               {func(r *rig) { check.NoError(r, os.Remove(r.dir)) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c.prepare(r)
			r.start(gpus(1))
			check.Until(r, "the reason", func() bool {
				err := r.plugins.Ready()
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

// Only sockets of an agent that has ended are removed: package pluginsocket has the other cases.
func TestStaleSocketsAreRemoved(t *testing.T) {
	r := newRig(t)
	r.startKubelet() // removes all sockets
	for _, name := range []string{"tandem-gpu-dead.sock", "nvidia-gpu.sock"} {
		l, err := pluginsocket.Listen(r.ctx, filepath.Join(r.dir, name))
		check.NoError(r, err)
		l.SetUnlinkOnClose(false)
		check.NoError(r, l.UnixListener.Close())
	}
	r.start(gpus(1))
	r.awaitReady()
	for name, want := range map[string]bool{"tandem-gpu-dead.sock": false, "nvidia-gpu.sock": true} {
		if _, err := os.Stat(filepath.Join(r.dir, name)); (err == nil) != want {
			t.Errorf("%s: %v, want a file: %v", name, err, want)
		}
	}
}

func TestServesWithoutAKubelet(t *testing.T) {
	r := newRig(t)
	r.start(gpus(1), func(p *Plugins) { p.opts.KubeletSocket, p.kubelet.socket = "", "" })
	r.awaitReady()
	if s := r.sockets(); !slices.Equal(s, []string{"tandem-gpu.sock"}) {
		t.Errorf("sockets %v, want a constant name", s)
	}
	check.NoError(r, r.plugins.Alive(r.ctx))
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	if err := r.plugins.Alive(ctx); err == nil {
		t.Error("alive although the socket did not answer in time")
	}
}

func TestSocketPathTooLong(t *testing.T) {
	r := startRig(t, gpus(1), func(p *Plugins) { p.kubelet.dir = filepath.Join(p.kubelet.dir, strings.Repeat("d", 90)) })
	check.Until(r, "a reason", func() bool {
		err := r.plugins.Ready()
		return err != nil && strings.Contains(err.Error(), "a socket can have 107: the path of the kubelet's folder must be shorter")
	})
}

// Two resource names of 63 characters differ in the last one. The paths of their sockets differ and are short enough for the
// kubelet's default directory, also after many registrations.
func TestLongestResourceNames(t *testing.T) {
	c := core.DefaultConfig()
	var resources []string
	for i, end := range []string{"a", "b"} {
		pool := strings.Repeat("x", 63-len(inventory.ResourceDomain)-1) + end
		resources = append(resources, inventory.ResourceDomain+pool)
		c.Policy.Rules = append(c.Policy.Rules, inventory.Rule{
			Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(i)}}, Pool: pool,
		})
	}
	r := startRig(t, buildInventory(coretest.GPUs(2), c))
	for _, resource := range resources {
		r.awaitHealthy(resource, 1)
	}
	names := r.sockets()
	if len(names) != 2 || names[0] == names[1] {
		t.Errorf("sockets %v", names)
	}
	for _, name := range names {
		if n := len(v1beta1.DevicePluginPath + name); n+len("999999") > pluginsocket.MaxPath {
			t.Errorf("%s: a path of %d characters", name, n)
		}
	}
}

// Each goroutine of the plugins is registered while it runs, and is not late without a fault.
func TestWatchdogTasks(t *testing.T) {
	registry := watchdog.NewRegistry()
	r := newRunning(t, 2, func(p *Plugins) { p.opts.Watchdog = registry })
	names := func() (names []string) {
		for _, s := range registry.Tasks() {
			names = append(names, s.Name)
		}
		return names
	}
	want := []string{"ListAndWatch " + kubeadapter.GPUResource, "endpoint " + kubeadapter.GPUResource, "plugin directory", "pod resources"}
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("registered: %v, want %v", got, want)
	}
	if late := registry.Late(time.Now()); len(late) != 0 {
		t.Errorf("late: %v", late)
	}
	r.kubelet.Stop()
	check.Until(r, "the end of the stream", func() bool { return !slices.Contains(names(), want[0]) })
	r.stop()
	if got := names(); len(got) != 0 {
		t.Errorf("still registered: %v", got)
	}
}
