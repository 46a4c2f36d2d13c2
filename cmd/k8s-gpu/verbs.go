package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/internal/sources"
)

// verbs are what an operator asks of the agent that runs here. Settings come from where the agent has them, and
// say where it is.
func verbs(w world, read func() (settings, error)) []*cli.Command {
	verb := func(name, usage, args string, do func(context.Context, settings, *cli.Command) error, flags ...cli.Flag) *cli.Command {
		return &cli.Command{
			Name: name, Usage: usage, ArgsUsage: args, Flags: flags, OnUsageError: usageError, HideHelpCommand: true,
			Action: func(ctx context.Context, c *cli.Command) error {
				if args == "" && c.Args().Present() {
					return fmt.Errorf("%s: unexpected argument %q: see k8s-gpu %s --help", name, c.Args().First(), name)
				}
				s, err := read()
				if err != nil {
					return err
				}
				return do(ctx, s, c)
			},
		}
	}
	gpu := text("gpu", "its UUID or the beginning of that, its PCI address or its index")
	cause := text("cause", "such as XID_95, as inspect shows it; every cause if not given")
	verified := text("verified-at", "when you looked, such as 2026-11-20T10:31:00Z: what happened later stays; now if not given")
	return []*cli.Command{
		verb("inspect", "print what is offered, what stands against it and why; without a running agent, what one would offer", "",
			func(ctx context.Context, s settings, c *cli.Command) error {
				return control.Inspect(ctx, socketPath(s), reader(s), w.stdout, c.Bool("json"))
			}, &cli.BoolFlag{Name: "json", Usage: "print JSON"}),
		verb("clear", "say that what was wrong with a GPU is over", "",
			func(ctx context.Context, s settings, c *cli.Command) error {
				return control.Clear(ctx, socketPath(s), control.ClearArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"),
				}, w.stdout)
			}, gpu, cause, verified),
		verb("ignore", "disregard for a while what is wrong with a GPU", "",
			func(ctx context.Context, s settings, c *cli.Command) error {
				return control.Ignore(ctx, socketPath(s), control.IgnoreArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"), Until: c.String("until"),
				}, w.stdout)
			}, gpu, cause, verified, text("until", "a duration such as 4h, or a time")),
		verb("simulate", "rehearse a fault on the running agent, if --simulation allows it", "xid|event CODE", simulate(w),
			gpu, text("gi", "number of a GPU instance; the whole GPU if not given"), text("ci", "number of a compute instance in it")),
		verb("quiesce", "leave the driver alone, so that a GPU can be reset or cut up and the driver unloaded; nothing is offered meanwhile", "",
			func(ctx context.Context, s settings, c *cli.Command) error {
				return control.Quiesce(ctx, socketPath(s), control.QuiesceArgs{For: c.String("for")}, w.stdout)
			}, text("for", "a duration such as 2h, or a time; until resumed if not given")),
		verb("resume", "take the driver back after quiesce", "",
			func(ctx context.Context, s settings, _ *cli.Command) error {
				return control.Resume(ctx, socketPath(s), w.stdout)
			}),
		verb("rebind", "have indices, numbers of devices and the common MIG profile of the policy mean the devices of the driver's present order; end the work on those first", "",
			func(ctx context.Context, s settings, _ *cli.Command) error {
				return control.Rebind(ctx, socketPath(s), w.stdout)
			}),
		verb("debug", "print the inside of the running agent: its parts, calls in the driver, endpoints, goroutines", "",
			func(ctx context.Context, s settings, c *cli.Command) error {
				return control.Debug(ctx, socketPath(s), w.stdout, c.Bool("json"))
			}, &cli.BoolFlag{Name: "json", Usage: "print JSON"}),
	}
}

func text(name, usage string) cli.Flag { return &cli.StringFlag{Name: name, Usage: usage} }

// simulate takes the fault as its arguments.
func simulate(w world) func(context.Context, settings, *cli.Command) error {
	return func(ctx context.Context, s settings, c *cli.Command) error {
		if c.Args().Len() != 2 {
			return fmt.Errorf("simulate: want a fault, such as xid 79 or event 0x2000")
		}
		return control.Simulate(ctx, socketPath(s), control.SimulateArgs{
			Kind: c.Args().Get(0), Code: c.Args().Get(1), GPU: c.String("gpu"), GI: c.String("gi"), CI: c.String("ci"),
		}, w.stdout)
	}
}

// reader reads the machine once, as the agent would.
func reader(s settings) func(context.Context) report.Report {
	return func(ctx context.Context) report.Report {
		return sources.Reading(ctx, opener(s), s.Core, s.MPSMount, s.Health.StateDir, agentName)
	}
}
