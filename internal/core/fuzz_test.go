package core_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// FuzzRestore: the state from any checkpoint offers nothing before the first snapshot, can be written again, and
// does not change by being written twice.
func FuzzRestore(f *testing.F) {
	cfg, now := core.DefaultConfig(), time.Unix(1_800_000_000, 0)
	full := core.NewState(cfg).Read(cfg, now, coretest.GPUs(3)).Observe(cfg, now,
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.Lost},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.Event, Code: 0x2000}).EnterMaintenance(cfg, now, health.Maintenance{Since: now})
	seed, err := json.Marshal(full.Checkpoint("a"))
	if err != nil {
		f.Fatal(err)
	}
	for _, text := range []string{
		string(seed), `{}`, `{"BootID":"a","Devices":[{"ID":"GPU-a","At":{"GPU":"GPU-a"}},{"ID":"GPU-a"}]}`,
		`{"Conditions":[{"At":{"GPU":"GPU-a"},"Reason":"RECOVERY_ACTION","Code":255},{"At":{"GPU":"GPU-a"},"State":"lost","Last":"9999-12-31T23:59:59Z"}]}`,
		`{"GPUs":{"":{},"GPU-a":{"FaultCounts":null,"Sample":{"RecoveryAction":"reset"}}}}`, `{"Maintenance":{"Since":"0001-01-01T00:00:01Z"}}`,
	} {
		f.Add([]byte(text), false)
		f.Add([]byte(text), true)
	}
	same := []cmp.Option{cmpopts.IgnoreUnexported(health.GPUHistory{}, health.FaultCount{}), cmpopts.EquateEmpty()}
	f.Fuzz(func(t *testing.T, text []byte, rebooted bool) {
		var r core.Checkpoint
		if json.Unmarshal(text, &r) != nil {
			return
		}
		boot := r.BootID
		if rebooted {
			boot += "'"
		}
		s := core.Restore(cfg, r, boot)
		if s.Allocatable.Len() > 0 || s.Allocatable.Driver().State != gpu.DriverPending {
			t.Errorf("offered before the first snapshot: %d units, driver %v", s.Allocatable.Len(), s.Allocatable.Driver())
		}
		kept := s.Checkpoint(boot)
		again := core.Restore(cfg, kept, boot).Checkpoint(boot)
		if diff := cmp.Diff(kept, again, same...); diff != "" {
			t.Errorf("written twice:\n%s", diff)
		}
		read := s.ExitMaintenance().Read(cfg, now, coretest.GPUs(2)).Observe(cfg, now.Add(time.Hour),
			health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 48})
		for u := range read.Allocatable.Units() {
			if u.Health.Schedulable() && u.ID == inventory.UnitID(coretest.GPU(1)) {
				t.Errorf("%s takes work after XID 48: %v", u.ID, u.Health)
			}
		}
		if !slices.ContainsFunc(read.Checkpoint(boot).Devices, func(d gpu.Device) bool { return d.ID == coretest.GPU(0) }) {
			t.Error("a GPU that was read is not in the checkpoint")
		}
	})
}

// FuzzUnitIDs: any unit ID reserves exactly its own unit.
func FuzzUnitIDs(f *testing.F) {
	f.Add("GPU-a", "MIG-b", "GPU-a")
	f.Add("", "\x00", "a,b")
	f.Add("é", "e\u0301", "\xff")
	f.Fuzz(func(t *testing.T, a, b, asked string) {
		if a == b {
			return
		}
		s := gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}}
		for i, id := range []gpu.DeviceID{gpu.DeviceID(a), gpu.DeviceID(b)} {
			s.Devices = append(s.Devices, gpu.Device{ID: id, At: gpu.WholeGPU(id), Index: i, Minor: i})
		}
		inv := core.Build(gpu.NewSnapshot(s), health.Ledger{}, core.DefaultConfig()).WithoutHost()
		plan, err := inv.Reserve(inventory.UnitID(asked), inventory.UnitID(a))
		if known := asked == a || asked == b; (err == nil) != known {
			t.Fatalf("%q of %q and %q: %v", asked, a, b, err)
		} else if known && (!slices.ContainsFunc(plan.Devices, func(d gpu.Device) bool { return string(d.ID) == asked }) || (asked == a) != (len(plan.Devices) == 1)) {
			t.Errorf("%q of %q and %q: %v", asked, a, b, plan.Devices)
		}
		if n := len(inv.Prefer([]inventory.UnitID{inventory.UnitID(asked), inventory.UnitID(b)}, nil, 2)); n != 1 && asked != a || n > 2 {
			t.Errorf("%d are preferred of %q and %q", n, asked, b)
		}
	})
}

// The memory for codes that a driver invents is bounded, and codes with a name are still counted.
func TestBoundedUnderRandomCodes(t *testing.T) {
	const gpus, total, batch = 4, 1_000_000, 1000
	random := rand.New(rand.NewPCG(1, 2))
	p, l, now := health.DefaultPolicy(), health.Ledger{}, testStart
	obs := make([]health.Observation, batch)
	for range total / batch {
		for i := range obs {
			obs[i] = xidEvent(gpu.WholeGPU(gpu.DeviceID(fmt.Sprint("GPU-", random.IntN(gpus)))), random.Uint64())
		}
		now = now.Add(10 * time.Millisecond)
		l = l.Apply(p, now, obs...)
	}
	if n := len(l.Conditions()); n > gpus*70 {
		t.Errorf("%d conditions", n)
	}
	var counted uint64
	for i := range gpus {
		history, _ := l.History(gpu.DeviceID(fmt.Sprint("GPU-", i)))
		if n := len(history.FaultCounts); n > 70 {
			t.Errorf("%d fault counts", n)
		}
		for _, count := range history.FaultCounts {
			counted += count.Count
		}
	}
	if counted != total {
		t.Errorf("%d of %d XIDs were counted", counted, total)
	}
	lost := gpu.WholeGPU("GPU-0")
	if h := l.Apply(p, now, xidEvent(lost, 79)).Health(lost); h.Code != 79 {
		t.Errorf("a known XID afterwards: %s", h)
	}
}

// A year of faults takes no more memory than a day.
func TestBoundedOverUptime(t *testing.T) {
	s := newLedgerFixture(t)
	size := func() int {
		record := core.State{Ledger: s.ledger}.Checkpoint("boot")
		text, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		return len(text)
	}
	day := func() {
		for hour := range 24 {
			s.allocate(a)
			s.reportXIDs(13, 31, 80, 94, 95, 109, 500+uint64(hour))
			s.setSample(func(v *health.Sample) { v.Uncorrectable.Value++ })
			s.check(3)
			s.reset()
			s.failing[a.GPU] = health.Lost
			s.check(2)
			delete(s.failing, a.GPU)
			s.check(10)
			s.now = s.now.Add(time.Hour)
			_, _ = s.clear(health.Command{})
		}
	}
	for range 2 {
		day()
	}
	first := size()
	for range 30 {
		day()
	}
	if last := size(); last > first+first/10 {
		t.Errorf("%d bytes after two days, %d after a month", first, last)
	}
}
