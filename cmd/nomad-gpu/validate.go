package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/policy"
)

// validate says what is wrong with a policy file, or what it says. It looks at no machine: whether a part of it
// concerns a device, only inspect can tell.
func validate(_ context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var path string
	if err := parseWords(flags, args, "a policy file", &path); err != nil {
		return err
	}
	r, err := policy.ReadFile(path, policy.Nomad)
	if err != nil {
		return err
	}
	for _, line := range spell(r) {
		fmt.Fprintln(out, line)
	}
	_, err = fmt.Fprintln(out, "no problem")
	return err
}

// spell says in a line each what a policy file says to this plugin.
func spell(r policy.Result) (lines []string) {
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
		parts := []string{s.Pool + " is offered by " + s.Sharing.String()}
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
		parts = append(parts, r.Sharing.String())
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
