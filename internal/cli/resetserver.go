package cli

import (
	"context"
	"errors"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/resetserver"
)

func (p Program) resetServerVerb() verb {
	return verb{Name: "reset-server", Do: p.resetServer,
		Usage: "reset GPUs for the running agents of this node, which have taken them for that, until a signal: as root and with the privileges that nvidia-smi needs",
		Flags: []cli.Flag{text("program", "nvidia-smi by its absolute path, in the driver's root if that is a root; where the driver has it if not given")}}
}

func (p Program) resetServer(ctx context.Context, c *cli.Command) error {
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	if o.Health.StateDir == "" {
		return errors.New("reset-server: the agents ask by a socket in the state directory: set state_dir")
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if p.StopWithin != nil {
		p.StopWithin(resetserver.StopWithin)
	}
	roots := o.Core.Roots
	program := gpureset.Program{Root: roots.Driver, Path: c.String("program"), Libraries: nvidia.LibraryFolders()}
	server := resetserver.Server{StateDir: o.Health.StateDir, Resetter: gpureset.Local{Proc: roots.Proc, Program: program}, Log: p.log()}
	server.Run(ctx)
	return nil
}
