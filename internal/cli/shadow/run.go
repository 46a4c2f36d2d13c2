package shadow

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// Options are what to compare, for how long, and how to print it.
type Options struct {
	Agent   agent.Options                                           // of the agent that would run; Log is required
	Compare func(ctx context.Context, s core.State) (Report, error) // reads the other side; it may fail for a while
	For     time.Duration                                           // 0 = compare once
	JSON    bool
	Out     io.Writer
}

const (
	interval   = 2 * time.Second // between comparisons: the other side reports no changes
	readAtMost = 5 * time.Second // for the other side to answer
)

// Run compares once, or for a time, and prints the first report and then what changes. differs reports whether there was a difference
// at any time. The error is that of the other side if it never answered.
func Run(ctx context.Context, o Options) (differs bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	states := make(chan core.State, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- agent.Shadow(ctx, o.Agent, func(s core.State) {
			select {
			case <-states: // an older one that was not read
			default:
			}
			states <- s
		})
	}()
	f := follower{Options: o}
	err = f.follow(ctx, states, ended)
	cancel()
	select {
	case failure := <-ended:
		err = cmp.Or(err, failure)
	case <-time.After(readAtMost): // a driver call hangs
	}
	if f.printed {
		err = nil
	}
	return f.differs, err
}

// follower prints reports.
type follower struct {
	Options
	latest  Report
	printed bool // a report
	differs bool
	failure string // of the other side, as printed last
}

func (f *follower) follow(ctx context.Context, states <-chan core.State, ended chan error) error {
	var state core.State
	select {
	case state = <-states:
	case err := <-ended:
		ended <- err
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
	var end <-chan time.Time
	if f.For > 0 {
		end = time.After(f.For)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := f.compare(ctx, state)
		if f.For == 0 {
			return err
		}
		select {
		case state = <-states:
		case <-tick.C:
		case <-end:
			return err
		case failure := <-ended:
			ended <- failure
			return failure
		case <-ctx.Done():
			return err
		}
	}
}

// compare makes and prints one report.
func (f *follower) compare(ctx context.Context, s core.State) error {
	ctx, cancel := context.WithTimeout(ctx, readAtMost)
	defer cancel()
	r, err := f.Compare(ctx, s)
	if err != nil {
		if text := err.Error(); f.For > 0 && text != f.failure && ctx.Err() == nil {
			f.failure = text
			f.print("the other side can't be read: "+text, map[string]string{"error": text})
		}
		return err
	}
	f.failure = ""
	f.differs = f.differs || !r.Same
	switch {
	case !f.printed:
		f.printReport(r)
	case !slices.Equal(r.Differences, f.latest.Differences):
		f.printChanges(r)
	}
	f.latest, f.printed = r, true
	return nil
}

// printReport prints a whole report.
func (f *follower) printReport(r Report) {
	if f.JSON {
		e := json.NewEncoder(f.Out)
		if f.For == 0 {
			e.SetIndent("", "  ")
		}
		_ = e.Encode(r)
		return
	}
	fmt.Fprint(f.Out, r)
}

// String is the report as text.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "compared with %s: here %s, there %s\n", r.Other, devices(r.Here), devices(r.There))
	for _, d := range r.Differences {
		fmt.Fprintln(&b, d)
	}
	for _, n := range r.NotCompared {
		fmt.Fprintf(&b, "%-9s %s\n", "-", "not compared: "+n)
	}
	if n := len(r.Differences); n > 0 {
		fmt.Fprintln(&b, report.Noun(n, "difference"))
	} else {
		b.WriteString("no difference\n")
	}
	return b.String()
}

// change is a line of JSON about differences that began or ended.
type change struct {
	Time  time.Time    `json:"time"`
	Begun []Difference `json:"begun"`
	Ended []Difference `json:"ended"`
}

func (f *follower) printChanges(r Report) {
	c := change{Time: r.Time, Begun: without(r.Differences, f.latest.Differences), Ended: without(f.latest.Differences, r.Differences)}
	if f.JSON {
		_ = json.NewEncoder(f.Out).Encode(c)
		return
	}
	for _, d := range c.Ended {
		fmt.Fprintf(f.Out, "%s ended %s\n", c.Time.Format(time.RFC3339), d)
	}
	for _, d := range c.Begun {
		fmt.Fprintf(f.Out, "%s begun %s\n", c.Time.Format(time.RFC3339), d)
	}
}

// without returns the differences that are not among others.
func without(all, others []Difference) []Difference {
	rest := []Difference{}
	for _, d := range all {
		if !slices.Contains(others, d) {
			rest = append(rest, d)
		}
	}
	return rest
}

// print prints a line of text, or of JSON.
func (f *follower) print(text string, value any) {
	if f.JSON {
		_ = json.NewEncoder(f.Out).Encode(value)
		return
	}
	fmt.Fprintf(f.Out, "%s %s\n", time.Now().UTC().Format(time.RFC3339), text)
}
