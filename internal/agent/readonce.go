package agent

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// ReadOnce is the report of an agent with these options that would start now, with the history and on the node that it would
// find. A node without a driver is not an error. It returns in time even if the driver does not answer.
func ReadOnce(ctx context.Context, o Options) report.Report {
	state, _, problems := readOnce(ctx, o, false)
	return report.DescribeState(state, o.Core, problems...)
}

// ReadUseOnce is ReadOnce with the usage of the devices, as far as the driver answers in time. Owners are not known.
func ReadUseOnce(ctx context.Context, o Options) report.Report {
	state, usage, problems := readOnce(ctx, o, true)
	table := use.Table{At: time.Now()}
	for _, u := range usage {
		table.Devices = append(table.Devices, use.Device{ID: u.Device, Usage: u})
	}
	return report.DescribeState(state, o.Core, problems...).WithUse(table)
}

// ReadStateOnce is the state that ReadOnce describes.
func ReadStateOnce(ctx context.Context, o Options) core.State {
	state, _, _ := readOnce(ctx, o, false)
	return state
}

func readOnce(ctx context.Context, o Options, withUsage bool) (state core.State, usage []gpu.Usage, problems []problem.Problem) {
	var file *history.File
	var store monitor.Store
	if o.Health.StateDir != "" {
		file = history.OpenReadOnly(o.Health.StateDir, o.Name, o.Core.Roots.Proc)
		store = file
	}
	state, usage = report.Read(ctx, o.Open, o.Core, store, withUsage)
	return withWhatAgentsDo(state, readHost(o, state), o.Core, o.CDI), usage, file.Problems()
}

// withWhatAgentsDo is a state with what only a running agent does: specifications as it would have written them, and limits of device memory, of which this process
// does not try whether they can be set (doctor has what keeps them from it).
func withWhatAgentsDo(state core.State, host inventory.Host, cfg core.Config, specifications cdi.Options) core.State {
	if state.Allocatable.NeedsCDI() {
		if c := cdi.ReadOnce(specifications, state); c != nil {
			host.CDI = c
		}
	}
	host.Limits = state.Inventory.UntriedLimits()
	return state.WithHost(cfg, time.Now(), host)
}
