package cli

import (
	"context"
	"slices"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// askAtMost is how long a completion waits for the running agent.
const askAtMost = 500 * time.Millisecond

// values are those of a flag that is no bool; none for a number, a path or a text: shells complete paths themselves.
func (p Program) values(ctx context.Context, f cli.Flag) []command.Candidate {
	if g, ok := f.(*cli.GenericFlag); ok { // of the agent
		if v, ok := g.Value.(*config.Flag); ok {
			return command.Words(v.Choices()...)
		}
	}
	switch f.Names()[0] {
	case "gpu":
		if s, ok := f.(*cli.StringFlag); ok && s.DefaultText == formUUID {
			return p.uuids(ctx)
		}
		return p.devices(ctx)
	case "cause":
		return p.causes(ctx)
	case "pool":
		return p.pools(ctx)
	case "to":
		return command.Words(apiWords()...)
	}
	return nil
}

// arguments are those of a verb.
func (p Program) arguments(ctx context.Context, c *cli.Command) []command.Candidate {
	first := !c.Args().Present()
	switch {
	case c.Name == "explain", c.Name == "migrate" && !first, c.Name == "reset" && first:
		return p.devices(ctx)
	case !first:
		return nil
	}
	switch c.Name {
	case "migrate":
		return command.Words("plan", "apply", "back")
	case "cdi":
		return command.Words("list", "remove")
	case "simulate":
		return command.Words("xid", "event")
	}
	return nil
}

// report is that of the running agent; empty if it does not answer soon.
func (p Program) report(ctx context.Context) report.Report {
	ctx, cancel := context.WithTimeout(ctx, askAtMost)
	defer cancel()
	o, _ := p.Options() // as far as they are valid
	r, _ := control.Report(ctx, socket(o))
	return r
}

// devices are the indices of devices, and their UUIDs. A PCI address has colons.
func (p Program) devices(ctx context.Context) []command.Candidate {
	var indices, ids []command.Candidate
	for _, d := range p.report(ctx).Devices {
		usage := d.Model + " " + d.State.String()
		indices = append(indices, command.Candidate{Word: d.CurrentIndex(), Usage: usage + " " + string(d.ID)})
		ids = append(ids, command.Candidate{Word: string(d.ID), Usage: usage})
	}
	return append(indices, ids...)
}

// uuids are those of devices.
func (p Program) uuids(ctx context.Context) (ids []command.Candidate) {
	for _, d := range p.report(ctx).Devices {
		ids = append(ids, command.Candidate{Word: string(d.ID), Usage: d.Model + " " + d.State.String()})
	}
	return ids
}

// causes are those of the active conditions.
func (p Program) causes(ctx context.Context) (all []command.Candidate) {
	for _, c := range p.report(ctx).Conditions {
		if !slices.ContainsFunc(all, func(o command.Candidate) bool { return o.Word == c.Cause }) {
			all = append(all, command.Candidate{Word: c.Cause, Usage: c.String()})
		}
	}
	return all
}

func (p Program) pools(ctx context.Context) (all []command.Candidate) {
	for _, d := range p.report(ctx).Devices {
		if !slices.ContainsFunc(all, func(o command.Candidate) bool { return o.Word == d.Pool }) {
			all = append(all, command.Candidate{Word: d.Pool, Usage: d.Sharing})
		}
	}
	return all
}
