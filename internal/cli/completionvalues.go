package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// askAtMost is how long a completion waits for the running agent.
const askAtMost = 500 * time.Millisecond

// values are those of a flag; none for a number, a path or a text: shells complete paths themselves.
func (l *commandLine) values(ctx context.Context, f cli.Flag, current string) []candidate {
	name := f.Names()[0]
	if !takesValue(f) {
		return words("true", "false")
	}
	if g, ok := f.(*cli.GenericFlag); ok { // of the agent
		if v, ok := g.Value.(*config.Flag); ok {
			return words(v.Choices()...)
		}
	}
	switch name {
	case "gpu":
		return l.devices(ctx, current)
	case "cause":
		return l.causes(ctx)
	case "pool":
		return l.pools(ctx)
	case "to":
		return words("device-plugin", "dra", "nomad")
	}
	return nil
}

// arguments are those of a command.
func (l *commandLine) arguments(ctx context.Context, current string) []candidate {
	name := l.command.Name
	if name == "explain" {
		return l.devices(ctx, current)
	}
	if name == "migrate" && len(l.args) > 0 {
		return l.devices(ctx, current)
	}
	if len(l.args) > 0 {
		return nil
	}
	switch name {
	case "migrate":
		return words("plan", "apply", "back")
	case "cdi":
		return words("list", "remove")
	case "simulate":
		return words("xid", "event")
	case "completion":
		return words(shells...)
	case "help":
		var all []candidate
		for _, c := range l.root.Commands {
			all = append(all, candidate{c.Name, c.Usage})
		}
		return all
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
func (l *commandLine) report(ctx context.Context) report.Report {
	ctx, cancel := context.WithTimeout(ctx, askAtMost)
	defer cancel()
	o, _ := l.Options() // as far as they are valid
	r, _ := control.Report(ctx, socket(o))
	return r
}

// devices are the indices of devices, or their UUIDs or PCI addresses if the word begins as one.
func (l *commandLine) devices(ctx context.Context, current string) (all []candidate) {
	for _, d := range l.report(ctx).Devices {
		usage := d.Model + " " + d.State.String()
		switch upper := strings.ToUpper(current); {
		case strings.HasPrefix(upper, "G"), strings.HasPrefix(upper, "M"):
			all = append(all, candidate{string(d.ID), usage})
		case strings.HasPrefix(current, "0000"):
			all = append(all, candidate{string(d.PCI), usage})
		default:
			all = append(all, candidate{d.CurrentIndex(), usage + " " + string(d.ID)})
		}
	}
	return all
}

// causes are those of the active conditions.
func (l *commandLine) causes(ctx context.Context) (all []candidate) {
	for _, c := range l.report(ctx).Conditions {
		if !slices.ContainsFunc(all, func(o candidate) bool { return o.word == c.Cause }) {
			all = append(all, candidate{c.Cause, c.String()})
		}
	}
	return all
}

func (l *commandLine) pools(ctx context.Context) (all []candidate) {
	for _, d := range l.report(ctx).Devices {
		if !slices.ContainsFunc(all, func(o candidate) bool { return o.word == d.Pool }) {
			all = append(all, candidate{d.Pool, d.Sharing})
		}
	}
	return all
}
