package cli

import (
	"context"
	"fmt"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// verb is a command that an operator gives.
type verb struct {
	name, usage string
	argsUsage   string // "" = it has none
	maxArgs     int
	flags       []cli.Flag
	do          func(context.Context, *cli.Command) error
}

func text(name, usage string) cli.Flag { return &cli.StringFlag{Name: name, Usage: usage} }

func (p Program) verbs() []*cli.Command {
	device := text("gpu", "UUID or the beginning of it, PCI address, or index")
	cause := text("cause", "such as XID_95, as inspect shows it; every cause if not given")
	verified := text("verified-at", "time of the check, such as 2026-11-20T10:31:00Z: what happened later remains; now if not given")
	asJSON := &cli.BoolFlag{Name: "json", Usage: "print JSON"}
	verbs := []verb{
		{name: "inspect", usage: "print what is offered, all active conditions and their causes; without a running agent, what one would offer",
			flags: []cli.Flag{asJSON}, do: p.inspect},
		{name: "validate", usage: "read the configuration, and print what it means or every problem; exit code 1 if there is one",
			argsUsage: "[FILE]", maxArgs: 1, flags: []cli.Flag{asJSON}, do: p.validate},
		{name: "doctor", usage: "look for the reasons why there is no GPU, or fewer than expected; exit code 3 if there is a problem",
			flags: []cli.Flag{asJSON, &cli.BoolFlag{Name: "all", Usage: "also print what is in order"}, text("host-root", "root of the host's file system, if that is not /, such as /host in a debugging pod")},
			do:    p.doctor},
		{name: "schema", usage: "print the JSON Schema of the configuration file, with which editors complete and check it", do: func(context.Context, *cli.Command) error {
			return config.WriteFileSchema(p.Stdout)
		}},
		{name: "clear", usage: "end conditions of a GPU that an operator has verified to be over",
			flags: []cli.Flag{device, cause, verified}, do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Clear(ctx, path, control.ClearArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"),
				}, p.Stdout)
			})},
		{name: "ignore", usage: "ignore conditions of a GPU for a while",
			flags: []cli.Flag{device, cause, verified, text("until", "a duration such as 4h, or a time")},
			do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Ignore(ctx, path, control.IgnoreArgs{
					GPU: c.String("gpu"), Cause: c.String("cause"), VerifiedAt: c.String("verified-at"), Until: c.String("until"),
				}, p.Stdout)
			})},
		{name: "simulate", usage: "simulate a fault on the running agent, if its configuration allows it", argsUsage: "xid|event CODE", maxArgs: 2,
			flags: []cli.Flag{device, text("gi", "number of a GPU instance; the whole GPU if not given"), text("ci", "number of a compute instance in it")},
			do:    p.simulate},
		{name: "quiesce", usage: "close the driver, so that a GPU can be reset or partitioned and the driver unloaded; nothing takes work meanwhile (also: SIGUSR1)",
			flags: []cli.Flag{text("for", "a duration such as 2h, or a time; until resumed if not given")},
			do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Quiesce(ctx, path, control.QuiesceArgs{For: c.String("for")}, p.Stdout)
			})},
		{name: "resume", usage: "open the driver again after quiesce (also: SIGUSR2)",
			do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Resume(ctx, path, p.Stdout)
			})},
		{name: "reload", usage: "have the running agent read its configuration again (also: SIGHUP)",
			do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Reload(ctx, path, p.Stdout)
			})},
		{name: "rebind", usage: "bind indices, numbers of devices and the common MIG profile of the policy to the devices of the driver's present order; end the work on those first",
			do: p.onAgent(func(ctx context.Context, path string, _ *cli.Command) error {
				return control.Rebind(ctx, path, p.Stdout)
			})},
		{name: "cdi", usage: "list the CDI specifications of this node, or remove those of this agent after it has ended",
			argsUsage: "list|remove", maxArgs: 1, flags: []cli.Flag{asJSON}, do: p.cdi},
		p.explainVerb(), p.topVerb(), p.migrateVerb(), p.mpsDaemonVerb(),
		{name: "debug", usage: "print internals of the running agent: tasks, driver calls, endpoints, goroutines",
			flags: []cli.Flag{asJSON}, do: p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
				return control.Debug(ctx, path, p.Stdout, c.Bool("json"))
			})},
		{name: "version", usage: "print the version", do: func(context.Context, *cli.Command) error {
			_, err := fmt.Fprintln(p.Stdout, p.Version)
			return err
		}},
		{name: "help", usage: "print this, or the help of a command", argsUsage: "[COMMAND]", maxArgs: 1, do: help},
	}
	verbs = p.withMigration(verbs)
	commands := make([]*cli.Command, len(verbs))
	for i, v := range verbs {
		commands[i] = p.newCommand(v)
	}
	return commands
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
	at := slices.IndexFunc(verbs, func(v verb) bool { return v.name == "debug" })
	return slices.Insert(verbs, at, more...)
}

func (p Program) newCommand(v verb) *cli.Command {
	return &cli.Command{
		Name: v.name, Usage: v.usage, ArgsUsage: v.argsUsage, Flags: v.flags, OnUsageError: p.usageError, HideHelpCommand: true,
		ShellComplete: p.complete,
		Action: func(ctx context.Context, c *cli.Command) error {
			if c.Args().Len() > v.maxArgs {
				return Usagef("%s: unexpected argument %q: see %s %[1]s --help", v.name, c.Args().Get(v.maxArgs), p.Name)
			}
			return v.do(ctx, c)
		},
	}
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
		return Usagef("simulate: want a fault, such as xid 79 or event 0x2000")
	}
	return p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
		return control.Simulate(ctx, path, control.SimulateArgs{
			Kind: c.Args().Get(0), Code: c.Args().Get(1), GPU: c.String("gpu"), GI: c.String("gi"), CI: c.String("ci"),
		}, p.Stdout)
	})(ctx, c)
}

func help(ctx context.Context, c *cli.Command) error {
	name := c.Args().First()
	if name == "" {
		return cli.ShowRootCommandHelp(c)
	}
	if c.Root().Command(name) == nil {
		return unknownCommand(c.Root(), name)
	}
	return cli.ShowCommandHelp(ctx, c.Root(), name)
}
