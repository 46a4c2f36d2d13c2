package report

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/proof"
)

// Proof is what is known of the proofs of a GPU.
type Proof struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Index int          `json:"index"` // -1 = the GPU has none

	Result       string             `json:"result,omitempty"` // of the latest proof with one: "passed", "failed"; "" = there was none
	At           time.Time          `json:"at,omitzero"`      // its end
	Seconds      float64            `json:"seconds,omitempty"`
	Reason       string             `json:"reason,omitempty"` // why it was made: boot, reset, recovery, idle
	Summary      string             `json:"summary,omitempty"`
	Values       map[string]float64 `json:"values,omitempty"` // that its command measured
	NeedsService bool               `json:"needsService,omitempty"`

	CouldNotRun int `json:"couldNotRun,omitempty"` // proofs since that one whose check could not run

	Next
}

// WithProofs returns a report with what is known of proofs.
func (r Report) WithProofs(of proof.Result) Report {
	r.Proofs = []Proof{}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(r.Proofs, func(p Proof) bool { return p.GPU == d.GPU }) {
			r.Proofs = append(r.Proofs, proofOf(of, d.GPU, d.Index))
		}
	}
	return r
}

func proofOf(of proof.Result, id gpu.DeviceID, index int) Proof {
	p := Proof{GPU: id, Index: index}
	known, _ := of.State.Of(id)
	if v := known.Last; v != nil {
		p.Result = proof.Failed.String()
		if v.Passed {
			p.Result = proof.Passed.String()
		}
		p.At, p.Seconds, p.Reason, p.Summary, p.Values, p.NeedsService = v.At, v.Took.Seconds(), v.Reason.String(), v.Summary, v.Values, known.NeedsService
	}
	if t := known.Tries; t != nil {
		p.CouldNotRun = t.Count
	}
	switch n := known.Running; {
	case n != nil && n.Runs.IsZero():
		p.WaitsFor, p.Waits = string(proof.WaitTaking), "begins when no work has had it for 30 s ("+n.Reason.String()+")"
	case n != nil:
		p.Running, p.RunsSince = n.Reason.String(), n.Runs
	}
	for _, w := range of.Waits {
		if w.GPU == id {
			p.WaitsFor, p.Waits, p.WaitsUntil = string(w.Code), w.Text, w.Until
		}
	}
	return p
}

func (r Report) writeProofs(w io.Writer) error {
	if len(r.Proofs) == 0 {
		return nil
	}
	t := NewTable(w)
	fmt.Fprintln(t, "\nGPU\tPROOF\tAT\tSUMMARY\tNEXT")
	for _, p := range r.Proofs {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", tableName(p.Index, p.GPU), p.result(), tableTime(p.At), cut(p.Summary, mostText), p.next())
	}
	return t.Flush()
}

// result is the latest result in some words.
func (p Proof) result() string {
	switch {
	case p.Result == "":
		return "none"
	case p.NeedsService:
		return p.Result + ", needs service"
	}
	return p.Result + " (" + p.Reason + ")"
}
