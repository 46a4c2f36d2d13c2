package live

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	timeout  = 60 * time.Second // of anything that has to happen, on a machine under load
	interval = 5 * time.Millisecond
)

// scene is a simulated machine with both orchestrators.
type scene struct {
	*simdriver.Machine
	t       testing.TB
	kubelet *kubelettest.Kubelet
	pods    string // socket of kubelet's pod-resources API
	nomad   *nomad
	monitor *monitor.Monitor // nil where the agents are processes
	cfg     core.Config      // of monitor
}

// shortIntervals is a configuration with short intervals.
func shortIntervals(c *core.Config) {
	c.Probe, c.Rescan = 100*time.Millisecond, 500*time.Millisecond
	p := &c.Health
	p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.MaxRecoveries = 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, 100
}

// startScene runs both adapters on a machine in this process, with the default configuration unless it is changed. It
// returns after the first reading of the driver.
func startScene(t testing.TB, m *simdriver.Machine, change ...func(*core.Config)) *scene {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Injection.Nodes = inventory.MIGMixed, true
	cfg.Roots = inprocess.Roots(m)
	for _, f := range change {
		f(&cfg)
	}
	must(t, cfg.Validate())
	s := &scene{Machine: m, t: t, nomad: newNomad(), cfg: cfg}
	s.monitor = inprocess.Monitor(cfg, nvidia.Options{}, func(s *nvidia.Session) monitor.Session { return s })

	ctx, cancel := context.WithCancel(context.Background()) // t's ends before checkInvariants
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	inprocess.Run(ctx, t, s.monitor, &running)
	s.startKubelet()
	kube := deviceplugin.New(s.monitor, deviceplugin.Options{KubeletSocket: s.kubelet.Socket(), PodResourcesSocket: s.pods})
	running.Go(func() { _ = kube.Run(ctx) })
	must(t, s.nomad.follow(ctx, inprocess.Nomad(ctx, t, s.monitor)))
	t.Cleanup(s.checkInvariants) // before anything ends
	inprocess.AwaitReading(ctx, s.monitor)
	if len(cfg.Policy.Rules) == 0 {
		s.awaitUnits("start", time.Now(), s.units())
	}
	return s
}

// startKubelet starts a kubelet without plugins, whose pods hold no device.
func (s *scene) startKubelet() {
	s.t.Helper()
	var dir string
	s.kubelet, dir = inprocess.Kubelet(s.t)
	s.pods = filepath.Join(dir, "pod-resources", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(s.pods)
	must(s.t, err)
	s.t.Cleanup(pods.Close)
}

// units are those of the machine without a policy: GPUs that are not in MIG mode, and instances.
func (s *scene) units() (ids []string) {
	s.t.Helper()
	slots, err := s.Slots()
	must(s.t, err)
	for _, slot := range slots {
		ids = append(ids, s.unitsOf(slot)...)
	}
	return ids
}

// unitsOf are those of one GPU.
func (s *scene) unitsOf(slot int) []string {
	s.t.Helper()
	mig, err := s.Get(slot, "mig")
	must(s.t, err)
	if mig != "yes" {
		return []string{s.UUID(slot)}
	}
	ids, err := s.Instances(slot)
	must(s.t, err)
	return ids
}

// resources are the resource and the health of each device that the kubelet has now.
func (s *scene) resources() (resource map[string]string, healthy map[string]bool) {
	resource, healthy = map[string]string{}, map[string]bool{}
	for _, r := range s.kubelet.Registrations() {
		devices, _ := s.kubelet.Devices(r.Resource)
		for _, d := range devices {
			resource[d.GetID()], healthy[d.GetID()] = r.Resource, d.GetHealth() == v1beta1.Healthy
		}
	}
	return resource, healthy
}

// change is a change of the machine or the policy, with its effect.
type change struct {
	what      string
	do        func() error
	units     []string // afterwards; nil = those of the machine
	unhealthy []string // of units
	unchanged []string // units that are listed as healthy all the time
	silent    []string // resources without an update
}

// change makes a change, checks its effect, and returns how long it took to reach both orchestrators. Former units may still be listed as
// unhealthy afterwards: some seconds after their last Allocate they are removed, which must not be taken for an effect of the next change.
func (s *scene) change(c change) time.Duration {
	s.t.Helper()
	s.eventually(c.what+": former units are removed before", func() bool {
		return !slices.ContainsFunc(c.silent, func(resource string) bool {
			devices, _ := s.kubelet.Devices(resource)
			return slices.ContainsFunc(devices, func(d *v1beta1.Device) bool { return d.GetHealth() != v1beta1.Healthy })
		})
	})
	since, began := s.mark(), time.Now()
	must(s.t, c.do())
	if c.units == nil {
		c.units = s.units()
	}
	took := s.await(c.what, began, func(health map[string]bool) bool {
		for id, ok := range health {
			if ok && !slices.Contains(c.units, id) {
				return false
			}
		}
		return !slices.ContainsFunc(c.units, func(id string) bool {
			ok, listed := health[id]
			return !listed || ok == slices.Contains(c.unhealthy, id)
		})
	})
	s.checkUndisturbed(c.what, since, c.unchanged)
	s.checkNoUpdate(c.what, since, c.silent...)
	s.checkAllocatable(c.what, without(c.units, c.unhealthy...)...)
	return took
}

// awaitUnits waits until both orchestrators have exactly these units, all healthy except some.
func (s *scene) awaitUnits(what string, began time.Time, units []string, unhealthy ...string) time.Duration {
	s.t.Helper()
	return s.await(what, began, func(health map[string]bool) bool {
		for id, ok := range health {
			if !slices.Contains(units, id) || ok == slices.Contains(unhealthy, id) {
				return false
			}
		}
		return len(health) == len(units)
	})
}

// await waits until ok holds for the health by ID that each orchestrator has, and logs and returns how long that took.
func (s *scene) await(what string, began time.Time, ok func(map[string]bool) bool) time.Duration {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), timeout)
	defer cancel()
	var waiting sync.WaitGroup
	var kubeletErr, nomadErr error
	var kubeletTook, nomadTook time.Duration
	waiting.Go(func() {
		kubeletErr = s.kubelet.Await(ctx, what, func() bool { _, healthy := s.resources(); return ok(healthy) })
		kubeletTook = time.Since(began)
	})
	waiting.Go(func() {
		nomadErr = s.nomad.await(ctx, func(f fingerprint) bool { return f.stream > 0 && ok(f.health()) })
		nomadTook = time.Since(began)
	})
	waiting.Wait()
	if err := errors.Join(kubeletErr, nomadErr); err != nil {
		_, healthy := s.resources()
		s.t.Fatalf("%s: %v\nkubelet %v\nNomad %v\nmachine %v", what, err, healthy, s.nomad.last().health(), s.units())
	}
	s.t.Logf("%-55s kubelet %7.3f s   Nomad %7.3f s", what, kubeletTook.Seconds(), nomadTook.Seconds())
	return max(kubeletTook, nomadTook)
}

// eventually waits until ok returns true.
func (s *scene) eventually(what string, ok func() bool) {
	s.t.Helper()
	check.Until(s.t, what, ok)
}

// rewrite replaces machine.conf atomically, for changes that no control function makes.
func (s *scene) rewrite(change func(text string) string) error {
	path := s.Root + "/machine.conf"
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	changed := change(string(text))
	if changed == string(text) {
		return errors.New("machine.conf has another format")
	}
	return errors.Join(os.WriteFile(path+".edited", []byte(changed), 0o644), os.Rename(path+".edited", path), s.Sync())
}
