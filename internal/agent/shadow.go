package agent

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

const (
	shadowTick  = 100 * time.Millisecond // between looks for the first health check
	shadowFirst = 15 * time.Second       // for it; a driver call can hang, and the devices are shown then as they are
)

// Shadow runs an agent beside another plugin until ctx ends: it reads the driver, the node and the kernel log, and writes, records and
// registers nothing. It has no history and no control socket. changed is called with the state after the first health check, and then
// with each later one, from one goroutine; if it is slow, states are skipped.
func Shadow(ctx context.Context, o Options, changed func(core.State)) error {
	specifications := o.CDI
	o.Health = config.Health{KernelLog: o.Health.KernelLog, KernelLogOptional: true}
	o.Core.Occupancy = inventory.OccupancyOff
	o.CDI, o.Adapter, o.Handover, o.Reload, o.Signals, o.OnFailure = cdi.Options{}, nil, nil, nil, nil, nil
	o.Use.MappingDir = ""
	a := New(o)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- a.Run(ctx)
		cancel()
	}()
	awaitCheck(ctx, a.Monitor)
	for range a.Watch(ctx) {
		state := a.State()
		changed(withWhatAgentsDo(state, state.Host, o.Core, specifications))
	}
	cancel()
	if err := <-ended; err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// awaitCheck waits for the first health check, or for a driver that can't be read.
func awaitCheck(ctx context.Context, m *monitor.Monitor) {
	deadline := time.NewTimer(shadowFirst)
	defer deadline.Stop()
	tick := time.NewTicker(shadowTick)
	defer tick.Stop()
	for {
		state := m.Current().Driver().State
		if m.Stats().Checks > 0 || state != gpu.DriverPending && state != gpu.DriverReady {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
