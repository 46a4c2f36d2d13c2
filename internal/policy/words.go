package policy

import (
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// WarningLines are the warnings, for a person who reads them among other lines.
func (r Result) WarningLines() (lines []string) {
	for _, w := range r.Warnings {
		lines = append(lines, "warning: "+w)
	}
	return lines
}

// Summary are a line for each thing that a file says to an agent. They look at no machine.
func (r Result) Summary() (lines []string) {
	say := func(at string, parts ...string) {
		lines = append(lines, at+": "+strings.Join(parts, ", "))
	}
	if r.MIG != "" {
		say("MIG strategy", string(r.MIG))
	}
	if r.MPSRoot != "" {
		say("MPS root", r.MPSRoot)
	}
	for _, s := range r.Policy.Include {
		say(s.At, "these are offered, and no others but those of further includes")
	}
	for _, rule := range r.Policy.Rules {
		say(rule.Select.At, ruled(rule)...)
	}
	for _, n := range r.Policy.Names {
		say(n.Select.At, "named "+n.Pool)
	}
	for _, s := range r.Policy.Shares {
		parts := []string{s.Pool + " is offered by " + s.Sharing.Terms()}
		if s.First > 0 {
			parts = append(parts, fmt.Sprintf("%d of its devices", s.First))
		}
		if s.Rename != "" {
			parts = append(parts, "named "+s.Rename)
		}
		say(s.Select.At, parts...)
	}
	return lines
}

// ruled is what becomes of the devices that a rule selects.
func ruled(r core.Rule) (parts []string) {
	if r.Reserve != "" {
		return []string{"not offered: " + r.Reserve}
	}
	if r.Sharing != nil {
		parts = append(parts, r.Sharing.Terms())
	} else {
		parts = append(parts, "offered")
	}
	if r.MIG != "" {
		parts = append(parts, "MIG strategy "+string(r.MIG))
	}
	if r.Pool != "" {
		parts = append(parts, "named "+r.Pool)
	}
	return parts
}
