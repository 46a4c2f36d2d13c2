// Package parity compares the two adapters: one machine, one core, both orchestrators' real protocols. They must offer the same
// units, agree on health, and allocate the same devices.
package parity

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const limit = 30 * time.Second // of each wait

// both are the two orchestrators' views of one monitor.
type both struct {
	*simdriver.Machine
	*orchestrators
	monitor *monitor.Monitor
}

// shortWaits is a session whose event waits take 50 ms instead of a second: the monitor ends when the wait has.
type shortWaits struct{ *nvidia.Session }

func (s shortWaits) Wait(most time.Duration) ([]health.Observation, error) {
	return s.Session.Wait(min(most, 50*time.Millisecond))
}

// start runs a monitor of a simulated machine, changed by prepare, and serves it to both.
func start(t testing.TB, machine string, prepare ...func(*simdriver.Machine) error) *both {
	t.Helper()
	return startWith(t, machine, func(*core.Config) {}, prepare...)
}

// startWith is start with a changed configuration.
func startWith(t testing.TB, machine string, tune func(*core.Config), prepare ...func(*simdriver.Machine) error) *both {
	b := &both{Machine: simdriver.Start(t, machine)}
	for _, script := range prepare {
		must(t, script(b.Machine))
	}
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Injection.Nodes = inventory.MIGMixed, true
	cfg.Probe, cfg.Rescan = 100*time.Millisecond, 500*time.Millisecond
	cfg.Roots = inprocess.Roots(b.Machine)
	tune(&cfg)
	m := inprocess.Monitor(cfg, nvidia.Options{Processes: cfg.ReservationCheck.Enabled()}, func(s *nvidia.Session) monitor.Session { return shortWaits{s} })
	m.SetProcessCheck(func(p gpu.Process) bool { return nvidia.ProcessRunning(cfg.Roots, p) })
	b.monitor = m

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	inprocess.Run(ctx, t, m, &running)
	b.orchestrators = serve(ctx, t, m, m, &running)
	inprocess.AwaitReading(ctx, m) // else "no devices" would be right before it
	return b
}

