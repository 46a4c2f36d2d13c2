package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/footprint"
)

// newCommand is the command line: without a verb the agent runs.
func newCommand(w world) *cli.Command {
	values := config.NewFlags()
	read := func() (settings, error) {
		return config.ReadKubernetes(values, config.Environment{LookupEnv: w.lookupEnv, CheckAddress: checkAddress})
	}
	root := &cli.Command{
		Name:  "k8s-gpu",
		Usage: "offer this machine's NVIDIA GPUs to the kubelet",
		Description: "A flag wins over its environment variable, and that over the configuration file.\n" +
			"DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS mean what they mean for NVIDIA's plugin, where --xids names no other effect.",
		Flags:           cliFlags(values),
		HideHelpCommand: true,
		Writer:          w.stdout, ErrWriter: w.stderr,
		OnUsageError: usageError, ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Action: func(ctx context.Context, c *cli.Command) error {
			if c.Args().Present() {
				return unknownCommand(c)
			}
			return serve(ctx, read, w.stderr)
		},
	}
	root.Commands = append(verbs(w, leniently(read, w.stderr)), validate(w, read), &cli.Command{
		Name: "version", Usage: "print the version", OnUsageError: usageError,
		Action: func(context.Context, *cli.Command) error {
			_, err := fmt.Fprintln(w.stdout, "k8s-gpu", versionText())
			return err
		},
	})
	return root
}

// serve runs the agent until ctx ends.
func serve(ctx context.Context, read func() (settings, error), stderr io.Writer) error {
	hup, asked := signals()
	footprint.Reduce()
	a := &shared{config: &configStatus{}, past: &past{}, asked: asked}
	l := lives{read: read, live: a.live, hup: hup, config: a.config, stderr: stderr}
	return l.run(ctx)
}

// leniently reads settings for an order to an agent that runs: it goes on while what it would read now is bad,
// and can still be asked. Without one, bad settings are an error.
func leniently(read func() (settings, error), stderr io.Writer) func() (settings, error) {
	return func() (settings, error) {
		s, err := read()
		if err == nil {
			return s, nil
		}
		if _, unheard := control.Dial(socketPath(s)).Report(context.Background()); unheard != nil {
			return settings{}, err
		}
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintln(stderr, "k8s-gpu: not what the running agent uses:", strings.TrimSuffix(line, "\n"))
		}
		return s, nil
	}
}

// unknownCommand is what the library takes for an argument of the agent, which has none.
func unknownCommand(c *cli.Command) error {
	var names []string
	for _, verb := range c.Commands {
		names = append(names, verb.Name)
	}
	written := c.Args().First()
	return fmt.Errorf("unknown command %s: did you mean %s?", written, nearest(written, names))
}

// usageError is one line instead of the page of help that the library prints.
func usageError(_ context.Context, c *cli.Command, err error, _ bool) error {
	name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !ok {
		return err
	}
	var names []string
	for _, f := range slices.Concat(c.Flags, c.Root().Flags) {
		names = append(names, f.Names()...)
	}
	name = strings.TrimLeft(name, "-")
	return fmt.Errorf("unknown flag --%s: did you mean --%s?", name, nearest(name, names))
}

// nearest is the name that looks most like what was written.
func nearest(written string, names []string) string {
	flags := make([]cli.Flag, len(names))
	for i, n := range names {
		flags[i] = &cli.StringFlag{Name: n}
	}
	return strings.TrimLeft(cli.SuggestFlag(flags, written, true), "-")
}
