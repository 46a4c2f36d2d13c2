// Package command is what the command lines of all programs have in common: verbs, help, completion, errors, exit codes.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// Exit codes of a process.
const (
	ExitOK     = 0
	ExitFailed = 1 // the command failed
	ExitUsage  = 2 // the command line is not understood
)

// UsageError is a command line that can't be understood.
type UsageError struct{ Text string }

func (e *UsageError) Error() string { return e.Text }

// Usagef returns a *UsageError.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// IsUsage reports whether an error is a *UsageError.
func IsUsage(err error) bool {
	_, usage := errors.AsType[*UsageError](err)
	return usage
}

// ExitCode is the exit code of a process whose command line returned err.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return ExitOK
	case IsUsage(err):
		return ExitUsage
	}
	return ExitFailed
}

// WriteError writes an error, each of its lines with a prefix. It may have names that other programs chose.
func WriteError(w io.Writer, prefix string, err error) {
	if err == nil {
		return
	}
	for line := range strings.Lines(oneline.Printable(err.Error())) {
		fmt.Fprintf(w, "%s: %s\n", prefix, strings.TrimSuffix(line, "\n"))
	}
}

// flagConfigFile is the flag for the configuration file, which each program has.
const flagConfigFile = "config-file"

// Program is a command line.
type Program struct {
	Name, Usage, Description string
	Version                  string // what "version" prints, in one line

	Flags []cli.Flag                  // of the program; the verbs accept them, too
	Verbs []Verb                      // beside version, help and completion
	Serve func(context.Context) error // what the program does without a verb; nil = a verb is required

	UnknownFlag func(name string) error                         // the error for a flag that the program does not have; nil = a common one. The function may be nil
	Values      func(context.Context, cli.Flag) []Candidate     // of a flag, for completion; may be nil
	Arguments   func(context.Context, *cli.Command) []Candidate // of a verb, for completion; may be nil

	Stdout, Stderr io.Writer

	typed string // when it is called for completion: the last word of the command line that the shell has passed
}

// Verb is a command that an operator gives.
type Verb struct {
	Name, Usage string
	ArgsUsage   string // "" = it has none
	MaxArgs     int
	Flags       []cli.Flag
	Do          func(context.Context, *cli.Command) error
}

// Text is a flag with a text as its value.
func Text(name, usage string) cli.Flag { return &cli.StringFlag{Name: name, Usage: usage} }

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

func (p Program) command() *cli.Command {
	setHelpPrinter()
	root := &cli.Command{
		Name: p.Name, Usage: p.Usage, Description: p.Description, Flags: p.Flags, HideHelpCommand: true,
		Writer: p.Stdout, ErrWriter: p.Stderr,
		EnableShellCompletion: true, ConfigureShellCompletionCommand: p.completionVerb, ShellComplete: p.complete,
		OnUsageError: p.usageError, ExitErrHandler: func(context.Context, *cli.Command, error) {},
	}
	for _, v := range append(slices.Clone(p.Verbs), p.versionVerb(), helpVerb) {
		root.Commands = append(root.Commands, p.newCommand(v))
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

func (p Program) newCommand(v Verb) *cli.Command {
	return &cli.Command{
		Name: v.Name, Usage: v.Usage, ArgsUsage: v.ArgsUsage, Flags: v.Flags, OnUsageError: p.usageError, HideHelpCommand: true,
		ShellComplete: p.complete,
		Action: func(ctx context.Context, c *cli.Command) error {
			if c.Args().Len() > v.MaxArgs {
				return Usagef("%s: unexpected argument %q: see %s %[1]s --help", v.Name, c.Args().Get(v.MaxArgs), p.Name)
			}
			return v.Do(ctx, c)
		},
	}
}

func (p Program) versionVerb() Verb {
	return Verb{Name: "version", Usage: "print the version", Do: func(context.Context, *cli.Command) error {
		_, err := fmt.Fprintln(p.Stdout, p.Version)
		return err
	}}
}

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
		return Usagef("--%s = %s: %s", value[2], value[1], wantedBy(Find(c, "--"+value[2])))
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
	if p.UnknownFlag != nil {
		if err := p.UnknownFlag(name); err != nil {
			return err
		}
	}
	if near, ok := document.Near(name, names); ok {
		return Usagef("unknown flag --%s: did you mean --%s?", name, near)
	}
	return Usagef("unknown flag --%s: see %s --help", name, strings.TrimSpace(c.FullName()))
}
