package command

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"
)

// completeFlag is the last argument with which the library's scripts call the program. The words before it are those of the command line;
// the one at the cursor is only among them if it begins with "-", so what it can become is not known from its beginning.
const completeFlag = "--generate-shell-completion"

// bashWord follows the library's script for bash. That script takes the word at the cursor from the package bash-completion, as if "=" did
// not divide words, although bash replaces only what follows it: with bash's own word --flag=value is completed, and no package is needed.
const bashWord = `
__%s_init_completion() {
  cur="${cur#=}"
}
`

// completionVerb changes the verb that the library adds.
func (p Program) completionVerb(c *cli.Command) {
	c.Hidden, c.HideHelpCommand, c.Description = false, true, ""
	c.Usage = "print the completion script of a shell: source <(" + p.Name + " completion bash)"
	c.Commands = slices.DeleteFunc(c.Commands, func(shell *cli.Command) bool { return shell.Name == "pwsh" })
	for _, shell := range c.Commands {
		shell.OnUsageError = p.usageError
	}
	c.OnUsageError = p.usageError
	c.Action = func(context.Context, *cli.Command) error { return Usagef("completion: want bash, zsh, fish") }
	bash := c.Command("bash")
	script := bash.Action
	bash.Action = func(ctx context.Context, c *cli.Command) error {
		if err := script(ctx, c); err != nil {
			return err
		}
		_, err := fmt.Fprintf(p.Stdout, bashWord, p.Name)
		return err
	}
}

// joinWords joins what bash has divided at "=" and ":", but at the end: there the flag waits for its value.
func joinWords(args []string) (joined []string) {
	divides := func(w string) bool { return w == "=" || w == ":" }
	for i, w := range args {
		switch last := len(args) - 1; {
		case i == last-1 && divides(w):
		case i > 1 && i < last && (divides(w) || divides(args[i-1])):
			joined[len(joined)-1] += w
		default:
			joined = append(joined, w)
		}
	}
	return joined
}

// Candidate is a word that can be written, and what it means. The scripts end the word at the first colon.
type Candidate struct{ Word, Usage string }

// Words are candidates without a meaning.
func Words(all ...string) (candidates []Candidate) {
	for _, w := range all {
		candidates = append(candidates, Candidate{Word: w})
	}
	return candidates
}

// complete prints what the word at the cursor can become. The last word that the shell has passed is that one or the one before it.
func (p Program) complete(ctx context.Context, c *cli.Command) {
	name, value, given := strings.Cut(p.typed, "=")
	f := Find(c, name)
	switch values := p.values(ctx, f); {
	case f == nil && strings.HasPrefix(name, "-"):
		cli.DefaultCompleteWithFlags(ctx, c)
	case f == nil, given && (len(values) == 0 || slices.ContainsFunc(values, func(v Candidate) bool { return v.Word == value })), !given && IsBool(f):
		p.print("", p.arguments(ctx, c))
	case given:
		p.print(name+"=", values)
	default:
		p.print("", values)
	}
}

func (p Program) print(prefix string, candidates []Candidate) {
	for _, c := range candidates {
		line := prefix + c.Word
		if c.Usage != "" {
			line += ":" + c.Usage
		}
		fmt.Fprintln(p.Stdout, line)
	}
}

// Find returns the flag that is written as --name and can be given here; nil if there is none.
func Find(c *cli.Command, written string) cli.Flag {
	name := strings.TrimLeft(written, "-")
	if name == written {
		return nil
	}
	for _, f := range slices.Concat(c.Flags, c.Root().Flags) {
		if slices.Contains(f.Names(), name) {
			return f
		}
	}
	return nil
}

// values are those of a flag; none for a number, a path or a text: shells complete paths themselves.
func (p Program) values(ctx context.Context, f cli.Flag) []Candidate {
	switch {
	case f == nil:
		return nil
	case IsBool(f):
		return Words("true", "false")
	case p.Values == nil:
		return nil
	}
	return p.Values(ctx, f)
}

// arguments are those of a command; of the program, its commands.
func (p Program) arguments(ctx context.Context, c *cli.Command) []Candidate {
	if (c == c.Root() || c.Name == "help") && !c.Args().Present() {
		var all []Candidate
		for _, verb := range c.Root().Commands {
			all = append(all, Candidate{verb.Name, verb.Usage})
		}
		return all
	}
	if p.Arguments == nil || c == c.Root() || c.Name == "help" {
		return nil
	}
	return p.Arguments(ctx, c)
}
