package monitor_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// What was logged while no agent ran counts before anything is offered. A log that can't be read in time holds nothing up.
func TestThePastOfTheKernelLogComesBeforeTheFirstReading(t *testing.T) {
	for took, before := range map[time.Duration]bool{time.Second / 2: true, time.Minute: false} {
		synctest.Test(t, func(t *testing.T) {
			s := &store{saved: sick(95)}
			mon := monitor.New(coretest.NewMachine(coretest.GPUs(2)).Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), s)
			mon.AwaitLog()
			r := running{t: t, Monitor: mon}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- mon.Run(ctx) }()
			go func() {
				if !mon.Restored(ctx) {
					t.Error("the history never came")
				}
				time.Sleep(took)
				mon.Report(core.Observation{PCI: "0000:10:00.0", Kind: core.XID, Code: 119, FromKernelLog: true, Backlog: true, NextSequence: 7},
					core.Observation{Kind: core.KernelLogRead, NextSequence: 9})
			}()
			offeredHealthy := false
			go func() {
				for inv := range mon.Watch(ctx) {
					u, ok := inv.Unit(core.UnitID(coretest.GPU(0)))
					offeredHealthy = offeredHealthy || ok && u.Health.State == core.Healthy
				}
			}()
			r.after(2 * time.Second)
			if offeredHealthy == before || r.Current().Len() != 2 {
				t.Errorf("read in %v: GPU 0 was offered as healthy: %t, %d units", took, offeredHealthy, r.Current().Len())
			}
			r.after(time.Hour).expect("in the end", map[int]core.HealthState{0: core.Unhealthy, 1: core.Unhealthy})
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if last := s.saved[len(s.saved)-1]; last.KernelLog != 9 {
				t.Errorf("the record goes on at %d", last.KernelLog)
			}
		})
	}
}
