package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/terminal"
)

// Control sequences of xterm that all terminals of today have: the alternate screen, the cursor, and what is erased.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[2J"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	eraseLine   = "\x1b[K" // from the cursor to the end
	eraseRest   = "\x1b[J" // from the cursor to the end of the screen
)

const (
	defaultInterval = 3 * time.Second // the agent reads the use of devices as often
	leastInterval   = 100 * time.Millisecond
)

func (p Program) topVerb() verb {
	return verb{Name: "top", Usage: "show what the devices do and which work has them, until Ctrl-C; once if the output is no terminal, or no agent runs",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "once", Usage: "print one table"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON, once: that of inspect, with the use of each device"},
			&cli.DurationFlag{Name: "interval", Value: defaultInterval, Usage: "time between two tables"},
		}, Do: p.top}
}

func (p Program) top(ctx context.Context, c *cli.Command) error {
	interval := c.Duration("interval")
	if interval < leastInterval {
		return command.Usagef("top: --interval = %q: want a duration of %s or more, such as 2s", interval, leastInterval)
	}
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	r, unavailable := control.Report(ctx, socket(o))
	screen, isFile := p.Stdout.(*os.File)
	switch {
	case unavailable != nil:
		return p.topWithoutAgent(ctx, o, unavailable, c.Bool("json"))
	case c.Bool("json"):
		return report.WriteJSON(p.Stdout, r)
	case c.Bool("once") || !isFile || !terminal.Is(screen):
		return p.printTop(r)
	}
	return liveTop{p.Name, socket(o), interval, screen}.run(ctx)
}

// topWithoutAgent prints one table of what the driver itself reports: to open it again and again would cost more than it shows.
func (p Program) topWithoutAgent(ctx context.Context, o agent.Options, unavailable error, asJSON bool) error {
	r := agent.ReadUseOnce(ctx, o)
	r.Source = report.FromDriver
	if r.Driver.State != gpu.DriverReady.String() {
		return fmt.Errorf("%w; driver %s: %s", unavailable, r.Driver.State, r.Driver.Reason)
	}
	if !errors.Is(unavailable, control.ErrNotRunning) {
		command.WriteError(p.Stderr, p.Name, unavailable)
	}
	if asJSON {
		return report.WriteJSON(p.Stdout, r)
	}
	return p.printTop(r)
}

func (p Program) printTop(r report.Report) error {
	if err := r.WriteTop(p.Stdout, p.Name, time.Now(), report.Screen{}); err != nil {
		return err
	}
	_, err := fmt.Fprintln(p.Stdout)
	return err
}

// liveTop shows the table of a running agent on a terminal.
type liveTop struct {
	name, socket string
	interval     time.Duration
	screen       *os.File
}

// run shows a table at each interval, and when the size of the terminal changes, until a signal ends it. It then leaves the terminal as
// it was.
func (t liveTop) run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	tick := time.NewTicker(t.interval)
	defer tick.Stop()
	if _, err := io.WriteString(t.screen, enterScreen); err != nil {
		return err
	}
	defer func() { _, _ = io.WriteString(t.screen, leaveScreen) }()
	for {
		if err := t.show(ctx); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-resized:
		case <-ctx.Done():
			return nil
		}
	}
}

// show writes one table in one write. If the agent does not answer, the reason is in its place until it does.
func (t liveTop) show(ctx context.Context) error {
	r, err := control.Report(ctx, t.socket)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end is no failure
	}
	columns, rows, known := terminal.Size(t.screen)
	if !known {
		columns, rows = 80, 24
	}
	var table bytes.Buffer
	if err != nil {
		fmt.Fprintf(&table, "%s  %s  %s", t.name, time.Now().Format(time.TimeOnly), err)
	} else {
		_ = r.WriteTop(&table, t.name, time.Now(), report.Screen{Columns: columns, Rows: rows}) // a buffer: it does not fail
	}
	_, err = io.WriteString(t.screen, home+strings.ReplaceAll(table.String(), "\n", eraseLine+"\r\n")+eraseLine+eraseRest)
	return err
}
