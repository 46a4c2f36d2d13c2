package checkpoint_test

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

// An agent that starts again knows what the one before knew: of a GPU that broke, and of one that is gone.
func TestHistoryOutlivesTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		machine := coretest.NewMachine(coretest.GPUs(3))
		live := func(during func(*monitor.Monitor)) {
			ctx, stop := context.WithCancel(t.Context())
			m := monitor.New(machine.Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), d.open())
			done := make(chan struct{})
			go func() {
				defer close(done)
				if err := m.Run(ctx); err != nil {
					t.Error(err)
				}
			}()
			time.Sleep(time.Minute)
			synctest.Wait()
			during(m)
			stop()
			<-done
		}
		health := func(m *monitor.Monitor, n int) core.Health {
			u, _ := m.Current().Unit(core.UnitID(coretest.GPU(n)))
			return u.Health
		}
		var broke core.Health
		live(func(m *monitor.Monitor) {
			machine.Raise(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 79})
			machine.Silence(coretest.GPU(2), core.Lost)
			time.Sleep(time.Minute)
			synctest.Wait()
			broke = health(m, 1)
		})
		live(func(m *monitor.Monitor) {
			if got := health(m, 1); got.Cause() != "XID_79" || got.State < core.Unhealthy || !got.Since.Equal(broke.Since) {
				t.Errorf("GPU 1 was %s and is %s", broke, got)
			}
			if got := health(m, 2); got.State != core.GPULost {
				t.Errorf("GPU 2 is %s", got)
			}
			if got := health(m, 0); got.State != core.Healthy {
				t.Errorf("GPU 0 is %s", got)
			}
			if chart, _ := m.State().Ledger.History(coretest.GPU(1)); len(chart.FaultCounts) != 1 || chart.FaultCounts[0].Count != 1 {
				t.Errorf("counted: %+v", chart.FaultCounts)
			}
		})
		d.boot("another")
		live(func(m *monitor.Monitor) {
			if got := health(m, 1); got.State != core.Healthy {
				t.Errorf("GPU 1 after a reboot: %s", got)
			}
		})
	})
}
