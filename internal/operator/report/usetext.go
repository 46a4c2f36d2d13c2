package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// writeUse writes which work has the devices, and their processes: "owner: GPU 0 GPU-...: pod default/train, container main, since ...".
func (r Report) writeUse(w io.Writer) {
	if u := r.OwnersUnknown; u != nil && !slices.ContainsFunc(r.Problems, func(p problem.Problem) bool { return p.Code == problem.Owners }) {
		fmt.Fprintln(w, u)
	}
	for _, d := range r.hardware() {
		for _, o := range d.Owners {
			fmt.Fprintf(w, "owner: GPU %s %s: %s%s\n", d.number(), d.ID, o, d.held())
		}
	}
	for _, d := range r.hardware() {
		for _, p := range d.Processes {
			fmt.Fprintf(w, "process: GPU %s %s: %s\n", d.number(), d.ID, p)
		}
	}
}

// String is the line for operators: "owners unknown: set nomad_address (no Nomad agent answers at http://127.0.0.1:4646)".
func (u *Unknown) String() string {
	switch {
	case u.Remedy == "":
		return "owners unknown: " + cmp.Or(u.Reason, "the record of the orchestrator is not complete yet")
	case u.Reason == "":
		return "owners unknown: " + u.Remedy
	}
	return "owners unknown: " + u.Remedy + " (" + u.Reason + ")"
}

// held is since when a device is held and idle.
func (d Device) held() string {
	var text string
	if !d.HeldSince.IsZero() {
		text = ", since " + stamp(d.HeldSince)
	}
	if !d.IdleSince.IsZero() {
		text += ", idle since " + stamp(d.IdleSince)
	}
	return text
}

// String is the name of the owner's work with its container or task: "pod default/train, container main".
func (o Owner) String() string {
	text := holders.Work(o).String()
	switch {
	case o.Container == "":
		return text
	case o.Orchestrator == holders.Nomad:
		return text + ", task " + o.Container
	}
	return text + ", container " + o.Container
}

// String describes the process: "pid 2114 python (512 MiB), of pod default/train", "pid 2114 (512 MiB), without a reservation".
func (p Process) String() string {
	text := fmt.Sprintf("pid %d", p.PID)
	if p.Name != "" {
		text += " " + p.Name
	}
	if p.MemoryBytes != nil {
		text += fmt.Sprintf(" (%d MiB)", *p.MemoryBytes>>20)
	}
	if p.Owner != nil {
		text += ", of " + p.Owner.String()
	}
	if p.Unreserved {
		text += ", without a reservation"
	}
	return text
}
