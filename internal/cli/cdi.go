package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// cdi is the verb of CDI specifications.
func (p Program) cdi(ctx context.Context, c *cli.Command) error {
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	switch c.Args().First() {
	case "list":
		return listCDI(p.Stdout, cdi.List(o.CDI), c.Bool("json"))
	case "remove":
		if _, unavailable := control.Report(ctx, socket(o)); unavailable == nil {
			return errors.New("cdi remove: the agent runs, and would write the specifications again: end it first")
		}
		removed, err := cdi.Remove(o.CDI)
		for _, path := range removed {
			fmt.Fprintln(p.Stdout, "removed", path)
		}
		if len(removed) == 0 && err == nil {
			fmt.Fprintln(p.Stdout, "nothing to remove")
		}
		return err
	}
	return command.Usagef("cdi: want list or remove")
}

// listCDI prints specifications, one a line.
func listCDI(w io.Writer, files []cdi.File, asJSON bool) error {
	if asJSON {
		return report.WriteJSON(w, append([]cdi.File{}, files...)) // [], not null
	}
	if len(files) == 0 {
		_, err := fmt.Fprintln(w, "no CDI specification")
		return err
	}
	t := report.NewTable(w)
	fmt.Fprintln(t, "FILE\tOF\tKIND\tDEVICES")
	for _, f := range files {
		of, kind, devices := "others", f.Kind, strings.Join(f.Devices, " ")
		if f.Own {
			of = "this agent"
		}
		if f.Problem != "" {
			kind, devices = "-", "not valid: "+f.Problem
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Path, of, kind, devices)
	}
	return t.Flush()
}
