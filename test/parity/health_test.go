package parity

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// One GPU of eight answers every call with an error, from the start: seven are offered on both sides, and the eighth is
// excluded with the reason.
func TestOneOfEightCanNotBeRead(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Fail(simdriver.GPU(7), "*", "UNKNOWN", simdriver.Always))
	b := start(t, m)
	b.AwaitOnly("seven of eight", b.Units()[:7])
	excluded := b.Monitor.Current().Excluded()
	if len(excluded) != 1 || excluded[0].Index != 7 || !strings.Contains(excluded[0].Reason, "Unknown Error") {
		t.Errorf("excluded: %+v", excluded)
	}
	must(t, b.Heal())
	b.AwaitOnly("healed", b.Units())
}

// counted reports whether the ledger has counted the XID.
func (b *both) counted(id string, code uint64) bool {
	history, _ := b.Monitor.State().Ledger.History(gpu.DeviceID(id))
	return slices.ContainsFunc(history.FaultCounts, func(t health.FaultCount) bool { return t.Reason == health.ReasonXID && t.Code == code })
}

// Every XID of the table, and some of no table, injected once: the two streams agree on each GPU's health,
// and on the reason where there is one.
func TestEveryXIDOnBothStreams(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	for slot := 8; slot < 32; slot++ { // to have many faults at once
		must(t, m.Add(slot, fmt.Sprintf("minor = %d", slot)))
	}
	b := start(t, m)
	all := b.Units()
	b.AwaitOnly("start", all)
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
		b.AwaitOnly(fmt.Sprintf("XIDs %d", batch), all, sick...)
		for slot, code := range batch {
			u := b.unit(all[slot])
			want := faultreport.Describe([]health.Health{u.Health})
			if u.Health.State == health.Healthy {
				want = ""
			} else if u.Health.Cause() != fmt.Sprintf("XID_%d", code) {
				t.Errorf("XID %d: the reason is %s", code, u.Health)
			}
			until(t, fmt.Sprintf("XID %d: %q in Nomad", code, want), func() bool { return b.Nomad.Devices()[all[slot]].Reason == want })
			if schedulable := xid.XID(code).Effect < xid.Withdraws; u.Health.Schedulable() != schedulable {
				t.Errorf("XID %d: %s", code, u.Health)
			}
		}
		for slot := range batch {
			_, err := b.Monitor.Clear(t.Context(), health.Command{GPU: gpu.DeviceID(all[slot])})
			if standing := xid.XID(batch[slot]).Effect > xid.None; standing && err != nil {
				t.Errorf("XID %d: clear: %v", batch[slot], err)
			}
		}
		b.AwaitOnly("cleared", all)
	}
}

// eventsRegistered reports whether the driver sends events of all GPUs.
func (b *both) eventsRegistered(ids []string) bool {
	ledger := b.Monitor.State().Ledger
	return !slices.ContainsFunc(ids, func(id string) bool {
		history, ok := ledger.History(gpu.DeviceID(id))
		return !ok || history.Sample.Events != health.Yes
	})
}

// BenchmarkEventToBothStreams is the time from a raised XID until Nomad's fingerprint and the kubelet's list
// both show it, at most once a second as orchestrators want it.
func BenchmarkEventToBothStreams(b *testing.B) {
	m := start(b, simdriver.Start(b, "h100x8"))
	all := m.Units()
	m.AwaitOnly("start", all)
	until(b, "events", func() bool { return m.eventsRegistered(all) })
	var took []time.Duration
	b.ResetTimer()
	for i := range b.N {
		slot := i % len(all)
		time.Sleep(1100 * time.Millisecond) // each stream waits for a second after a message
		raised := time.Now()
		must(b, m.XID(slot, 95))
		m.AwaitOnly("XID 95", all, all[:slot+1]...)
		took = append(took, time.Since(raised))
		if slot == len(all)-1 {
			for _, id := range all {
				_, err := m.Monitor.Clear(b.Context(), health.Command{GPU: gpu.DeviceID(id)})
				must(b, err)
			}
			m.AwaitOnly("cleared", all)
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
	b.ReportMetric(0, "ns/op")
}
