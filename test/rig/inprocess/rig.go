package inprocess

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Orchestrators are a kubelet and a Nomad client, on their side of the plugin protocols.
type Orchestrators struct {
	T       testing.TB
	Kubelet *kubelettest.Kubelet
	Nomad   *rig.NomadClient
}

// Serve offers one source to a kubelet, whose pods hold no device, and one to Nomad, until ctx ends.
func Serve(ctx context.Context, t testing.TB, toKubelet, toNomad nomadadapter.Source, running *sync.WaitGroup) *Orchestrators {
	t.Helper()
	o := &Orchestrators{T: t, Nomad: rig.NewNomadClient()}
	var pods string
	o.Kubelet, pods = startKubelet(t)
	adapter := deviceplugin.New(toKubelet, deviceplugin.Options{
		KubeletSocket: o.Kubelet.Socket(), PodResourcesSocket: pods, MPSRoot: "/run/nvidia/mps", Check: toKubelet.CheckReservation,
		Lists: deviceplugin.DeviceLists{CDINames: true},
	})
	running.Go(func() { _ = adapter.Run(ctx) })
	check.NoError(t, o.Nomad.Follow(ctx, Nomad(ctx, t, toNomad)))
	return o
}

// KubeletDevices is what the kubelet has now, by device ID.
func (o *Orchestrators) KubeletDevices() map[string]rig.View { return rig.KubeletDevices(o.Kubelet) }

// Allocate returns what a container of a pod with the devices, of one resource, would get.
func (o *Orchestrators) Allocate(ids ...string) (rig.Grant, error) {
	return rig.Allocate(o.T.Context(), o.Kubelet, o.KubeletDevices()[ids[0]].Name, ids...)
}

// limit is for anything that has to happen, on a machine under load.
const limit = 60 * time.Second

// Await waits until ok holds for the devices of each orchestrator, and logs and returns how long that took since began.
func (o *Orchestrators) Await(what string, began time.Time, ok func(map[string]rig.View) bool) time.Duration {
	o.T.Helper()
	ctx, cancel := context.WithTimeout(o.T.Context(), limit)
	defer cancel()
	var waiting sync.WaitGroup
	var kubeletErr, nomadErr error
	var kubeletTook, nomadTook time.Duration
	waiting.Go(func() {
		kubeletErr = o.Kubelet.Await(ctx, what, func() bool { return ok(o.KubeletDevices()) })
		kubeletTook = time.Since(began)
	})
	waiting.Go(func() {
		nomadErr = o.Nomad.Await(ctx, what, ok)
		nomadTook = time.Since(began)
	})
	waiting.Wait()
	if err := errors.Join(kubeletErr, nomadErr); err != nil {
		o.T.Fatalf("%s: %v\nkubelet %+v\nNomad %+v", what, err, o.KubeletDevices(), o.Nomad.Devices())
	}
	o.T.Logf("%-55s kubelet %7.3f s   Nomad %7.3f s", what, kubeletTook.Seconds(), nomadTook.Seconds())
	return max(kubeletTook, nomadTook)
}

// AwaitOnly waits until both orchestrators have exactly these units, all healthy except some.
func (o *Orchestrators) AwaitOnly(what string, units []string, unhealthy ...string) {
	o.T.Helper()
	o.Await(what, time.Now(), func(devices map[string]rig.View) bool {
		for id, v := range devices {
			if !slices.Contains(units, id) || v.Healthy == slices.Contains(unhealthy, id) {
				return false
			}
		}
		return len(devices) == len(units)
	})
}

// Rig is a simulated machine that a monitor reads, with both orchestrators.
type Rig struct {
	*simdriver.Machine
	*Orchestrators
	Monitor *monitor.Monitor
	Config  core.Config
}

// shortWaits is a session whose event waits take 50 ms instead of a second: the monitor ends when the wait has.
type shortWaits struct{ *nvidia.Session }

func (s shortWaits) Wait(most time.Duration) ([]health.Observation, error) {
	return s.Session.Wait(min(most, 50*time.Millisecond))
}

// Start runs a monitor and both adapters until the test has ended, with the default configuration but for change. It returns after the first
// reading of the driver.
func Start(t testing.TB, m *simdriver.Machine, change ...func(*core.Config)) *Rig {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Injection.Nodes = inventory.MIGMixed, true
	cfg.Roots = Roots(m)
	for _, f := range change {
		f(&cfg)
	}
	check.NoError(t, cfg.Validate())
	r := &Rig{Machine: m, Config: cfg}
	r.Monitor = Monitor(cfg, nvidia.Options{Processes: cfg.ReservationCheck.Enabled()}, func(s *nvidia.Session) monitor.Session { return shortWaits{s} })
	r.Monitor.SetProcessCheck(func(p gpu.Process) bool { return nvidia.ProcessRunning(cfg.Roots, p) })

	ctx, cancel := context.WithCancel(context.Background()) // t's ends before the functions of its Cleanup
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	Run(ctx, t, r.Monitor, &running)
	r.Orchestrators = Serve(ctx, t, r.Monitor, r.Monitor, &running)
	for inv := range r.Monitor.Watch(ctx) { // before it, "no devices" would be right
		if inv.Driver().State != gpu.DriverPending {
			break
		}
	}
	return r
}

// Units are those of the machine without a policy: GPUs that are not in MIG mode, and instances.
func (r *Rig) Units() (ids []string) {
	r.T.Helper()
	slots, err := r.Slots()
	check.NoError(r.T, err)
	for _, slot := range slots {
		ids = append(ids, r.UnitsOf(slot)...)
	}
	return ids
}

// UnitsOf are those of one GPU.
func (r *Rig) UnitsOf(slot int) []string {
	r.T.Helper()
	mig, err := r.Get(slot, "mig")
	check.NoError(r.T, err)
	if mig != "yes" {
		return []string{r.UUID(slot)}
	}
	ids, err := r.Instances(slot)
	check.NoError(r.T, err)
	return ids
}