// await waits until both sides have n devices, of which those of sick are unhealthy.
func (b *both) await(t testing.TB, what string, n int, sick ...string) {
	t.Helper()
	right := func(health map[string]bool) bool {
		if len(health) != n {
			return false
		}
		for id, ok := range health {
			if ok == slices.Contains(sick, id) {
				return false
			}
		}
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	inNomad := false
	for range b.groups.Watch(ctx) {
		if inNomad = right(b.nomadHealth()); inNomad {
			break
		}
	}
	err := b.kubelet.Await(ctx, what, func() bool { h, _ := b.kubeletHealth(); return right(h) })
	if k, _ := b.kubeletHealth(); err != nil || !inNomad {
		t.Fatalf("%s: %v: Nomad has %v, the kubelet has %v", what, err, b.nomadHealth(), k)
	}
}

var until = check.Until

// dump writes what both list and allocate.
func (b *both) dump(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	_, resource := b.kubeletHealth()
	for _, g := range b.groups.Load() {
		fmt.Fprintf(&out, "nomad group %s/%s/%s\n", g.Vendor, g.Type, g.Name)
		for _, key := range slices.Sorted(maps.Keys(g.Attributes)) {
			a := g.Attributes[key]
			fmt.Fprintf(&out, "  %s = %s\n", key, strings.TrimSpace(a.GoString()))
		}
		for _, d := range g.Devices {
			fmt.Fprintf(&out, "  %s  pci %s  kubelet resource %s\n", d.ID, d.HwLocality.PciBusID, resource[d.ID])
			fmt.Fprintf(&out, "    %s\n", b.granted(t, d.ID, resource[d.ID]))
		}
	}
	return out.String()
}

// granted reserves a device on both sides, and fails unless a container would get the same.
func (b *both) granted(t *testing.T, id, resource string) string {
	t.Helper()
	n, err := b.nomad.Reserve([]string{id})
	if err != nil {
		t.Fatalf("nomad: %v", err)
	}
	k, err := b.kubelet.Allocate(t.Context(), resource, id)
	if err != nil {
		t.Fatalf("kubelet: %v", err)
	}
	var fromNomad, fromKubelet []string
	for _, d := range n.Devices {
		fromNomad = append(fromNomad, d.TaskPath+" "+d.CgroupPerms)
	}
	for _, d := range k.GetDevices() {
		fromKubelet = append(fromKubelet, d.GetContainerPath()+" "+d.GetPermissions())
	}
	delete(n.Envs, "TANDEM_GPU_NODES") // for tasks whose nodes Nomad forgets; a kubelet gives a container its nodes at each start
	if diff := cmp.Diff(n.Envs, k.GetEnvs()); diff != "" {
		t.Errorf("%s: environment (Nomad, kubelet): %s", id, diff)
	}
	if diff := cmp.Diff(fromNomad, fromKubelet); diff != "" {
		t.Errorf("%s: device nodes (Nomad, kubelet): %s", id, diff)
	}
	return fmt.Sprintf("env %v  nodes %s", n.Envs, strings.Join(fromNomad, ", "))
}

// units are the devices that the machine should offer: GPUs that are not in MIG mode, and instances.
func (b *both) units(t testing.TB) (ids []string) {
	t.Helper()
	slots, err := b.Slots()
	must(t, err)
	for _, slot := range slots {
		instances, err := b.Instances(slot)
		must(t, err)
		mig, err := b.Get(slot, "mig")
		must(t, err)
		if mig != "yes" {
			instances = []string{b.UUID(slot)}
		}
		ids = append(ids, instances...)
	}
	return ids
}

var must = check.NoError

// orchestrators are a kubelet and a Nomad client, on their side of the plugin protocol.
type orchestrators struct {
	kubelet *kubelettest.Kubelet
	nomad   device.DevicePlugin
	groups  *watch.Value[[]*device.DeviceGroup] // of Nomad's latest fingerprint
}

// serve offers one source to a kubelet and one to Nomad, over their protocols.
func serve(ctx context.Context, t testing.TB, toKubelet, toNomad nomadadapter.Source, running *sync.WaitGroup) *orchestrators {
	o := &orchestrators{groups: watch.NewValue[[]*device.DeviceGroup](nil)}
	o.serveKubelet(ctx, t, toKubelet, running)
	o.serveNomad(ctx, t, toNomad)
	return o
}

func (o *orchestrators) serveKubelet(ctx context.Context, t testing.TB, src nomadadapter.Source, running *sync.WaitGroup) {
	o.kubelet, _ = inprocess.Kubelet(t)
	adapter := deviceplugin.New(src, deviceplugin.Options{
		KubeletSocket: o.kubelet.Socket(), MPSRoot: "/run/nvidia/mps", Check: src.CheckReservation,
	})
	running.Go(func() { _ = adapter.Run(ctx) })
}

func (o *orchestrators) serveNomad(ctx context.Context, t testing.TB, src nomadadapter.Source) {
	o.nomad = inprocess.Nomad(ctx, t, src)
	stream, err := o.nomad.Fingerprint(ctx)
	must(t, err)
	go func() {
		for r := range stream {
			o.groups.Store(r.Devices)
		}
	}()
}

// nomadHealth is each device's health by Nomad's stream.
func (o *orchestrators) nomadHealth() map[string]bool {
	health := map[string]bool{}
	for _, g := range o.groups.Load() {
		for _, d := range g.Devices {
			health[d.ID] = d.Healthy
		}
	}
	return health
}

// kubeletHealth is each device's health by kubelet's streams, and its resource.
func (o *orchestrators) kubeletHealth() (health map[string]bool, resource map[string]string) {
	health, resource = map[string]bool{}, map[string]string{}
	for _, r := range o.kubelet.Registrations() {
		devices, _ := o.kubelet.Devices(r.Resource)
		for _, d := range devices {
			health[d.GetID()], resource[d.GetID()] = d.GetHealth() == v1beta1.Healthy, r.Resource
		}
	}
	return health, resource
}
