package report

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// Reset is what is known of the resets of a GPU that is faulty, or was.
type Reset struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Index int          `json:"index"` // -1 = the GPU has none

	Result  string    `json:"result,omitempty"` // of the latest one: done, in-use, refused, failed, interrupted; "" = there was none
	At      time.Time `json:"at,omitzero"`      // its end
	Seconds float64   `json:"seconds,omitempty"`
	Cause   string    `json:"cause,omitempty"` // of the fault for which it was made
	Text    string    `json:"text,omitempty"`  // of nvidia-smi, or why it did not begin

	Attempts    int  `json:"attempts,omitempty"`    // for the present fault
	Refusals    int  `json:"refusals,omitempty"`    // for it, because something had the GPU, or may have had it
	Due         bool `json:"due,omitempty"`         // it waits for nothing: with the mode report, it would be reset now
	NeedsPerson bool `json:"needsPerson,omitempty"` // what it waits for does not end without a person

	Next
}

// WithResets returns a report with what is known of resets.
func (r Report) WithResets(of reset.Result) Report {
	r.Resets = nil
	for _, d := range r.Devices {
		if slices.ContainsFunc(r.Resets, func(one Reset) bool { return one.GPU == d.GPU }) {
			continue
		}
		if one := resetOf(of, d.GPU); one != (Reset{GPU: d.GPU}) {
			one.Index = d.Index
			r.Resets = append(r.Resets, one)
		}
	}
	return r
}

func resetOf(of reset.Result, id gpu.DeviceID) Reset {
	known, _ := of.State.Of(id)
	r := Reset{GPU: id, Attempts: known.Attempts, Refusals: known.Refusals}
	if e := known.Last; e != nil {
		r.Result, r.At, r.Seconds, r.Cause, r.Text = e.Outcome.String(), e.At, e.Took.Seconds(), e.Cause, e.Text
	}
	if n := known.Running; n != nil {
		r.Running, r.RunsSince = n.Cause, n.Began
	}
	for _, w := range of.Waits {
		if w.GPU == id {
			r.WaitsFor, r.Waits, r.WaitsUntil, r.NeedsPerson = string(w.Code), w.Text, w.Until, w.Alert
		}
	}
	r.Due = r.Running == "" && slices.ContainsFunc(of.Begin, func(b reset.Begin) bool { return b.GPU == id })
	return r
}

func (r Report) writeResets(w io.Writer) error {
	if len(r.Resets) == 0 {
		return nil
	}
	t := NewTable(w)
	fmt.Fprintln(t, "\nGPU\tRESET\tAT\tATTEMPTS\tREFUSALS\tTEXT\tNEXT")
	for _, one := range r.Resets {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\t%s\n", tableName(one.Index, one.GPU), one.result(), tableTime(one.At), one.Attempts, one.Refusals,
			cut(one.Text, mostText), one.next())
	}
	return t.Flush()
}

// result is the latest result in some words.
func (r Reset) result() string {
	if r.Result == "" {
		return "none"
	}
	return r.Result + " (" + r.Cause + ")"
}

// next is when the next reset is made, and what it waits for.
func (r Reset) next() string {
	switch text := r.Next.next(); {
	case r.Due:
		return "would be reset now"
	case r.NeedsPerson:
		return text + " (a person is needed)"
	default:
		return text
	}
}
