package main

import (
	"context"
	"flag"
	"fmt"
	"io"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
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
	r, err := config.ReadFile(path, policy.Nomad)
	if err != nil {
		return err
	}
	for _, line := range r.Summary() {
		fmt.Fprintln(out, line)
	}
	_, err = fmt.Fprintln(out, "no problem")
	return err
}
