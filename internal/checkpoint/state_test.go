package checkpoint_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// run runs a monitor with the history for a minute, then calls during and stops it.
func (d *disk) run(m *coretest.Machine, during func(*monitor.Monitor)) {
	d.Helper()
	ctx, stop := context.WithCancel(d.Context())
	agent := monitor.New(m.Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), d.open())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	time.Sleep(time.Minute)
	synctest.Wait()
	during(agent)
	stop()
	if err := <-done; err != nil {
		d.Error(err)
	}
}

// A restarted agent has the history of a GPU with a fault and of one that is lost.
func TestHistoryOutlivesTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		machine := coretest.NewMachine(coretest.GPUs(3))
		healthOf := func(m *monitor.Monitor, n int) health.Health {
			u, _ := m.Current().Unit(inventory.UnitID(coretest.GPU(n)))
			return u.Health
		}
		var before health.Health
		d.run(machine, func(m *monitor.Monitor) {
			machine.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 79})
			machine.FailGPU(coretest.GPU(2), health.Lost)
			time.Sleep(time.Minute)
			synctest.Wait()
			before = healthOf(m, 1)
		})
		d.run(machine, func(m *monitor.Monitor) {
			if got := healthOf(m, 1); got.Cause() != "XID_79" || got.State < health.Unhealthy || !got.Since.Equal(before.Since) {
				t.Errorf("GPU 1 was %s and is %s", before, got)
			}
			if got := healthOf(m, 2); got.State != health.GPULost {
				t.Errorf("GPU 2 is %s", got)
			}
			if got := healthOf(m, 0); got.State != health.Healthy {
				t.Errorf("GPU 0 is %s", got)
			}
			if h, _ := m.State().Ledger.History(coretest.GPU(1)); len(h.FaultCounts) != 1 || h.FaultCounts[0].Count != 1 {
				t.Errorf("counted: %+v", h.FaultCounts)
			}
		})
		d.boot("another")
		d.run(machine, func(m *monitor.Monitor) {
			if got := healthOf(m, 1); got.State != health.Healthy {
				t.Errorf("GPU 1 after a reboot: %s", got)
			}
		})
	})
}
