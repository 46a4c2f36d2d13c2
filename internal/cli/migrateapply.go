package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	waitInterval = 500 * time.Millisecond // between two looks of apply --wait

	readAtMost   = 10 * time.Second       // for the agents to read new targets: an event wakes them, and without inotify they look each second
	readInterval = 100 * time.Millisecond // between two looks whether they have
)

func (m *migration) apply(ctx context.Context) error {
	rows, err := m.rows()
	switch {
	case err != nil:
		return err
	case len(rows) == 0:
		return errors.New("the running agents have no GPU: nothing to move")
	}
	if err := ownership.Check(rows, m.to, m.facts, m.c.Bool("force")); err != nil {
		return err
	}
	m.warn(rows, m.to)
	var changes []ownership.TargetChange
	for _, r := range rows {
		api, _, _ := strings.Cut(r.API, ",")
		changes = append(changes, ownership.TargetChange{
			GPU: r.GPU, Target: m.to, From: cmp.Or(r.Target, inventory.API(api)), Settle: m.c.Duration("settle"), Force: m.c.Bool("force"),
		})
	}
	return m.set(ctx, changes)
}

func (m *migration) back(ctx context.Context) error {
	changes := m.file.Back()
	if len(changes) == 0 {
		return errors.New("no targets were set before: nothing to restore")
	}
	for i := range changes {
		changes[i].Force = m.c.Bool("force")
		if m.c.IsSet("settle") {
			changes[i].Settle = m.c.Duration("settle")
		}
	}
	m.warnBack(changes)
	return m.set(ctx, changes)
}

// warnBack prints what keeps GPUs from targets that are restored. They are restored all the same: they were in force before.
func (m *migration) warnBack(changes []ownership.TargetChange) {
	all := ownership.Rows(m.file, m.facts)
	for _, to := range ownership.APIs() {
		var rows []ownership.Row
		for _, r := range all {
			if slices.ContainsFunc(changes, func(c ownership.TargetChange) bool { return c.GPU == r.GPU && c.Target == to }) {
				rows = append(rows, r)
			}
		}
		if len(rows) == 0 {
			continue
		}
		if problems := ownership.Check(rows, to, m.facts, m.c.Bool("force")); problems != nil {
			command.WriteError(m.p.Stdout, "warning", problems)
		}
		m.warn(rows, to)
	}
}

// set writes the targets, and waits until the agents have read them, and, if that is asked for, until the GPUs have moved.
func (m *migration) set(ctx context.Context, changes []ownership.TargetChange) error {
	err := ownership.Change(ctx, m.stateDir, func(f ownership.File) (ownership.File, error) { return f.WithTargets(changes, time.Now()), nil })
	if err != nil {
		return err
	}
	if err := m.awaitRead(ctx, changes); err != nil {
		return err
	}
	for _, c := range changes {
		fmt.Fprintf(m.p.Stdout, "%s: target %s\n", c.GPU, c.Target)
	}
	if m.c.Bool("force") {
		fmt.Fprintln(m.p.Stdout, "forced: holders that can't be read count as none; make sure that no work has these GPUs")
	}
	if m.c.Duration("wait") <= 0 {
		return nil
	}
	return m.await(ctx, changes)
}

// awaitRead waits until the agents that run have read the targets. From then on they remember them: a target that the command has printed
// is not lost with the file.
func (m *migration) awaitRead(ctx context.Context, changes []ownership.TargetChange) error {
	limit, cancel := context.WithTimeout(ctx, readAtMost)
	defer cancel()
	for {
		err := m.read(ctx)
		if err == nil {
			err = m.unread(changes)
		}
		if err == nil {
			return nil
		}
		if !watch.Sleep(limit, readInterval) {
			return fmt.Errorf("the targets were written, but not read by all agents within %s: %w", readAtMost, err)
		}
	}
}

// unread returns the targets that are not in the file, or that an agent has not read, as an error.
func (m *migration) unread(changes []ownership.TargetChange) error {
	var errs []error
	for _, c := range changes {
		if is := m.file.GPUs[c.GPU].Target; is != c.Target {
			errs = append(errs, fmt.Errorf("%s: target %s in %s, want %s", c.GPU, cmp.Or(string(is), "none"), ownership.FileName, c.Target))
			continue
		}
		for _, facts := range m.facts {
			if !slices.ContainsFunc(facts.GPUs, func(g ownership.GPUFacts) bool { return g.GPU == c.GPU && g.Target == c.Target }) {
				errs = append(errs, fmt.Errorf("%s: %s has not read target %s", c.GPU, facts.Agent, c.Target))
			}
		}
	}
	return errors.Join(errs...)
}

// await prints what each GPU waits for when that changes, until all have arrived.
func (m *migration) await(ctx context.Context, changes []ownership.TargetChange) error {
	limit, cancel := context.WithTimeout(ctx, m.c.Duration("wait"))
	defer cancel()
	printed := map[gpu.DeviceID]string{}
	for {
		var missing []string
		if err := m.read(ctx); err != nil {
			missing = append(missing, err.Error())
		}
		for _, r := range ownership.Rows(m.file, m.facts) {
			if !slices.ContainsFunc(changes, func(c ownership.TargetChange) bool { return c.GPU == r.GPU }) {
				continue
			}
			line := "takes work through " + string(r.Target)
			if !r.Done() {
				line = fmt.Sprintf("now %s, waits for %s", cmp.Or(r.API, "no API"), cmp.Or(r.Waits, "the settle time to pass"))
				missing = append(missing, fmt.Sprintf("%s: %s", r.GPU, line))
			}
			if printed[r.GPU] != line {
				printed[r.GPU] = line
				fmt.Fprintf(m.p.Stdout, "%s: %s\n", r.GPU, line)
			}
		}
		if len(missing) == 0 && len(printed) == len(changes) {
			return nil
		}
		if !watch.Sleep(limit, waitInterval) {
			return fmt.Errorf("not completed within %s, and goes on:\n%s", m.c.Duration("wait"), strings.Join(missing, "\n"))
		}
	}
}
