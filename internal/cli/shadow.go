package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/core"
)

// errDiffer is the error of a comparison that found differences.
var errDiffer = errors.New("shadow: there are differences")

// Shadow compares this agent with another plugin on the same node.
type Shadow struct {
	Where string     // where the other plugin's side is from: "the kubelet's pod-resources API"
	Flags []cli.Flag // beside those of the agent

	// Open returns the agent that would run, and what compares its state. get returns the text of one of Flags.
	Open func(get func(flag string) string) (agent.Options, func(context.Context, core.State) (shadow.Report, error), error)
}

func (p Program) shadowVerb() verb {
	return verb{
		Name: "shadow", Do: p.doShadow,
		Usage: "compare what this agent would offer with what another plugin does on this node, by " + p.Shadow.Where +
			"; registers, records and writes nothing; exit code 3 if something differs",
		Flags: append([]cli.Flag{
			text("for", "a duration such as 10m, for which changes are printed"),
			&cli.BoolFlag{Name: "once", Usage: "compare once, which is the default"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON; with --for one value a line"},
		}, p.Shadow.Flags...),
	}
}

func (p Program) doShadow(ctx context.Context, c *cli.Command) error {
	var length time.Duration
	if text := c.String("for"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 {
			return command.Usagef("shadow: --for %s: want a duration such as 10m", text)
		}
		if c.Bool("once") {
			return command.Usagef("shadow: want --for or --once, not both")
		}
		length = d
	}
	o, compare, err := p.Shadow.Open(c.String)
	if err != nil {
		return err
	}
	o.Log = slog.New(slog.NewTextHandler(p.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	differs, err := shadow.Run(ctx, shadow.Options{Agent: o, Compare: compare, For: length, JSON: c.Bool("json"), Out: p.Stdout})
	switch {
	case err != nil && ctx.Err() == nil:
		return fmt.Errorf("shadow: %w", err)
	case differs:
		return errDiffer
	}
	return nil
}
