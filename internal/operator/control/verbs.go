package control

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Inspect writes the report of the running agent at path. If no agent answers it writes the report that read returns and
// the reason: on the first line, or among the "warnings" in JSON.
func Inspect(ctx context.Context, path string, read func(context.Context) report.Report, out io.Writer, asJSON bool) error {
	r, err := Report(ctx, path)
	if err != nil {
		r = read(ctx)
		r.Source = report.FromDriver
		reason := fromDriver(path, err)
		if asJSON {
			r = r.WithProblems(problem.Problem{Code: problem.NoAgent, Text: reason})
		} else {
			fmt.Fprintln(out, reason)
		}
	}
	if asJSON {
		return report.WriteJSON(out, r)
	}
	return r.WriteTable(out)
}

// fromDriver is the note on what a command reads itself, because no agent answers.
func fromDriver(path string, err error) string {
	reason := ErrNotRunning.Error()
	switch {
	case path == "":
		reason = "no agent was asked, as the state directory is empty"
	case !errors.Is(err, ErrNotRunning):
		reason = "the agent does not answer (" + err.Error() + ")"
	}
	return reason + ": this is what an agent that starts now would offer"
}

// Clear has the agent at path clear conditions that an operator has verified to be over, and writes them.
func Clear(ctx context.Context, path string, args ClearArgs, out io.Writer) error {
	r, err := call[response](ctx, path, clearURL, args)
	if err != nil {
		return err
	}
	return r.write(out, func(c report.Condition) string {
		if c.IgnoredUntilGone {
			return "cleared, and ignored until it is gone"
		}
		return "cleared"
	})
}

// Ignore has the agent at path ignore conditions until a time, and writes them.
func Ignore(ctx context.Context, path string, args IgnoreArgs, out io.Writer) error {
	r, err := call[response](ctx, path, ignoreURL, args)
	if err != nil {
		return err
	}
	return r.write(out, func(c report.Condition) string {
		return "ignored until " + c.IgnoredUntil.UTC().Format("2006-01-02T15:04:05Z") + " or until it happens again"
	})
}

// Simulate has the agent at path simulate a fault, and writes the conditions that it causes. The agent must allow it.
func Simulate(ctx context.Context, path string, args SimulateArgs, out io.Writer) error {
	r, err := call[response](ctx, path, simulateURL, args)
	if err != nil {
		return err
	}
	if len(r.Conditions) == 0 {
		fmt.Fprintln(out, "simulated: this fault alone causes no condition")
	}
	return r.write(out, func(c report.Condition) string {
		if c.RecordedOnly {
			return "recorded, no effect yet"
		}
		return c.State.String() + "; cleared by: " + c.Clears + "; the command clear clears it at once"
	})
}

// Quiesce has the agent at path release the driver, and writes the state after it.
func Quiesce(ctx context.Context, path string, args QuiesceArgs, out io.Writer) error {
	s, err := call[driverStatus](ctx, path, quiesceURL, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s; running workloads keep their devices and are not stopped\n", s)
	if !s.Persisted {
		fmt.Fprintf(out, "maintenance is active, but a restart of the agent ends it: %s\n", s.PersistenceError)
	}
	_, err = fmt.Fprintln(out, "to end the maintenance: resume")
	return err
}

// Resume has the agent at path open the driver again, and writes the state after it.
func Resume(ctx context.Context, path string, out io.Writer) error {
	s, err := call[driverStatus](ctx, path, resumeURL, struct{}{})
	if err != nil {
		return err
	}
	if _, err = fmt.Fprintln(out, s); err == nil && !s.Persisted {
		_, err = fmt.Fprintf(out, "maintenance has ended, but a restart of the agent may begin it again: %s\n", s.PersistenceError)
	}
	return err
}

// Debug writes the internal state of the agent at path.
func Debug(ctx context.Context, path string, out io.Writer, asJSON bool) error {
	d, err := call[report.Debug](ctx, path, debugURL, nil)
	if err != nil {
		return err
	}
	if asJSON {
		return report.WriteJSON(out, d)
	}
	return d.Write(out)
}

// write writes a line for each condition; suffix is its end.
func (r response) write(out io.Writer, suffix func(report.Condition) string) error {
	for _, c := range r.Conditions {
		fmt.Fprintf(out, "%s: %s\n", c, suffix(c))
	}
	for _, c := range r.OtherConditions {
		if _, err := fmt.Fprintf(out, "still active: %s\n", c); err != nil {
			return err
		}
	}
	return r.writeReverted(out)
}
