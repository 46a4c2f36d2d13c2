package monitor_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// XIDs from before the start count before any device is offered. A log that is not read in time delays nothing.
func TestKernelLogIsReadBeforeTheFirstReading(t *testing.T) {
	for took, before := range map[time.Duration]bool{time.Second / 2: true, time.Minute: false} {
		synctest.Test(t, func(t *testing.T) {
			s := &store{saved: unhealthy(95)}
			r := start(t, coretest.NewMachine(coretest.GPUs(2)), setup{store: s, before: func(m *monitor.Monitor) {
				m.AwaitLog()
				go func() {
					if !m.Restored(t.Context()) {
						t.Error("the history was not restored")
					}
					time.Sleep(took)
					m.Report(health.Observation{PCI: "0000:10:00.0", Kind: health.XID, Code: 119, FromKernelLog: true, Backlog: true, NextSequence: 7},
						health.Observation{Kind: health.KernelLogRead, NextSequence: 9})
				}()
			}})
			r.after(2 * time.Second)
			offeredHealthy := false
			for _, inv := range r.seen {
				u, ok := inv.Unit(inventory.UnitID(coretest.GPU(0)))
				offeredHealthy = offeredHealthy || ok && u.Health.State == health.Healthy
			}
			if offeredHealthy == before || r.Current().Len() != 2 {
				t.Errorf("read in %v: GPU 0 was offered as healthy: %t, %d units", took, offeredHealthy, r.Current().Len())
			}
			r.after(time.Hour).expect("in the end", map[int]health.State{0: health.Unhealthy, 1: health.Unhealthy})
			must(t, r.stop())
			if last := s.saved[len(s.saved)-1]; last.KernelLog != 9 {
				t.Errorf("the saved position in the log is %d", last.KernelLog)
			}
		})
	}
}
