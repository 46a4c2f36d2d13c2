// Package cli is the command line of both agents: the same verbs with the same arguments.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

// ExitFound is the exit code of a process if doctor has found a problem, or shadow a difference.
const ExitFound = 3

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

	Components bool // what needs rights that agents lack is done by components of the node, for which the program has verbs

	Explain func() explain.Adapter // of the orchestrator, with the settings of Options, for an agent that does not run

	Log        func() *slog.Logger // for a verb that runs until a signal; nil = lines of text to Stderr
	StopWithin func(time.Duration) // called by a verb that takes longer than an agent to end after a signal; may be nil

	Stdout, Stderr io.Writer
}

// Run runs a command line; args[0] is the name of the program. It returns a *command.UsageError if it can't be understood.
func (p Program) Run(ctx context.Context, args []string) error {
	return command.Program{
		Name: p.Name, Usage: p.Usage, Description: p.Description, Version: p.Version, Flags: p.Flags, Verbs: p.verbs(), Serve: p.Serve,
		UnknownFlag: p.unknownFlag, Values: p.values, Arguments: p.arguments, Stdout: p.Stdout, Stderr: p.Stderr,
	}.Run(ctx, args)
}

// unknownFlag is the error for a key of the plugin block that is no flag.
func (p Program) unknownFlag(name string) error {
	if key := strings.ReplaceAll(name, "-", "_"); slices.Contains(p.Keys, key) {
		return command.Usagef("unknown flag --%s: %s is a key of the plugin block: want --%s with the file that has the block", name, key, FlagNomadConfig)
	}
	return nil
}

// ExitCode is the exit code of a process whose command line returned err.
func ExitCode(err error) int {
	if errors.Is(err, errProblems) || errors.Is(err, errDiffer) {
		return ExitFound
	}
	if _, ok := errors.AsType[*notProved](err); ok {
		return ExitNotProved
	}
	return command.ExitCode(err)
}

// options returns the options of the agent that a verb refers to. A configuration that is invalid is no error while an agent
// runs: the agent uses an older one, and the verb does not depend on the file.
func (p Program) options(ctx context.Context) (agent.Options, error) {
	o, err := p.Options()
	if err == nil || command.IsUsage(err) {
		return o, err
	}
	if _, unavailable := control.Report(ctx, socket(o)); unavailable != nil {
		return agent.Options{}, err
	}
	command.WriteError(p.Stderr, p.Name+": not used by the running agent", err)
	return o, nil
}

// noteFile writes that the running agent does not use the configuration file of the command line. It is for verbs that show what is offered.
func (p Program) noteFile(ctx context.Context, c *cli.Command, o agent.Options) {
	if !c.IsSet(config.FlagConfigFile) {
		return
	}
	if _, unavailable := control.Report(ctx, socket(o)); unavailable == nil {
		fmt.Fprintf(p.Stderr, "%s: the running agent answers, by its own configuration: --%s has no effect; with --state-dir= no agent is asked, and this shows what one with that file would offer\n", p.Name, config.FlagConfigFile)
	}
}

func socket(o agent.Options) string { return control.Path(o.Health.StateDir, o.Name) }
