package report

import (
	"io"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// Plan is what would be decided now in another mode. Its JSON is an interface for scripts: keys are added, never changed.
type Plan struct {
	At   time.Time   `json:"at"`
	Mode rescue.Mode `json:"mode"` // of the clusters that are not off

	Problem  string    `json:"problem,omitempty"` // why nothing is decided
	Stop     *Stop     `json:"stop,omitempty"`    // all acts would be stopped
	Acts     []Act     `json:"acts"`
	Waits    []Wait    `json:"waits"`
	Refusals []Refusal `json:"refusals"`
	Marks    []Mark    `json:"marks"`
	Free     []Subject `json:"free"`
}

// PlanOf describes the result of fleet.Plan for a view and a mode.
func PlanOf(v fleet.View, mode rescue.Mode, r rescue.Result) Plan {
	d := Document{}
	d.decided(r)
	p := Plan{At: v.At, Mode: mode, Problem: r.Problem, Acts: d.Acts, Waits: d.Waits, Refusals: d.Refusals, Marks: d.Marks, Free: d.Free}
	if s := r.State.Ledger.Stop; s != nil {
		p.Stop = &Stop{At: s.At, By: s.By, Text: s.Text}
	}
	return p
}

// WriteText writes the plan for a terminal.
func (p Plan) WriteText(w io.Writer) { p.text(w, width(w)) }

func (p Plan) text(w io.Writer, columns int) {
	t := newTables(w, columns, p.At)
	t.line("In mode %s, at %s:", p.Mode, stamp(p.At))
	if p.Problem != "" {
		t.line("%s", p.Problem)
	}
	if p.Stop != nil {
		t.line("All acts are stopped by %s: %s", p.Stop.By, p.Stop.Text)
	}
	if len(p.Acts) == 0 {
		t.line("No work would be moved now.")
	}
	t.acts("WOULD MOVE NOW", p.Acts)
	t.marks("WOULD MARK NOW", p.Marks)
	t.waits(p.Waits)
	t.refusals(p.Refusals)
	t.free(p.Free)
}
