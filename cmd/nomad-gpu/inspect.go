package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/inspect"
)

// inspectMachine reads the machine once, as the plugin would, and prints what it would offer. A machine
// without a driver is an answer, not a failure; a driver that does not answer is given up on in time.
func inspectMachine(name string, args []string, stdout, stderr io.Writer) int {
	cfg, asJSON, err := inspectFlags(args)
	if errors.Is(err, flag.ErrHelp) {
		return command(name, []string{"help"}, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s inspect: %v; try: %[1]s help\n", name, err)
		return exitUsage
	}
	report := inspect.Describe(inspect.Read(context.Background(), opener(cfg.Roots), cfg))
	write := report.WriteTable
	if asJSON {
		write = report.WriteJSON
	}
	if err := write(stdout); err != nil {
		fmt.Fprintf(stderr, "%s inspect: %v\n", name, err)
		return exitFailed
	}
	return exitOK
}

// inspectFlags reads what may follow the verb; MIG is as in the plugin.
func inspectFlags(args []string) (cfg core.Config, asJSON bool, err error) {
	cfg = core.DefaultConfig()
	cfg.MIG = core.MIGMixed
	flags := flag.NewFlagSet("inspect", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.BoolVar(&asJSON, "json", false, "")
	roots := map[string]*string{
		"driver-root": &cfg.Roots.Driver,
		"dev-root":    &cfg.Roots.Dev,
		"sysfs-root":  &cfg.Roots.Sys,
		"procfs-root": &cfg.Roots.Proc,
	}
	for key, to := range roots {
		flags.Func(key, "", func(value string) error {
			if !filepath.IsAbs(value) {
				return errRelative
			}
			*to = value
			return nil
		})
	}
	if err := flags.Parse(args); err != nil {
		return cfg, false, err
	}
	if flags.NArg() > 0 {
		return cfg, false, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if cfg.Roots.Dev == "" {
		cfg.Roots.Dev = cfg.Roots.Driver
	}
	return cfg, asJSON, nil
}

var errRelative = errors.New("want an absolute path")
