// Command release writes the parts of a release that depend only on the built files: licence texts, archives, SBOMs and provenance. The
// script "release" beside it calls each subcommand; all output is a function of its input, so that two builds can be compared.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

var commands = map[string]func(context.Context, []string) error{
	"licenses":   licensesCommand,
	"pack":       packCommand,
	"sbom":       sbomCommand,
	"provenance": provenanceCommand,
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
}

func run(ctx context.Context, args []string) error {
	names := strings.Join(slices.Sorted(maps.Keys(commands)), ", ")
	if len(args) == 0 {
		return fmt.Errorf("want one of %s", names)
	}
	command, ok := commands[args[0]]
	if !ok {
		return fmt.Errorf("%s: want one of %s", args[0], names)
	}
	if err := command(ctx, args[1:]); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return nil
}
