package storm

import (
	"cmp"
	"slices"
	"time"
)

// deed is a beginning or an end of a fault.
type deed struct {
	at   time.Duration
	of   *fault
	lift bool
}

// round does what is planned, each thing at its time, or as soon after it as can be. In the end all is lifted.
func (w *storm) round(faults []*fault, number int) {
	var deeds []deed
	for i, f := range faults {
		f.number = number*perRound + i
		deeds = append(deeds, deed{f.at, f, false})
		if f.kind.lift != nil {
			deeds = append(deeds, deed{f.at + f.lasts, f, true})
		}
	}
	slices.SortStableFunc(deeds, func(a, b deed) int { return cmp.Compare(a.at, b.at) })
	began := time.Now()
	for _, d := range deeds {
		w.rest(d.at - time.Since(began))
		if w.ctx.Err() != nil {
			return
		}
		w.do(d)
	}
}

// do makes a fault begin or end. What makes no sense now is skipped: nothing happens to a GPU that lies on the
// table but being put back.
func (w *storm) do(d deed) {
	f := d.of
	_, out := w.pulled[f.slot]
	strike, prefix := f.kind.strike, "#%d "
	switch {
	case d.lift && f.skipped:
		return
	case d.lift:
		strike, prefix = f.kind.lift, "#%d over: "
		if out && slices.Contains(f.kind.domains, "word") {
			return
		}
	case out:
		f.skipped = true
		return
	default:
		w.done[f.kind.name]++
	}
	w.journal.note(prefix+"%s", f.number, f)
	began := time.Now()
	err := strike(w, f)
	if took := time.Since(began); took > stall && f.slot >= 0 {
		w.truth.stall(took)
	}
	if err != nil {
		w.wrong("fault #%d %s: %w", f.number, f, err)
	}
}
