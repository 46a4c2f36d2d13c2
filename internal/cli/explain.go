package cli

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

func (p Program) explainVerb() verb {
	return verb{Name: "explain", Usage: "print what a request for devices would get and why; without arguments, what the configuration makes of each device",
		ArgsUsage: "[DEVICE...]", MaxArgs: maxExplained, Flags: []cli.Flag{
			text("pool", "name of a resource or pool, such as gpu; that of the devices, the only one, or gpu if not given"),
			&cli.IntFlag{Name: "count", Usage: "number of devices; the given ones if not given"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
		}, Do: p.explain}
}

// maxExplained is the number of devices in one question: more than a node has units that fit one message.
const maxExplained = 1000

func (p Program) explain(ctx context.Context, c *cli.Command) error {
	if c.IsSet("count") && c.Int("count") < 1 {
		return command.Usagef("explain: --count = %d: want a positive number of devices", c.Int("count"))
	}
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	p.noteFile(ctx, c, o)
	args := explain.Args{Devices: c.Args().Slice(), Pool: c.String("pool"), Count: c.Int("count")}
	read := func(ctx context.Context) (explain.Explanation, error) {
		return explain.Explain(explain.Input{State: agent.ReadStateOnce(ctx, o), Adapter: p.Explain()}, args)
	}
	return control.Explain(ctx, socket(o), args, read, p.Stdout, c.Bool("json"))
}
