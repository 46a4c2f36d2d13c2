package report

import (
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Next is a proof, or a reset, that runs on a GPU, or what the next one waits for.
type Next struct {
	Running    string    `json:"running,omitempty"` // why one runs now; "" = none does
	RunsSince  time.Time `json:"runsSince,omitzero"`
	WaitsFor   string    `json:"waitsFor,omitempty"` // the code of what the next one waits for
	Waits      string    `json:"waits,omitempty"`    // the same in some words
	WaitsUntil time.Time `json:"waitsUntil,omitzero"`
}

// next is the same in one line; "" = there is none.
func (n Next) next() string {
	switch {
	case n.Running != "":
		return "runs since " + stamp(n.RunsSince) + " (" + n.Running + ")"
	case n.WaitsFor == "":
		return ""
	case n.WaitsUntil.IsZero():
		return n.Waits
	}
	return n.Waits + ", until " + stamp(n.WaitsUntil)
}

// mostText is how much of a text a table shows, so that it fits a screen. JSON and the page have all of it.
const mostText = 60

// tableName is the name of a GPU in a table: its index, if it has one.
func tableName(index int, id gpu.DeviceID) string {
	if index < 0 {
		return string(id)
	}
	return strconv.Itoa(index)
}

// tableTime is a time in a table; "" for none.
func tableTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return stamp(t)
}

// takenBy is what a table shows as the owner of a GPU on which a proof or a reset runs; "" = none does.
func (r Report) takenBy(id gpu.DeviceID) string {
	for _, p := range r.Proofs {
		if p.GPU == id && p.Running != "" {
			return "proof (" + p.Running + ")"
		}
	}
	for _, one := range r.Resets {
		if one.GPU == id && one.Running != "" {
			return "reset (" + one.Running + ")"
		}
	}
	return ""
}
