package live

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	// patience is for what must happen at all, on a machine with no time.
	patience = 60 * time.Second

	// tick is how often a machine looks again where nobody tells it.
	tick = 5 * time.Millisecond
)

// scene is a simulated machine with both orchestrators.
type scene struct {
	*simdriver.Machine
	t       testing.TB
	kubelet *kubelettest.Kubelet
	pods    string // socket where the kubelet says what pods hold
	nomad   *nomad
	monitor *monitor.Monitor // nil where agents run as processes
	cfg     core.Config      // likewise none
	renamed []string         // devices that may change their group on Nomad, being no longer what they were
}

// hasty is a configuration whose every wait is short.
func hasty(c *core.Config) {
	c.Probe, c.Rescan = 100*time.Millisecond, 500*time.Millisecond
	p := &c.Health
	p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.MaxRecoveries = 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, 100
}

// stage runs both adapters on a machine in this process, under the default configuration unless tuned. It
// returns when the driver was asked.
func stage(t testing.TB, m *simdriver.Machine, tune ...func(*core.Config)) *scene {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes = inventory.MIGMixed, true
	cfg.Roots = core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"}
	for _, f := range tune {
		f(&cfg)
	}
	must(t, cfg.Validate())
	s := &scene{Machine: m, t: t, nomad: newNomad(), cfg: cfg}
	s.monitor = monitor.New(func() (monitor.Session, error) {
		session, err := nvidia.Open(nvidia.Options{Roots: cfg.Roots})
		if err != nil {
			return nil, err // not a nil *Session in an interface
		}
		return session, nil
	}, cfg, slog.New(slog.DiscardHandler), nil)

	ctx, cancel := context.WithCancel(context.Background()) // t's ends before what is checked in the end
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() {
		if err := s.monitor.Run(ctx); err != nil {
			t.Error("monitor:", err)
		}
	})
	s.startKubelet()
	adapter := kubeadapter.New(s.monitor, kubeadapter.Options{KubeletSocket: s.kubelet.Socket(), PodResourcesSocket: s.pods})
	running.Go(func() { _ = adapter.Run(ctx) })
	s.serveNomad(ctx)
	t.Cleanup(s.keepsItsWord) // before anything ends
	for inv := range s.monitor.Watch(ctx) {
		if inv.Driver().State != gpu.DriverPending {
			break
		}
	}
	return s
}

// startKubelet starts a kubelet without plugins. Its pods hold no device for longer than a moment.
func (s *scene) startKubelet() {
	s.t.Helper()
	dir, err := os.MkdirTemp("", "live") // t.TempDir's names are too long for a socket
	must(s.t, err)
	s.kubelet = kubelettest.New(dir)
	must(s.t, s.kubelet.Start())
	s.pods = filepath.Join(dir, "pod-resources", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(s.pods)
	must(s.t, err)
	s.t.Cleanup(func() { s.kubelet.Stop(); pods.Close(); _ = os.RemoveAll(dir) })
}

// serveNomad has this process be the plugin, over gRPC.
func (s *scene) serveNomad(ctx context.Context) {
	s.t.Helper()
	source := func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return s.monitor }
	adapter := nomadadapter.New(ctx, "2.0.0", source, hclog.NewNullLogger())
	must(s.t, s.nomad.follow(ctx, nomadtest.Serve(s.t, adapter)))
}

// units are the devices that the machine should offer: GPUs that are not in MIG mode, and instances.
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

// resources is the resource of each device that the kubelet has now; healthy is its health.
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

// took says how long each orchestrator took to be told.
type took struct{ kubelet, nomad time.Duration }

func (d took) most() time.Duration { return max(d.kubelet, d.nomad) }

// settles waits until both orchestrators have just these devices, well but for the sick. It prints how long
// that took since began.
func (s *scene) settles(what string, began time.Time, devices []string, sick ...string) took {
	s.t.Helper()
	return s.await(what, began, func(health map[string]bool) bool {
		for id, ok := range health {
			if !slices.Contains(devices, id) || ok == slices.Contains(sick, id) {
				return false
			}
		}
		return len(health) == len(devices)
	})
}

// offers waits until both orchestrators have the devices as healthy, whatever else they have.
func (s *scene) offers(what string, began time.Time, devices []string) took {
	s.t.Helper()
	return s.await(what, began, func(health map[string]bool) bool {
		return !slices.ContainsFunc(devices, func(id string) bool { return !health[id] })
	})
}

// refuses waits until both orchestrators know that the devices take no work, whether listed or not.
func (s *scene) refuses(what string, began time.Time, devices []string) took {
	s.t.Helper()
	return s.await(what, began, func(health map[string]bool) bool {
		return !slices.ContainsFunc(devices, func(id string) bool { return health[id] })
	})
}

// await waits until what both orchestrators were told is right, as health by ID.
func (s *scene) await(what string, began time.Time, right func(map[string]bool) bool) (d took) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	var waiting sync.WaitGroup
	var kubelet, nomad error
	waiting.Go(func() {
		kubelet = s.kubelet.Await(ctx, what, func() bool { _, healthy := s.resources(); return right(healthy) })
		d.kubelet = time.Since(began)
	})
	waiting.Go(func() {
		nomad = s.nomad.await(ctx, func(f fingerprint) bool { return f.stream > 0 && right(f.health()) })
		d.nomad = time.Since(began)
	})
	waiting.Wait()
	if err := errors.Join(kubelet, nomad); err != nil {
		_, healthy := s.resources()
		s.t.Fatalf("%s: %v\nkubelet %v\nNomad %v\nthe machine %v", what, err, healthy, s.nomad.last().health(), s.units())
	}
	s.t.Logf("%-55s kubelet %7.3f s   Nomad %7.3f s", what, d.kubelet.Seconds(), d.nomad.Seconds())
	return d
}

// until waits for something that neither stream has to show, and says how long that took.
func (s *scene) until(what string, ok func() bool) time.Duration {
	s.t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > 2*patience {
			s.t.Fatal("never:", what)
		}
		time.Sleep(tick)
	}
	return time.Since(began)
}

// rewrite changes machine.conf as an editor would: at once, for what no control function does.
func (s *scene) rewrite(change func(text string) string) {
	s.t.Helper()
	path := s.Root + "/machine.conf"
	text, err := os.ReadFile(path)
	must(s.t, err)
	changed := change(string(text))
	if changed == string(text) {
		s.t.Fatal("machine.conf is laid out otherwise now")
	}
	must(s.t, os.WriteFile(path+".edited", []byte(changed), 0o644), os.Rename(path+".edited", path), s.Sync())
}

// without is s without some of its elements.
func without(s []string, gone ...string) []string {
	return slices.DeleteFunc(slices.Clone(s), func(e string) bool { return slices.Contains(gone, e) })
}

// swapped exchanges two words wherever they stand.
func swapped(text, a, b string) string {
	const none = "\x00"
	return strings.NewReplacer(none, b).Replace(strings.ReplaceAll(strings.ReplaceAll(text, a, none), b, a))
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
