package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

const leastSettle = time.Second

func (p Program) migrateVerb() verb {
	return verb{
		Name: "migrate", ArgsUsage: "plan|apply|back [GPU...]", MaxArgs: 1024, Do: p.migrate,
		Usage: "move GPUs between the kubelet's device plugins, DRA and Nomad: plan prints where they are and what a move waits for, apply sets a target, back restores the targets before",
		Flags: []cli.Flag{
			text("to", "API through which the GPUs are to be offered: "+apiNames()),
			&cli.BoolFlag{Name: "all", Usage: "all GPUs"},
			&cli.DurationFlag{Name: "wait", Usage: "wait that long for the GPUs to arrive, and print the steps; exit code 1 if they don't"},
			&cli.DurationFlag{Name: "settle", Value: ownership.DefaultSettle, Usage: "for how long a GPU must have had no holder before it changes its API"},
			&cli.BoolFlag{Name: "force", Usage: "count a record of holders that can't be read as empty, and do without an agent that does not run: two workloads may get one GPU unless the node is drained"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
		},
	}
}

// migration is one call of the verb.
type migration struct {
	p        Program
	c        *cli.Command
	stateDir string
	to       inventory.API
	file     ownership.File
	facts    []ownership.Facts
	away     []error // agents that did not answer
}

func (p Program) migrate(ctx context.Context, c *cli.Command) error {
	m := &migration{p: p, c: c, to: inventory.API(c.String("to"))}
	do := map[string]func(context.Context) error{"plan": m.plan, "apply": m.apply, "back": m.back}[c.Args().First()]
	switch {
	case do == nil:
		return command.Usagef("migrate: want plan, apply or back: see %s migrate --help", p.Name)
	case m.to != "" && !slices.Contains(ownership.APIs(), m.to):
		return command.Usagef("migrate: --to = %q: want %s", m.to, apiNames())
	case c.Duration("settle") < leastSettle:
		return command.Usagef("migrate: --settle = %q: want a duration of %s or more", c.Duration("settle"), leastSettle)
	}
	if err := m.usage(c.Args().First()); err != nil {
		return err
	}
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	if m.stateDir = o.Health.StateDir; m.stateDir == "" {
		return &setting.Error{Key: "state_dir", Remedy: "want the directory that the agents of this node share: targets are kept there"}
	}
	if err := m.read(ctx); err != nil {
		return err
	}
	return do(ctx)
}

// usage checks the arguments of a subcommand.
func (m *migration) usage(subcommand string) error {
	named, all := m.c.Args().Len() > 1, m.c.Bool("all")
	switch {
	case subcommand == "apply" && m.to == "":
		return command.Usagef("migrate apply: want --to %s", apiNames())
	case subcommand == "apply" && named == all:
		return command.Usagef("migrate apply: want GPUs or --all")
	case subcommand == "back" && (named || all || m.to != ""):
		return command.Usagef("migrate back: want no GPU and no target: it restores the targets before the latest apply or back")
	}
	return nil
}

// read reads the file and asks the agents.
func (m *migration) read(ctx context.Context) (err error) {
	m.file, err = ownership.Read(m.stateDir)
	if err != nil {
		return fmt.Errorf("%w: correct it, or delete it after the work on the GPUs has ended", err)
	}
	m.facts, m.away = nil, nil
	for _, agent := range ownership.Agents() {
		facts, err := control.Ownership(ctx, control.Path(m.stateDir, agent))
		if err != nil {
			m.away = append(m.away, fmt.Errorf("%s: %w", agent, err))
			continue
		}
		m.facts = append(m.facts, facts)
	}
	if len(m.facts) == 0 {
		return fmt.Errorf("%w: start an agent that uses the state directory %s", errors.Join(m.away...), m.stateDir)
	}
	return nil
}

// rows are those of the GPUs that the command line names; all without a name. All that are not found are one error.
func (m *migration) rows() ([]ownership.Row, error) {
	all := ownership.Rows(m.file, m.facts)
	args := m.c.Args().Tail()
	if len(args) == 0 {
		return all, nil
	}
	var errs []error
	var rows []ownership.Row
	for _, arg := range args {
		matches, ok := explain.DeviceMatcher(arg)
		var found []ownership.Row
		for _, r := range all {
			if ok && matches(gpu.Device{ID: r.GPU, PCI: gpu.PCIAddress(r.PCI), Index: r.Index}) {
				found = append(found, r)
			}
		}
		switch len(found) {
		case 0:
			errs = append(errs, &setting.Error{Key: "gpu", Value: arg, Remedy: "no such GPU: want a UUID or the beginning of one, a PCI address or an index, as migrate plan shows them"})
		case 1:
			if !slices.ContainsFunc(rows, func(r ownership.Row) bool { return r.GPU == found[0].GPU }) {
				rows = append(rows, found[0])
			}
		default:
			errs = append(errs, &setting.Error{Key: "gpu", Value: arg, Remedy: fmt.Sprintf("it is the beginning of %s and %s: write more of the UUID", found[0].GPU, found[1].GPU)})
		}
	}
	return rows, errors.Join(errs...)
}

// planned is the output of plan --json.
type planned struct {
	GPUs     []ownership.Row `json:"gpus"`
	Warnings []string        `json:"warnings,omitempty"` // about --to
}

func (m *migration) plan(context.Context) error {
	rows, err := m.rows()
	if err != nil {
		return err
	}
	for i := range rows {
		if m.to != "" {
			rows[i].Target = m.to
		}
	}
	if m.c.Bool("json") {
		return report.WriteJSON(m.p.Stdout, planned{rows, ownership.Warnings(rows, m.to, m.facts)})
	}
	if err := m.print(rows); err != nil || m.to == "" {
		return err
	}
	problems := ownership.Check(rows, m.to, m.facts, m.c.Bool("force"))
	if problems != nil {
		command.WriteError(m.p.Stdout, "problem", problems)
	}
	m.warn(rows, m.to)
	if problems == nil {
		fmt.Fprintln(m.p.Stdout, "running work keeps its GPU until it ends; until then and for the settle time after it the GPU takes no new work. To do it: migrate apply")
	}
	return nil
}

// warn prints what does not prevent the target, and should be known before.
func (m *migration) warn(rows []ownership.Row, to inventory.API) {
	for _, line := range ownership.Warnings(rows, to, m.facts) {
		fmt.Fprintf(m.p.Stdout, "warning: %s\n", line)
	}
}

func (m *migration) print(rows []ownership.Row) error {
	w := report.NewTable(m.p.Stdout)
	fmt.Fprintln(w, "INDEX\tGPU\tNOW\tTARGET\tHELD BY\tWAITS FOR")
	for _, r := range rows {
		now := cmp.Or(r.API, "-")
		if r.Pending {
			now += " (no new work)"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", r.Index, r.GPU, now, cmp.Or(string(r.Target), "-"), cmp.Or(strings.Join(r.Holders, ", "), "-"), cmp.Or(r.Waits, "-"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, err := range m.away {
		fmt.Fprintf(m.p.Stdout, "not known: %v\n", err)
	}
	return nil
}

// apiNames are the names of all APIs: "device-plugin, dra or nomad".
func apiNames() string { return document.Choice(apiWords()) }

func apiWords() (names []string) {
	for _, api := range ownership.APIs() {
		names = append(names, string(api))
	}
	return names
}
