// Package parity holds the two adapters against each other: one machine, one core, both orchestrators'
// real protocols. They must offer the same units, agree on health, and hand out the same devices.
package parity

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var update = flag.Bool("update", false, "write the golden files anew")

const patience = 30 * time.Second

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

// start follows a simulated machine, scripted by prepare, with a monitor and serves it to both. Its every wait
// is short, so that a test sees recovery.
func start(t testing.TB, machine string, prepare ...func(*simdriver.Machine) error) *both {
	p := health.DefaultPolicy()
	p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.MaxRecoveries = 200*time.Millisecond, 300*time.Millisecond, 300*time.Millisecond, 100
	return startUnder(t, p, machine, prepare...)
}

// startUnder is start under another policy.
func startUnder(t testing.TB, p health.Policy, machine string, prepare ...func(*simdriver.Machine) error) *both {
	b := &both{Machine: simdriver.Start(t, machine)}
	for _, script := range prepare {
		must(t, script(b.Machine))
	}
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes = inventory.MIGMixed, true
	cfg.Probe, cfg.Rescan = 100*time.Millisecond, 500*time.Millisecond
	cfg.Health = p
	cfg.Roots = core.Roots{Driver: b.Root, Dev: b.Root, Sys: b.Root + "/sys", Proc: b.Root + "/proc"}
	m := monitor.New(func() (monitor.Session, error) {
		s, err := nvidia.Open(nvidia.Options{Roots: cfg.Roots})
		if err != nil {
			return nil, err
		}
		return shortWaits{s}, nil
	}, cfg, slog.New(slog.DiscardHandler), nil)
	b.monitor = m

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.Error("monitor:", err)
		}
	})
	b.orchestrators = serve(ctx, t, m, m, &running)
	for inv := range m.Watch(ctx) { // else "no devices" would be right before anybody has looked
		if inv.Driver().State != gpu.DriverPending {
			break
		}
	}
	return b
}

// await waits until both sides say want of the devices that there are.
func (b *both) await(t testing.TB, what string, n int, sick ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
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
	for {
		b.mu.Lock()
		changed := b.changed
		b.mu.Unlock()
		if right(b.nomadHealth()) {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%s: Nomad sees %v", what, b.nomadHealth())
		}
	}
	if err := b.kubelet.Await(ctx, what, func() bool { h, _ := b.kubeletHealth(); return right(h) }); err != nil {
		h, _ := b.kubeletHealth()
		t.Fatalf("%v: kubelet sees %v", err, h)
	}
}

// dump writes what both see and what they would hand out.
func (b *both) dump(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	_, resource := b.kubeletHealth()
	b.mu.Lock()
	groups := b.groups
	b.mu.Unlock()
	for _, g := range groups {
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
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range slots {
		instances, err := b.Instances(slot)
		if err != nil {
			t.Fatal(err)
		}
		mig, err := b.Get(slot, "mig")
		if err != nil {
			t.Fatal(err)
		}
		if mig != "yes" {
			instances = []string{b.UUID(slot)}
		}
		ids = append(ids, instances...)
	}
	return ids
}

func TestEveryMachineLooksTheSame(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			b := start(t, name)
			units := b.units(t)
			b.await(t, "all healthy", len(units))
			got := b.dump(t)
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(golden, []byte(got), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Error("go test -update writes the files anew\n", diff)
			}
		})
	}
}

func TestBothAgreeWhateverHappens(t *testing.T) {
	b := start(t, "h100x8")
	all := b.units(t)
	b.await(t, "start", 8)

	must(t, b.Lose(3))
	b.await(t, "GPU 3 lost", 8, all[3])
	must(t, b.Fail(simdriver.GPU(5), "*", "UNKNOWN", 0))
	b.await(t, "GPU 5 answers with errors too", 8, all[3], all[5])
	must(t, b.Restore(3), b.Heal())
	b.await(t, "both back", 8)

	must(t, b.Unload())
	b.await(t, "driver unloaded", 8, all...)
	must(t, b.Load())
	b.await(t, "driver loaded", 8)

	must(t, b.Set(1, "recovery_action", "1"), b.Set(6, "recovery_action", "2"))
	stop := b.raise(t, 6, 79)
	b.await(t, "XID 79 on GPU 6, GPU 1 wants a reset", 8, all[1], all[6])
	stop()
	must(t, b.XID(2, 31), b.XID(1, 48))
	until(t, "XID 48 is counted", func() bool { return b.told(all[1], 48) })
	b.await(t, "XID 48 on GPU 1, an application's XID 31 on GPU 2", 8, all[1], all[6])
	must(t, b.Reset(1))
	b.await(t, "GPU 1 was reset", 8, all[6])
}

// One GPU of eight answers every call with an error, from the start: seven are offered on both sides, the
// eighth is named with its reason.
func TestOneOfEightCanNotBeRead(t *testing.T) {
	b := start(t, "h100x8", func(m *simdriver.Machine) error {
		return m.Fail(simdriver.GPU(7), "*", "UNKNOWN", simdriver.Always)
	})
	b.await(t, "seven of eight", 7)
	excluded := b.monitor.Current().Excluded()
	if len(excluded) != 1 || excluded[0].Index != 7 || !strings.Contains(excluded[0].Reason, "Unknown Error") {
		t.Errorf("excluded: %+v", excluded)
	}
	must(t, b.Heal())
	b.await(t, "healed", 8)
}

func TestBothAgreeOnMIG(t *testing.T) {
	b := start(t, "a100-mig")
	all := b.units(t)
	b.await(t, "start", len(all))
	slots, err := b.Slots()
	must(t, err)
	cut := slices.IndexFunc(slots, func(slot int) bool { ids, _ := b.Instances(slot); return len(ids) >= 3 })
	if cut < 0 {
		t.Fatal("this machine has no GPU with three instances")
	}
	instances, err := b.Instances(slots[cut])
	must(t, err)

	must(t, b.Lose(slots[cut]))
	b.await(t, "a GPU with MIG instances is lost: all of them, no other", len(all), instances...)
	must(t, b.Restore(slots[cut]))
	b.await(t, "back", len(all))
	defer b.raise(t, slots[cut], 48)()
	b.await(t, "an XID of the whole GPU", len(all), instances...)
}

// raise repeats an XID until stopped: one that comes before the driver's event set is made is not heard,
// which is NVML's way and not what these tests are about.
func (b *both) raise(t *testing.T, slot int, code uint64) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for every := time.NewTicker(100 * time.Millisecond); ctx.Err() == nil; {
			if err := b.XID(slot, code); err != nil {
				t.Error(err)
			}
			select {
			case <-every.C:
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); running.Wait() }
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
