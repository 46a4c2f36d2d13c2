package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/internal/fleet/report"
)

// clientVerbs are the commands that ask the process that runs.
func (p *program) clientVerbs(asJSON cli.Flag) []command.Verb {
	address := setting("address", "ADDRESS", "", "of the gpu-fleet that runs, any of the team; that of listen in the configuration, or "+config.DefaultListen+", if not given", &p.address)
	token := setting("token-file", "PATH", "", "file with the token; that of token_file in the configuration if not given", &p.tokenFile)
	by := &cli.StringFlag{Name: "by", DefaultText: "TEXT", Destination: &p.by, Usage: "who gives the command, for the others; user and host name if not given"}
	ledger := &cli.BoolFlag{Name: "ledger", Destination: &p.onLedger, Usage: "change the ledger itself, with the rights of the configuration: no gpu-fleet has to answer, and no token is needed"}
	mode := &cli.StringFlag{Name: "mode", Value: "act", DefaultText: "MODE", Destination: &p.planMode, Usage: document.Choice(planModes) + ": of all clusters that are not off"}
	return []command.Verb{
		{Name: "status", Usage: "print the clusters, faults, moves, what waits for what, and the budget", Flags: []cli.Flag{asJSON, address}, Do: p.status},
		{Name: "plan", Usage: "print what would be done now in another mode, and do nothing", Flags: []cli.Flag{mode, asJSON, address}, Do: p.plan},
		{Name: "stop", Usage: "stop all acts in all clusters, until resume: TEXT tells the others why", ArgsUsage: "TEXT", MaxArgs: 100,
			Flags: []cli.Flag{by, ledger, token, asJSON, address}, Do: p.stop},
		{Name: "resume", Usage: "allow acts again, after stop or after too many nodes with one fault", Flags: []cli.Flag{by, ledger, token, asJSON, address}, Do: p.resume},
	}
}

func (p *program) status(ctx context.Context, c *cli.Command) error {
	return show[report.Document](ctx, p, "/fleet.json", c.Bool("json"))
}

func (p *program) plan(ctx context.Context, c *cli.Command) error {
	if !slices.Contains(planModes, p.planMode) {
		return command.Usagef("plan: --mode = %q: want %s", p.planMode, document.Choice(planModes))
	}
	return show[report.Plan](ctx, p, "/plan.json?mode="+p.planMode, c.Bool("json"))
}

// show prints what the process that runs answers: as it is, also what a newer version adds, or as text.
func show[T interface{ WriteText(w io.Writer) }](ctx context.Context, p *program, path string, asJSON bool) error {
	client, err := p.newClient()
	if err != nil {
		return err
	}
	if asJSON {
		var raw json.RawMessage
		if err := client.get(ctx, path, &raw); err != nil {
			return err
		}
		return p.writeJSON(raw)
	}
	var answer T
	if err := client.get(ctx, path, &answer); err != nil {
		return err
	}
	answer.WriteText(p.stdout)
	return nil
}

// change is the output of stop and resume as JSON.
type change struct {
	Before *report.Stop `json:"before"` // what had stopped acts; null = nothing, as far as the process that was asked has read the ledger
	After  *report.Stop `json:"after"`
}

func (p *program) stop(ctx context.Context, c *cli.Command) error {
	text := strings.TrimSpace(strings.Join(c.Args().Slice(), " "))
	if text == "" {
		return command.Usagef("stop: want a text that tells the others why: gpu-fleet stop \"driver rollout\"")
	}
	by := cmp.Or(p.by, p.user())
	before, err := p.change(ctx, order{path: "/stop", By: by, Text: text, do: func(ctx context.Context, c *fleet.Controller) error { return c.Stop(ctx, by, text) }})
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return p.writeJSON(change{before, &report.Stop{At: time.Now().UTC().Truncate(time.Second), By: by, Text: text}})
	}
	if before != nil {
		fmt.Fprintf(p.stdout, "acts were stopped already, since %s by %s: %s\n", before.At.UTC().Format(time.RFC3339), before.By, before.Text)
	}
	_, err = fmt.Fprintf(p.stdout, "all acts are stopped, by %s: %s\nto allow them again: gpu-fleet resume\n", by, text)
	return err
}

func (p *program) resume(ctx context.Context, c *cli.Command) error {
	by := cmp.Or(p.by, p.user())
	before, err := p.change(ctx, order{path: "/resume", By: by, do: func(ctx context.Context, c *fleet.Controller) error { return c.Resume(ctx, by) }})
	switch {
	case err != nil:
		return err
	case c.Bool("json"):
		return p.writeJSON(change{Before: before})
	case before == nil:
		_, err = fmt.Fprintln(p.stdout, "acts are allowed") // the process that was asked may not have read the latest stop
	default:
		_, err = fmt.Fprintf(p.stdout, "acts are allowed again; they were stopped since %s by %s: %s\n", before.At.UTC().Format(time.RFC3339), before.By, before.Text)
	}
	return err
}

// order is what stop and resume do: by a request, or on the ledger.
type order struct {
	path string
	By   string `json:"by"`
	Text string `json:"text,omitempty"`
	do   func(context.Context, *fleet.Controller) error
}

// change carries out an order, and returns what had stopped acts before it. It does so also if that is not known.
func (p *program) change(ctx context.Context, o order) (before *report.Stop, err error) {
	if p.onLedger {
		return p.changeLedger(ctx, o)
	}
	client, err := p.newClient()
	if err != nil {
		return nil, err
	}
	var d report.Document
	_ = client.get(ctx, "/fleet.json", &d) // the request itself has the error
	return d.Stop, client.post(ctx, o.path, o)
}

// changeLedger is change without a process that runs.
func (p *program) changeLedger(ctx context.Context, o order) (before *report.Stop, err error) {
	s, err := p.settings()
	if err != nil {
		return nil, err
	}
	t, err := s.connect()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, storeWithin)
	defer cancel()
	was, _, err := t.store.Read(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.store, err)
	}
	if stop := was.Stop; stop != nil {
		before = &report.Stop{At: stop.At, By: stop.By, Text: stop.Text}
	}
	return before, o.do(ctx, fleet.New(fleet.Options{Identity: s.identity, Policy: s.Policy, Store: t.store, Log: slog.New(slog.DiscardHandler)}))
}

// user is who gives a command: by the environment, which is no proof.
func (p *program) user() string {
	who := cmp.Or(p.getenv("SUDO_USER"), p.getenv("USER"), p.getenv("LOGNAME"), fmt.Sprintf("uid %d", os.Getuid()))
	if host, err := os.Hostname(); err == nil {
		who += "@" + host
	}
	return who
}
