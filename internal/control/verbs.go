package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/tandem-gpu/tandem/internal/report"
)

// Inspect writes what the running agent at path offers. If none answers it writes what read finds, and says so
// first: in a line, or as "source" in JSON.
func Inspect(ctx context.Context, path string, read func(context.Context) report.Report, out io.Writer, asJSON bool) error {
	r, err := Dial(path).Report(ctx)
	if err != nil {
		r = read(ctx)
		r.Source = report.FromReading
		why := ErrNotRunning.Error()
		if !errors.Is(err, ErrNotRunning) {
			why = "the agent does not answer (" + err.Error() + ")"
		}
		if why += ": this is what one would offer"; asJSON {
			r.Warnings = append(r.Warnings, why)
		} else {
			fmt.Fprintln(out, why)
		}
	}
	if asJSON {
		return r.WriteJSON(out)
	}
	return r.WriteTable(out)
}

// Clear has the agent at path drop conditions that an operator has verified to be over, and writes which.
func Clear(ctx context.Context, path string, args ClearArgs, out io.Writer) error {
	a, err := Dial(path).Clear(ctx, args)
	if err != nil {
		return err
	}
	return a.write(out, func(c report.Condition) string {
		if c.Disregarded {
			return "cleared, and ignored until it is gone"
		}
		return "cleared"
	})
}

// Ignore has the agent at path disregard conditions for a while, and writes which.
func Ignore(ctx context.Context, path string, args IgnoreArgs, out io.Writer) error {
	a, err := Dial(path).Ignore(ctx, args)
	if err != nil {
		return err
	}
	return a.write(out, func(c report.Condition) string {
		return "ignored until " + c.IgnoredUntil.UTC().Format("2006-01-02T15:04:05Z") + " or until it happens again"
	})
}

// Simulate has the agent at path rehearse a fault, and writes what follows from it. The agent must allow it.
func Simulate(ctx context.Context, path string, args SimulateArgs, out io.Writer) error {
	a, err := Dial(path).Simulate(ctx, args)
	if err != nil {
		return err
	}
	if len(a.Conditions) == 0 {
		fmt.Fprintln(out, "simulated: nothing follows from this fault alone")
	}
	return a.write(out, func(c report.Condition) string {
		if c.Noted {
			return "noted, no effect yet"
		}
		return c.State.String() + "; clears: " + c.Clears + ", or an order to clear it"
	})
}

// Quiesce has the agent at path give the driver back, and writes what it says then.
func Quiesce(ctx context.Context, path string, args QuiesceArgs, out io.Writer) error {
	s, err := Dial(path).Quiesce(ctx, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s; running work keeps its devices and is not stopped\n", s)
	if !s.Kept {
		fmt.Fprintf(out, "the maintenance is in force, but a restart of the agent ends it: %s\n", s.NotKept)
	}
	_, err = fmt.Fprintln(out, "when the work is done: resume")
	return err
}

// Resume has the agent at path take the driver back, and writes what it found.
func Resume(ctx context.Context, path string, out io.Writer) error {
	s, err := Dial(path).Resume(ctx)
	if err != nil {
		return err
	}
	if _, err = fmt.Fprintln(out, s); err == nil && !s.Kept {
		_, err = fmt.Fprintf(out, "the maintenance is over, but after a restart of the agent it may be in force again: %s\n", s.NotKept)
	}
	return err
}

// Debug writes the inside of the agent at path.
func Debug(ctx context.Context, path string, out io.Writer, asJSON bool) error {
	d, err := Dial(path).Debug(ctx)
	if err != nil {
		return err
	}
	if !asJSON {
		return d.Write(out)
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(d)
}

// write writes a line per condition.
func (a Response) write(out io.Writer, say func(report.Condition) string) error {
	for _, c := range a.Conditions {
		fmt.Fprintf(out, "%s: %s\n", c, say(c))
	}
	for _, c := range a.Driver {
		if _, err := fmt.Fprintf(out, "still standing: %s\n", c); err != nil {
			return err
		}
	}
	if a.NotKept != "" {
		if _, err := fmt.Fprintf(out, "in force, but a restart of the agent undoes it: %s\n", a.NotKept); err != nil {
			return err
		}
	}
	return nil
}
