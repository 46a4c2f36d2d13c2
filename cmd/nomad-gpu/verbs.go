package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/internal/sources"
)

// verbs are what an operator asks: mostly of the plugin that Nomad runs here, by way of its local socket.
var verbs = map[string]func(ctx context.Context, args []string, out io.Writer) error{
	"inspect":  look,
	"clear":    drop,
	"ignore":   disregard,
	"simulate": rehearse,
	"quiesce":  quiesce,
	"resume":   resume,
	"rebind":   rebind,
	"debug":    debug,
	"validate": validate,
}

// usageError is a command that can't be understood.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

var errRelative = errors.New("want an absolute path")

// look prints what the plugin offers. Without a running one it reads the machine once, as the plugin would: a
// machine without a driver is an answer, not a failure; a driver that does not answer is given up on in time.
func look(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	asJSON := flags.Bool("json", false, "")
	cfg := core.DefaultConfig()
	file := flags.String("policy-file", "", "")
	strategy := flags.String("mig-strategy", "", "")
	pathVar(flags, &cfg.Roots.Driver, "driver-root")
	pathVar(flags, &cfg.Roots.Dev, "dev-root")
	pathVar(flags, &cfg.Roots.Sys, "sysfs-root")
	pathVar(flags, &cfg.Roots.Proc, "procfs-root")
	if err := parse(flags, args); err != nil {
		return err
	}
	if cfg.Roots.Dev == "" {
		cfg.Roots.Dev = cfg.Roots.Driver
	}
	mpsRoot, err := offer(&cfg, *file, *strategy)
	if err != nil {
		return err
	}
	read := func(ctx context.Context) report.Report {
		return sources.Reading(ctx, opener(cfg.Roots), cfg, mpsRoot, *dir, agentName)
	}
	return control.Inspect(ctx, socketPath(*dir), read, out, *asJSON)
}

// offer takes over what the plugin would be told of the offer.
func offer(c *core.Config, file, strategy string) (mpsRoot string, err error) {
	var said config.File
	if file != "" {
		if said, err = config.ReadFile(file, policy.Nomad); err != nil {
			return "", err
		}
	}
	c.Policy, c.MIG = said.Policy, cmp.Or(core.MIGStrategy(strategy), said.MIG, core.MIGMixed)
	return said.MPSRoot, c.Validate()
}

// drop says that what was wrong with a GPU is over.
func drop(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	var order control.ClearArgs
	about(flags, &order.GPU, &order.Cause, &order.VerifiedAt)
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Clear(ctx, socketPath(*dir), order, out)
}

// disregard sets aside for a while what is wrong with a GPU.
func disregard(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	var order control.IgnoreArgs
	about(flags, &order.GPU, &order.Cause, &order.VerifiedAt)
	flags.StringVar(&order.Until, "until", "", "")
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Ignore(ctx, socketPath(*dir), order, out)
}

// about are the flags that say what an order is about.
func about(flags *flag.FlagSet, gpu, cause, verifiedAt *string) {
	flags.StringVar(gpu, "gpu", "", "")
	flags.StringVar(cause, "cause", "", "")
	flags.StringVar(verifiedAt, "verified-at", "", "")
}

// rehearse plays a fault on the running plugin.
func rehearse(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	var fault control.SimulateArgs
	flags.StringVar(&fault.GPU, "gpu", "", "")
	flags.StringVar(&fault.GI, "gi", "", "")
	flags.StringVar(&fault.CI, "ci", "", "")
	if err := parseWords(flags, args, "a fault, such as xid 79 or event 0x2000", &fault.Kind, &fault.Code); err != nil {
		return err
	}
	return control.Simulate(ctx, socketPath(*dir), fault, out)
}

// quiesce has the plugin leave the driver alone.
func quiesce(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	var order control.QuiesceArgs
	flags.StringVar(&order.For, "for", "", "")
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Quiesce(ctx, socketPath(*dir), order, out)
}

// resume has the plugin take the driver back.
func resume(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Resume(ctx, socketPath(*dir), out)
}

// rebind has the plugin bind the positions of its policy to the devices of the driver's present order.
func rebind(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Rebind(ctx, socketPath(*dir), out)
}

// debug prints the inside of the running plugin.
func debug(ctx context.Context, args []string, out io.Writer) error {
	flags, dir := newFlags()
	asJSON := flags.Bool("json", false, "")
	if err := parse(flags, args); err != nil {
		return err
	}
	return control.Debug(ctx, socketPath(*dir), out, *asJSON)
}

// newFlags are the flags of a verb, with the one that all have.
func newFlags() (*flag.FlagSet, *string) {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := config.DefaultHealth().StateDir
	flags.Func("state-dir", "", func(value string) error {
		dir = value
		if value != "" && !filepath.IsAbs(value) {
			return errRelative
		}
		return nil
	})
	return flags, &dir
}

func pathVar(flags *flag.FlagSet, to *string, name string) {
	flags.Func(name, "", func(value string) error {
		*to = value
		if !filepath.IsAbs(value) {
			return errRelative
		}
		return nil
	})
}

// parse reads the flags that follow a verb.
func parse(flags *flag.FlagSet, args []string) error { return parseWords(flags, args, "") }

// parseWords reads what follows a verb: flags, wherever they stand, and as many words as there are places for.
func parseWords(flags *flag.FlagSet, args []string, want string, words ...*string) error {
	for {
		if err := flags.Parse(args); err != nil {
			return usageError{err}
		}
		switch {
		case flags.NArg() == 0 && len(words) > 0:
			return usageError{errors.New("want " + want)}
		case flags.NArg() == 0:
			return nil
		case len(words) == 0:
			return usageError{fmt.Errorf("unexpected argument %q", flags.Arg(0))}
		}
		*words[0], words, args = flags.Arg(0), words[1:], flags.Args()[1:]
	}
}
