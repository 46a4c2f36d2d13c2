// Package cli is the command line of both agents: the same verbs with the same arguments.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

// Exit codes of a process.
const (
	ExitOK     = 0
	ExitFailed = 1 // a value of the configuration is wrong, or the command failed
	ExitUsage  = 2 // the command line is not understood
	ExitFound  = 3 // doctor has found a problem, or shadow a difference
)

// UsageError is a command line that can't be understood.
type UsageError struct{ Text string }

func (e *UsageError) Error() string { return e.Text }

// Usagef returns a *UsageError.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// Flags declares options to the command line. Hidden ones are accepted and not listed.
func Flags(specs []config.Spec, values config.Flags) (flags []cli.Flag) {
	for _, s := range specs {
		if s.Flag == "" {
			continue
		}
		usage := s.Usage
		if len(s.Env) > 0 {
			usage += " [$" + strings.Join(s.Env, ", $") + "]"
		}
		flags = append(flags, &cli.GenericFlag{Name: s.Flag, Aliases: s.Aliases, Value: values[s.Flag], DefaultText: s.Default, Hidden: s.Hidden, Usage: usage})
	}
	return flags
}

// FlagNomadConfig is the flag of nomad-gpu for the file that has its plugin block.
const FlagNomadConfig = "nomad-config"

// NomadConfig declares FlagNomadConfig.
func NomadConfig(path *string) cli.Flag {
	return &cli.StringFlag{Name: FlagNomadConfig, Destination: path,
		Usage: "file of the Nomad client's configuration: its plugin block has the settings of which no flag is given; for shadow, if it has no such block, that of nomad-device-nvidia as import reads it"}
}

// Program is the command line of one agent. Flags are parsed before the functions are called.
type Program struct {
	Name, Usage, Description string
	Version                  string // what "version" prints, in one line

	Flags    []cli.Flag                    // of the agent, config.FlagConfigFile among them; the commands accept them, too
	Serve    func(context.Context) error   // what the program does without a verb; nil = a verb is required
	Options  func() (agent.Options, error) // of the agent that the verbs refer to; with an error, as far as they are valid
	Validate func() (Validation, error)    // reads the configuration
	Keys     []string                      // settings that are keys of a plugin block and no flags

	// Doctor returns what doctor checks: the options of an agent as for Options, and the checks of the orchestrator. The root of the
	// host's file system is "" unless it is not /.
	Doctor func(hostRoot string) (agent.Options, []doctor.Check, error)
	Import *Import // nil = the program has no such verb
	Shadow *Shadow // nil = the program has no such verb

	Classes func(Classes) ([]byte, error) // the DeviceClasses as YAML; nil = the program has no such verb

	Explain func() explain.Adapter // of the orchestrator, with the settings of Options, for an agent that does not run

	Log        func() *slog.Logger // for a verb that runs until a signal; nil = lines of text to Stderr
	StopWithin func(time.Duration) // called by a verb that takes longer than an agent to end after a signal; may be nil

	Stdout, Stderr io.Writer

	typed string // when it is called for completion: the last word of the command line that the shell has passed
}

// Run runs a command line; args[0] is the name of the program. It returns a *UsageError if it can't be understood.
func (p Program) Run(ctx context.Context, args []string) error {
	args = slices.Clone(args)
	if len(args) > 2 && args[len(args)-1] == completeFlag {
		args = joinWords(args)
		p.typed = args[len(args)-2]
	}
	if len(args) > 1 {
		switch args[1] {
		case "-version", "--version":
			args[1] = "version"
		case "-help":
			args[1] = "--help"
		}
	}
	return p.command().Run(ctx, args)
}

// ExitCode is the exit code of a process whose command line returned err.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return ExitOK
	case isUsage(err):
		return ExitUsage
	case errors.Is(err, errProblems), errors.Is(err, errDiffer):
		return ExitFound
	}
	return ExitFailed
}

func isUsage(err error) bool {
	_, usage := errors.AsType[*UsageError](err)
	return usage
}

