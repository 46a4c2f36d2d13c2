package cli

import (
	"context"
	"slices"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// askAtMost is how long a completion waits for the running agent.
const askAtMost = 500 * time.Millisecond

// values are those of a flag; none for a number, a path or a text: shells complete paths themselves.
func (p Program) values(ctx context.Context, f cli.Flag) []candidate {
	switch {
	case f == nil:
		return nil
	case isBool(f):
		return words("true", "false")
	}
	if g, ok := f.(*cli.GenericFlag); ok { // of the agent
		if v, ok := g.Value.(*config.Flag); ok {
			return words(v.Choices()...)
		}
	}
	switch f.Names()[0] {
	case "gpu":
		return p.devices(ctx)
	case "cause":
		return p.causes(ctx)
	case "pool":
		return p.pools(ctx)
	case "to":
		return words(apiWords()...)
	}
	return nil
}

// arguments are those of a command; of the program, its commands.
func (p Program) arguments(ctx context.Context, c *cli.Command) []candidate {
	first := !c.Args().Present()
	switch {
	case c.Name == "explain", c.Name == "migrate" && !first:
		return p.devices(ctx)
	case !first:
		return nil
	case c == c.Root(), c.Name == "help":
		var all []candidate
		for _, verb := range c.Root().Commands {
			all = append(all, candidate{verb.Name, verb.Usage})
		}
		return all
	}
	switch c.Name {
	case "migrate":
		return words("plan", "apply", "back")
	case "cdi":
		return words("list", "remove")
	case "simulate":
		return words("xid", "event")
	}
	return nil
}

func words(all ...string) (candidates []candidate) {
	for _, w := range all {
		candidates = append(candidates, candidate{word: w})
	}
	return candidates
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
func (p Program) devices(ctx context.Context) []candidate {
	var indices, ids []candidate
	for _, d := range p.report(ctx).Devices {
		usage := d.Model + " " + d.State.String()
		indices = append(indices, candidate{d.CurrentIndex(), usage + " " + string(d.ID)})
		ids = append(ids, candidate{string(d.ID), usage})
	}
	return append(indices, ids...)
}

// causes are those of the active conditions.
func (p Program) causes(ctx context.Context) (all []candidate) {
	for _, c := range p.report(ctx).Conditions {
		if !slices.ContainsFunc(all, func(o candidate) bool { return o.word == c.Cause }) {
			all = append(all, candidate{c.Cause, c.String()})
		}
	}
	return all
}

func (p Program) pools(ctx context.Context) (all []candidate) {
	for _, d := range p.report(ctx).Devices {
		if !slices.ContainsFunc(all, func(o candidate) bool { return o.word == d.Pool }) {
			all = append(all, candidate{d.Pool, d.Sharing})
		}
	}
	return all
}
