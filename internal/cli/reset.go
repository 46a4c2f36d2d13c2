package cli

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/operator/control"
)

func (p Program) resetVerb() verb {
	return verb{Name: "reset", Usage: "have the running agent reset one GPU that nothing uses, and wait for the end; exit code 1 if it is not reset, with all reasons",
		ArgsUsage: "GPU", MaxArgs: 1, Flags: []cli.Flag{
			&cli.BoolFlag{Name: "dry-run", Usage: "print what would be done, and all that keeps it from beginning now; nothing is done; exit code 1 if it can't begin"},
			&cli.BoolFlag{Name: "lose-mig-layout", Usage: "also a GPU with MIG instances: a reset removes them"},
		}, Do: p.reset}
}

func (p Program) reset(ctx context.Context, c *cli.Command) error {
	if c.Args().Len() != 1 {
		return command.Usagef("reset: want a GPU: its UUID or the beginning of it, its PCI address, or its index")
	}
	return p.onAgent(func(ctx context.Context, path string, c *cli.Command) error {
		return control.Reset(ctx, path, control.ResetArgs{GPU: c.Args().First(), DryRun: c.Bool("dry-run"), LoseMIG: c.Bool("lose-mig-layout")}, p.Stdout)
	})(ctx, c)
}
