// Command gpu-fleet moves work away from faulty GPUs, within a budget, in the Kubernetes clusters and Nomad regions of a team. One process leads; any
// number may stand by.
package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/processlog"
	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/internal/util/terminal"
)

const name = "gpu-fleet"

// version is set by the linker; a build by "go install ...@v2.0.0" has it from the module instead.
var version string

// flushFor is how long a process that ends waits for the reader of its log.
const flushFor = time.Second

func main() {
	signal.Ignore(syscall.SIGPIPE) // the reader of the log has ended; the process goes on
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second signal ends the process
	log := &processlog.Log{Out: os.Stderr, Terminal: terminal.Is(os.Stderr), Name: name, Ends: "gpu-fleet ends"}
	p := program{stdout: os.Stdout, stderr: os.Stderr, log: log, getenv: os.Getenv}
	err := p.run(ctx, os.Args)
	log.End(err, flushFor)
	os.Exit(exitCode(err))
}

// configError is a configuration that can't be used.
type configError struct{ error }

// Unwrap returns the problems.
func (e *configError) Unwrap() error { return e.error }

// exitCode is that of a process whose command line returned err. A restart does not help if the command line or the configuration is wrong.
func exitCode(err error) int {
	if _, ok := errors.AsType[*configError](err); ok {
		return command.ExitUsage
	}
	return command.ExitCode(err)
}

// program is the command line with the values of its flags.
type program struct {
	stdout, stderr io.Writer
	log            *processlog.Log // to stderr
	getenv         func(string) string

	file, identity, logLevel, logFormat string
	address, tokenFile, by, planMode    string
	onLedger                            bool
}

const description = `Without a command it runs: it follows the clusters, keeps the ledger, moves work, and serves a page, metrics and these commands.
The configuration is read at the start. To change it: gpu-fleet validate, then restart the process.
A signal (SIGTERM, SIGINT, SIGHUP, SIGQUIT) ends it: calls under way get their answers first, and another process can lead at once.
Exit codes: 0 as requested, 1 failed, 2 command line or configuration is wrong.`

// run runs a command line.
func (p *program) run(ctx context.Context, args []string) error {
	return command.Program{
		Name: name, Usage: "move work away from faulty GPUs, within a budget, under Kubernetes and Nomad", Description: description,
		Version: name + " " + command.VersionText(version), Flags: p.flags(), Verbs: p.verbs(), Serve: p.serve, Values: values,
		Stdout: p.stdout, Stderr: p.stderr,
	}.Run(ctx, args)
}

// The values of flags.
var (
	levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}

	levelNames = []string{"debug", "info", "warn", "error"}
	formats    = []string{"auto", "text", "json"}
	planModes  = []string{"act", "report"}
)

func (p *program) flags() []cli.Flag {
	return []cli.Flag{
		setting("config-file", "PATH", config.DefaultPath, "the configuration", &p.file, "config"),
		setting("identity", "TEXT", "", "name of this process among those of the team, which no other has at the same time; the host name and random letters if not given", &p.identity),
		setting("log-level", "LEVEL", "info", document.Choice(levelNames), &p.logLevel),
		setting("log-format", "FORMAT", "auto", "text, json, or auto: text on a terminal, else json", &p.logFormat),
	}
}

// setting is a flag that an environment variable sets, too.
func setting(flag, form, byDefault, usage string, to *string, aliases ...string) cli.Flag {
	env := "GPU_FLEET_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
	return &cli.StringFlag{
		Name: flag, Aliases: aliases, Value: byDefault, DefaultText: form, Destination: to, Usage: usage + " [$" + env + "]", Sources: cli.EnvVars(env),
	}
}

// values are those of a flag, for completion.
func values(_ context.Context, f cli.Flag) []command.Candidate {
	switch f.Names()[0] {
	case "log-level":
		return command.Words(levelNames...)
	case "log-format":
		return command.Words(formats...)
	case "mode":
		return command.Words(planModes...)
	}
	return nil
}

// verbs are the commands beside run.
func (p *program) verbs() []command.Verb {
	asJSON := &cli.BoolFlag{Name: "json", Usage: "print JSON"}
	verbs := []command.Verb{
		{Name: "run", Usage: "what the program does without a command", Do: func(ctx context.Context, _ *cli.Command) error { return p.serve(ctx) }},
		{Name: "init", Usage: "create the ledger, once for a team; exit code 1 if there is one", Do: func(ctx context.Context, _ *cli.Command) error { return p.create(ctx) }},
		{Name: "validate", Usage: "read the configuration, and print what it means or every problem; exit code 2 if there is one",
			ArgsUsage: "[FILE]", MaxArgs: 1, Flags: []cli.Flag{asJSON}, Do: p.validate},
		{Name: "schema", Usage: "print the JSON Schema of the configuration, with which editors complete and check it",
			Do: func(context.Context, *cli.Command) error { return config.WriteSchema(p.stdout) }},
	}
	return slices.Insert(verbs, 2, p.clientVerbs(asJSON)...)
}
