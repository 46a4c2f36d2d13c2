package parity

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestEveryMachineLooksTheSame(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			b := start(t, name)
			b.await(t, "all healthy", len(b.units(t)))
			goldenfile.Compare(t, filepath.Join("testdata", name+".golden"), b.dump(t))
		})
	}
}

// One GPU of eight answers every call with an error, from the start: seven are offered on both sides, and the eighth is
// excluded with the reason.
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

// nomadReason is the health description of a device in Nomad.
func (b *both) nomadReason(id string) string {
	for _, g := range b.groups.Load() {
		for _, d := range g.Devices {
			if d.ID == id {
				return d.HealthDesc
			}
		}
	}
	return "not listed"
}

// counted reports whether the ledger has counted the XID.
func (b *both) counted(id string, code uint64) bool {
	history, _ := b.monitor.State().Ledger.History(gpu.DeviceID(id))
	return slices.ContainsFunc(history.FaultCounts, func(t health.FaultCount) bool { return t.Reason == health.ReasonXID && t.Code == code })
}

// upTo32 adds GPUs to the 8-GPU machine, to have many faults at once.
func upTo32(m *simdriver.Machine) error {
	for slot := 8; slot < 32; slot++ {
		if err := m.Add(slot, fmt.Sprintf("minor = %d", slot)); err != nil {
			return err
		}
	}
	return nil
}

// Every XID of the table, and some of no table, injected once: the two streams agree on each GPU's health,
// and on the reason where there is one.
func TestEveryXIDOnBothStreams(t *testing.T) {
	b := start(t, "h100x8", upTo32)
	all := b.units(t)
	b.await(t, "start", len(all))
	until(t, "events of all GPUs", func() bool { return b.eventsRegistered(all) })

	codes := []uint64{178, 200, 999}
	for rule := range xid.XIDs() {
		codes = append(codes, rule.Code)
	}
	for batch := range slices.Chunk(codes, len(all)) {
		var sick []string
		for slot, code := range batch {
			must(t, b.XID(slot, code))
			if xid.XID(code).Effect >= xid.Withdraws {
				sick = append(sick, all[slot])
			}
		}
		for slot, code := range batch {
			until(t, fmt.Sprintf("XID %d is counted", code), func() bool { return b.counted(all[slot], code) })
		}
		b.await(t, fmt.Sprintf("XIDs %d", batch), len(all), sick...)
		for slot, code := range batch {
			u := b.unit(all[slot])
			want := u.Health.String()
			if u.Health.State == health.Healthy {
				want = ""
			} else if u.Health.Cause() != fmt.Sprintf("XID_%d", code) {
				t.Errorf("XID %d: the reason is %s", code, u.Health)
			}
			until(t, fmt.Sprintf("XID %d: %q in Nomad", code, want), func() bool { return b.nomadReason(all[slot]) == want })
			if schedulable := xid.XID(code).Effect < xid.Withdraws; u.Health.Schedulable() != schedulable {
				t.Errorf("XID %d: %s", code, u.Health)
			}
		}
		for slot := range batch {
			_, err := b.monitor.Clear(t.Context(), health.Command{GPU: gpu.DeviceID(all[slot])})
			if standing := xid.XID(batch[slot]).Effect > xid.None; standing && err != nil {
				t.Errorf("XID %d: clear: %v", batch[slot], err)
			}
		}
		b.await(t, "cleared", len(all))
	}
}

// eventsRegistered reports whether the driver sends events of all GPUs.
func (b *both) eventsRegistered(ids []string) bool {
	ledger := b.monitor.State().Ledger
	return !slices.ContainsFunc(ids, func(id string) bool {
		history, ok := ledger.History(gpu.DeviceID(id))
		return !ok || history.Sample.Events != health.Yes
	})
}

// A GPU in MIG mode: a fault of the whole GPU concerns all of its instances, one of an instance that instance.
func TestMIGScopes(t *testing.T) {
	b := start(t, "a100-mig")
	all := b.units(t)
	b.await(t, "start", len(all))
	slot, instances := b.mostInstances(t)
	gpu := gpu.DeviceID(b.UUID(slot))
	until(t, "events", func() bool { return b.eventsRegistered([]string{string(gpu)}) })
	clear := func() {
		if _, err := b.monitor.Clear(t.Context(), health.Command{GPU: gpu}); err != nil {
			t.Error(err)
		}
		b.await(t, "cleared", len(all))
	}
	if len(instances) != 7 {
		t.Fatalf("%d instances, want 7", len(instances))
	}

	must(t, b.XID(slot, 95))
	b.await(t, "an uncontained error", len(all), instances...)
	clear()

	// A reset takes the whole GPU, whatever instance the driver names.
	at := b.unit(instances[2]).Device.At
	must(t, b.XID(slot, 95, simdriver.At{GI: int(at.GI), CI: int(at.CI)}))
	b.await(t, "an uncontained error in one instance", len(all), instances...)
	clear()

	// A contained error concerns the instance: it is degraded, and its siblings are healthy.
	must(t, b.XID(slot, 94, simdriver.At{GI: int(at.GI), CI: simdriver.WholeInstance}))
	until(t, "the instance is degraded", func() bool { return b.unit(instances[2]).Health.State == health.Degraded })
	for i, id := range instances {
		if i != 2 && b.unit(id).Health.State != health.Healthy {
			t.Errorf("sibling %s is %v", id, b.unit(id).Health)
		}
	}
	b.await(t, "degraded takes work", len(all))
	clear()

	must(t, b.Lose(slot))
	b.await(t, "a lost GPU", len(all), instances...)
}

func (b *both) mostInstances(t *testing.T) (slot int, instances []string) {
	t.Helper()
	slots, err := b.Slots()
	must(t, err)
	for _, s := range slots {
		ids, err := b.Instances(s)
		must(t, err)
		if len(ids) > len(instances) {
			slot, instances = s, ids
		}
	}
	return slot, instances
}

func (b *both) unit(id string) inventory.Unit {
	u, _ := b.monitor.Current().Unit(inventory.UnitID(id))
	return u
}

// BenchmarkEventToBothStreams is the time from a raised XID until Nomad's fingerprint and the kubelet's list
// both show it, at most once a second as orchestrators want it.
func BenchmarkEventToBothStreams(b *testing.B) {
	m := start(b, "h100x8")
	all := m.units(b)
	m.await(b, "start", len(all))
	until(b, "events", func() bool { return m.eventsRegistered(all) })
	var took []time.Duration
	b.ResetTimer()
	for i := range b.N {
		slot := i % len(all)
		time.Sleep(1100 * time.Millisecond) // each stream waits for a second after a message
		raised := time.Now()
		must(b, m.XID(slot, 95))
		m.await(b, "XID 95", len(all), all[:slot+1]...)
		took = append(took, time.Since(raised))
		if slot == len(all)-1 {
			for _, id := range all {
				_, err := m.monitor.Clear(b.Context(), health.Command{GPU: gpu.DeviceID(id)})
				must(b, err)
			}
			m.await(b, "cleared", len(all))
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
	b.ReportMetric(0, "ns/op")
}
