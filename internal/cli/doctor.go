package cli

import (
	"context"
	"errors"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// errProblems ends a process with ExitFound. Its text is empty, because the problems were printed.
var errProblems = errors.New("")

// driverDeadline is how long doctor waits for a call of the driver. A healthy one enumerates 16 GPUs in a second.
const driverDeadline = 4 * time.Second

// doctor prints why there is no GPU, or fewer than expected. A configuration with problems is a finding, and the rest is checked
// with what of it is valid.
func (p Program) doctor(ctx context.Context, c *cli.Command) error {
	o, checks, err := p.Doctor(c.String("host-root"))
	if command.IsUsage(err) {
		return err
	}
	o.Core.Health.CallDeadline = min(o.Core.Health.CallDeadline, driverDeadline)
	findings := doctor.Run(ctx, doctor.Options{
		Program: o.Name, Roots: o.Core.Roots, HostRoot: c.String("host-root"),
		StateDir: o.Health.StateDir, KernelLog: o.Health.KernelLog, KernelLogOptional: o.Health.KernelLogOptional,
		CDI: func() []cdi.File { return cdi.List(o.CDI) }, Config: err,
		Agent:  func(ctx context.Context) (report.Report, error) { return control.Report(ctx, socket(o)) },
		Driver: func(ctx context.Context) report.Report { return agent.ReadOnce(ctx, o) },
		Prove:  o.Prove, ProofSettings: agent.ProofSettings(o), Reset: o.Reset, ResetSettings: agent.ResetSettings(o), Resetter: o.Resetter,
		ResetPause: o.ResetPause, Checks: checks,
		Limits: strongestLimit(o.Core.Policy), LimitSettings: agent.LimitSettings(o), LimitSetter: readyOf(o.LimitSetter), Hook: o.CDI.HookPath,
	})
	write := func() error { return doctor.Write(p.Stdout, findings, c.Bool("all")) }
	if c.Bool("json") {
		write = func() error { return doctor.WriteJSON(p.Stdout, findings) }
	}
	if err := write(); err != nil || doctor.Problems(findings) == 0 {
		return err
	}
	return errProblems
}

// strongestLimit is what a policy asks of limits of device memory: the strongest of its rules.
func strongestLimit(p inventory.Policy) (mode inventory.LimitMode) {
	for _, r := range p.Rules {
		if r.Sharing != nil {
			mode = max(mode, r.Sharing.Limit)
		}
	}
	for _, s := range p.Shares {
		mode = max(mode, s.Sharing.Limit)
	}
	return mode
}

// readyOf is how what sets limits is asked whether it can, where that is a component of its own.
func readyOf(s limits.Setter) func(context.Context) error {
	if component, ok := s.(limits.Readier); ok {
		return component.Ready
	}
	return nil
}
