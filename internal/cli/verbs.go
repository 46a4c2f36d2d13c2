package cli

import (
	"context"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// verb is a command that an operator gives.
type verb = command.Verb

func text(name, usage string) cli.Flag { return command.Text(name, usage) }

func (p Program) verbs() []verb {
	device := text("gpu", "UUID or the beginning of it, PCI address, or index")
	cause := text("cause", "such as XID_95, as inspect shows it; every cause if not given")
	verified := text("verified-at", "time of the check, such as 2026-11-20T10:31:00Z: what happened later remains; now if not given")
	asJSON := &cli.BoolFlag{Name: "json", Usage: "print JSON"}
	verbs := []verb{
		{Name: "inspect", Usage: "print what is offered, all active conditions and their causes; without a running agent, what one would offer",
			Flags: []cli.Flag{asJSON}, Do: p.inspect},
		{Name: "validate", Usage: "read the configuration, and print what it means or every problem; exit code 1 if there is one",
			ArgsUsage: "[FILE]", MaxArgs: 1, Flags: []cli.Flag{asJSON}, Do: p.validate},
		{Name: "doctor", Usage: "look for the reasons why there is no GPU, or fewer than expected; exit code 3 if there is a problem",
			Flags: []cli.Flag{asJSON, &cli.BoolFlag{Name: "all", Usage: "also print what is in order"}, text("host-root", "root of the host's file system, if that is not /, such as /host in a debugging pod")},
			Do:    p.doctor},
		{Name: "schema", Usage: "print the JSON Schema of the configuration file, with which editors complete and check it", Do: func(context.Context, *cli.Command) error {
			return config.WriteFileSchema(p.Stdout)
		}},
		{Name: "clear", Usage: "end conditions of a GPU that an operator has verified to be over",
			Flags: []cli.Flag{device, cause, verified}, Do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Clear(ctx, path, control.ClearArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"),
				}, p.Stdout)
			})},
		{Name: "ignore", Usage: "ignore conditions of a GPU for a while",
			Flags: []cli.Flag{device, cause, verified, text("until", "a duration such as 4h, or a time")},
			Do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Ignore(ctx, path, control.IgnoreArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"), Until: c.String("until"),
				}, p.Stdout)
			})},
		{Name: "simulate", Usage: "simulate a fault on the running agent, if its configuration allows it", ArgsUsage: "xid|event CODE", MaxArgs: 2,
			Flags: []cli.Flag{device, text("gi", "number of a GPU instance; the whole GPU if not given"), text("ci", "number of a compute instance in it")},
			Do:    p.simulate},
		{Name: "quiesce", Usage: "close the driver, so that a GPU can be reset or partitioned and the driver unloaded; nothing takes work meanwhile (also: SIGUSR1)",
			Flags: []cli.Flag{text("for", "a duration such as 2h, or a time; until resumed if not given")},
			Do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Quiesce(ctx, path, control.QuiesceArgs{For: c.String("for")}, p.Stdout)
			})},
		{Name: "resume", Usage: "open the driver again after quiesce (also: SIGUSR2)",
			Do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Resume(ctx, path, p.Stdout)
			})},
		{Name: "reload", Usage: "have the running agent read its configuration again (also: SIGHUP)",
			Do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Reload(ctx, path, p.Stdout)
			})},
		{Name: "rebind", Usage: "bind indices, numbers of devices and the common MIG profile of the policy to the devices of the driver's present order; end the work on those first",
			Do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Rebind(ctx, path, p.Stdout)
			})},
		{Name: "cdi", Usage: "list the CDI specifications of this node, or remove those of this agent after it has ended",
			ArgsUsage: "list|remove", MaxArgs: 1, Flags: []cli.Flag{asJSON}, Do: p.cdi},
		p.explainVerb(), p.topVerb(), p.migrateVerb(), p.mpsDaemonVerb(), p.resetVerb(), p.proveVerb(),
		{Name: "debug", Usage: "print internals of the running agent: tasks, driver calls, endpoints, goroutines",
			Flags: []cli.Flag{asJSON}, Do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Debug(ctx, path, p.Stdout, c.Bool("json"))
			})},
	}
	if p.Components {
		verbs = slices.Insert(verbs, indexOf(verbs, "debug"), p.componentVerbs()...)
	}
	return p.withMigration(verbs)
}

func indexOf(verbs []verb, name string) int {
	return slices.IndexFunc(verbs, func(v verb) bool { return v.Name == name })
}

// withMigration adds the verbs for the way from another plugin or API, before "debug".
func (p Program) withMigration(verbs []verb) []verb {
	var more []verb
	if p.Import != nil {
		more = append(more, p.importVerb())
	}
	if p.Shadow != nil {
		more = append(more, p.shadowVerb())
	}
	if p.Classes != nil {
		more = append(more, p.classesVerb())
	}
	return slices.Insert(verbs, indexOf(verbs, "debug"), more...)
}

// onAgent is the action of a verb that needs nothing but the socket of the running agent.
func (p Program) onAgent(do func(ctx context.Context, path string, c *cli.Command) error) func(context.Context, *cli.Command) error {
	return func(ctx context.Context, c *cli.Command) error {
		o, err := p.options(ctx)
		if err != nil {
			return err
		}
		return do(ctx, socket(o), c)
	}
}

func (p Program) inspect(ctx context.Context, c *cli.Command) error {
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	p.noteFile(ctx, c, o)
	read := func(ctx context.Context) report.Report { return agent.ReadOnce(ctx, o) }
	return control.Inspect(ctx, socket(o), read, p.Stdout, c.Bool("json"))
}

func (p Program) simulate(ctx context.Context, c *cli.Command) error {
	if c.Args().Len() != 2 {
		return command.Usagef("simulate: want a fault, such as xid 79 or event 0x2000")
	}
	return p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
		return control.Simulate(ctx, path, control.SimulateArgs{
			Kind: c.Args().Get(0), Code: c.Args().Get(1), GPU: c.String("gpu"), GI: c.String("gi"), CI: c.String("ci"),
		}, p.Stdout)
	})(ctx, c)
}