// WriteError writes an error, each of its lines with a prefix.
func WriteError(w io.Writer, prefix string, err error) {
	if err == nil {
		return
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(w, "%s: %s\n", prefix, strings.TrimSuffix(line, "\n"))
	}
}

func (p Program) command() *cli.Command {
	setHelpPrinter()
	root := &cli.Command{
		Name: p.Name, Usage: p.Usage, Description: p.Description, Flags: p.Flags, HideHelpCommand: true,
		Writer: p.Stdout, ErrWriter: p.Stderr, Commands: p.verbs(),
		EnableShellCompletion: true, ConfigureShellCompletionCommand: p.completionVerb, ShellComplete: p.complete,
		OnUsageError: p.usageError, ExitErrHandler: func(context.Context, *cli.Command, error) {},
	}
	root.Action = func(ctx context.Context, c *cli.Command) error {
		switch {
		case c.Args().Present():
			return unknownCommand(c, c.Args().First())
		case p.Serve == nil:
			return Usagef("want a command: see %s help", p.Name)
		}
		return p.Serve(ctx)
	}
	return root
}

// options returns the options of the agent that a verb refers to. A configuration that is invalid is no error while an agent
// runs: the agent uses an older one, and the verb does not depend on the file.
func (p Program) options(ctx context.Context) (agent.Options, error) {
	o, err := p.Options()
	if err == nil || isUsage(err) {
		return o, err
	}
	if _, unavailable := control.Report(ctx, socket(o)); unavailable != nil {
		return agent.Options{}, err
	}
	WriteError(p.Stderr, p.Name+": not used by the running agent", err)
	return o, nil
}

// noteFile says that the running agent does not use the configuration file of the command line. It is for verbs that show what is offered.
func (p Program) noteFile(ctx context.Context, c *cli.Command, o agent.Options) {
	if !c.IsSet(config.FlagConfigFile) {
		return
	}
	if _, unavailable := control.Report(ctx, socket(o)); unavailable == nil {
		fmt.Fprintf(p.Stderr, "%s: the running agent answers, by its own configuration: --%s has no effect; with --state-dir= no agent is asked, and this shows what one with that file would offer\n", p.Name, config.FlagConfigFile)
	}
}

func socket(o agent.Options) string { return control.Path(o.Health.StateDir, o.Name) }

// unknownCommand is the error for a word that is no command.
func unknownCommand(root *cli.Command, written string) error {
	var names []string
	for _, c := range root.Commands {
		names = append(names, c.Name)
	}
	if name, ok := document.Near(written, names); ok {
		return Usagef("unknown command %s: did you mean %s?", written, name)
	}
	return Usagef("unknown command %s: see %s help", written, root.Name)
}

// invalidValue matches the library's error for a value that a flag can't have: value and flag.
var invalidValue = regexp.MustCompile(`(?s)^invalid value (".*") for flag -+(\S+): `)

// usageError replaces the page of help that the library prints by one line.
func (p Program) usageError(_ context.Context, c *cli.Command, err error, _ bool) error {
	if value := invalidValue.FindStringSubmatch(err.Error()); value != nil {
		return Usagef("--%s = %s: %s", value[2], value[1], wantedBy(find(c, "--"+value[2])))
	}
	if name, ok := strings.CutPrefix(err.Error(), "flag needs an argument: -"); ok {
		return Usagef("--%s: want a value: see %s --help", strings.TrimLeft(name, "-"), strings.TrimSpace(c.FullName()))
	}
	name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !ok {
		return &UsageError{err.Error()}
	}
	var names []string
	for _, f := range slices.Concat(c.Flags, c.Root().Flags) {
		names = append(names, f.Names()...)
	}
	name = strings.TrimLeft(name, "-")
	if key := strings.ReplaceAll(name, "-", "_"); slices.Contains(p.Keys, key) {
		return Usagef("unknown flag --%s: %s is a key of the plugin block: want --%s with the file that has the block", name, key, FlagNomadConfig)
	}
	if near, ok := document.Near(name, names); ok {
		return Usagef("unknown flag --%s: did you mean --%s?", name, near)
	}
	return Usagef("unknown flag --%s: see %s --help", name, strings.TrimSpace(c.FullName()))
}
