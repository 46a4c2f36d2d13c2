package proof

import (
	"fmt"
	"slices"
	"time"
)

// Window is a time of the day in which a proof for the reason idle may begin, in the time zone of the time that Next gets. One whose end is not after its
// beginning ends on the next day.
type Window struct {
	Days     []time.Weekday // on which it begins; nil = each day
	From, To time.Duration  // since midnight, by the clock on the wall
}

// String returns the window as one line: "Sat Sun 22:00-06:00".
func (w Window) String() string {
	text := ""
	for _, d := range w.Days {
		text += d.String()[:3] + " "
	}
	return text + fmt.Sprintf("%02d:%02d-%02d:%02d", w.From/time.Hour, w.From%time.Hour/time.Minute, w.To/time.Hour, w.To%time.Hour/time.Minute)
}

// on returns the beginning and the end of the window that begins on the day of a time, or some days after.
func (w Window) on(t time.Time, after int) (from, to time.Time, ok bool) {
	at := func(days int, d time.Duration) time.Time {
		return time.Date(t.Year(), t.Month(), t.Day()+days, int(d/time.Hour), int(d%time.Hour/time.Minute), 0, 0, t.Location())
	}
	from, to = at(after, w.From), at(after, w.To)
	if w.To <= w.From {
		to = at(after+1, w.To)
	}
	return from, to, len(w.Days) == 0 || slices.Contains(w.Days, from.Weekday())
}

// opens returns when a window is open: at a time, or the next time after it.
func (p Policy) opens(now time.Time) time.Time {
	if len(p.Windows) == 0 {
		return now
	}
	var next time.Time
	for _, w := range p.Windows {
		for after := -1; after <= 7; after++ {
			from, to, ok := w.on(now, after)
			switch {
			case !ok || !now.Before(to):
			case !now.Before(from):
				return now
			case next.IsZero() || from.Before(next):
				next = from
			}
		}
	}
	return next
}
