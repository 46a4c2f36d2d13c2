package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"
)

// newCommand is the command line: without a verb the agent runs.
func newCommand(w world) *cli.Command {
	values := newFlagValues()
	read := func() (settings, error) { return resolve(values, w.lookupEnv) }
	root := &cli.Command{
		Name:  "k8s-gpu",
		Usage: "offer this machine's NVIDIA GPUs to the kubelet",
		Description: "A flag wins over its environment variable, and that over the configuration file.\n" +
			"DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS mean what they mean for NVIDIA's plugin, where --xids names no other effect.",
		Flags:           values.flags(),
		HideHelpCommand: true,
		Writer:          w.stdout, ErrWriter: w.stderr,
		OnUsageError: usageError, ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Action: func(ctx context.Context, c *cli.Command) error {
			if c.Args().Present() {
				return unknownCommand(c)
			}
			s, err := read()
			if err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(w.stderr, &slog.HandlerOptions{Level: s.logLevel}))
			for _, note := range s.notes {
				log.Info(note)
			}
			return serve(ctx, s, log)
		},
	}
	root.Commands = append(verbs(w, read), &cli.Command{
		Name: "version", Usage: "print the version", OnUsageError: usageError,
		Action: func(context.Context, *cli.Command) error {
			_, err := fmt.Fprintln(w.stdout, "k8s-gpu", versionText())
			return err
		},
	})
	return root
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
