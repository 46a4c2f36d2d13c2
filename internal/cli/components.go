package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/internal/node/resetserver"
)

// componentVerbs are the verbs of the components, which do for the agents of a node what these have no rights for: see node/component.
func (p Program) componentVerbs() []verb {
	return []verb{
		{Name: "reset-server", Do: p.component(resetserver.StopWithin, p.resetServer),
			Usage: "reset GPUs for the running agents of this node, which have taken them for that, until a signal: as root and with the privileges that nvidia-smi needs",
			Flags: []cli.Flag{text("program", "nvidia-smi by its absolute path, in the driver's root if that is a root; where the driver has it if not given")}},
		{Name: "limit-server", Do: p.component(limitserver.StopWithin, p.limitServer),
			Usage: "set limits of device memory on the control groups of pods for the running agents of this node, until a signal: as root and with the capability SYS_ADMIN",
			Flags: []cli.Flag{&cli.BoolFlag{Name: "ready", Usage: "ask the limit-server that runs on this node, and fail if it does not serve"}}},
	}
}

// component is the action of a verb that serves a socket in the state directory until a signal, and takes stopWithin then.
func (p Program) component(stopWithin time.Duration, serve func(context.Context, *cli.Command, agent.Options) error) func(context.Context, *cli.Command) error {
	return func(ctx context.Context, c *cli.Command) error {
		o, err := p.options(ctx)
		if err != nil {
			return err
		}
		if o.Health.StateDir == "" {
			return fmt.Errorf("%s: the agents ask by a socket in the state directory: set state_dir", c.Name)
		}
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		if p.StopWithin != nil {
			p.StopWithin(stopWithin)
		}
		return serve(ctx, c, o)
	}
}

func (p Program) resetServer(ctx context.Context, c *cli.Command, o agent.Options) error {
	roots := o.Core.Roots
	program := gpureset.Program{Root: roots.Driver, Path: c.String("program"), Libraries: nvidia.LibraryFolders()}
	lock := gpureset.NewLock(o.Health.StateDir)
	local := gpureset.Local{Proc: roots.Proc, Program: program, Lock: lock}
	server := resetserver.Server{StateDir: o.Health.StateDir, Resetter: local, Lock: lock, Log: p.log()}
	server.Run(ctx)
	return nil
}

func (p Program) limitServer(ctx context.Context, c *cli.Command, o agent.Options) error {
	if c.Bool("ready") {
		return limitserver.Client{Socket: limitserver.Path(o.Health.StateDir)}.Serves(ctx)
	}
	server := limitserver.Server{StateDir: o.Health.StateDir, Groups: cgroup.FS{Mount: o.Core.Roots.Cgroup}, Open: openForLimits(o), Log: p.log()}
	return server.Run(ctx)
}

// openForLimits opens the driver as the agent does.
func openForLimits(o agent.Options) func() (limitserver.Driver, error) {
	return func() (limitserver.Driver, error) {
		session, err := o.Open()
		if err != nil {
			return nil, err
		}
		d, ok := session.(limitserver.Driver)
		if !ok {
			return nil, errors.Join(errors.New("this driver has no limits"), session.Close())
		}
		return d, nil
	}
}
