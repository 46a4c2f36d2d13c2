package cli

import (
	"context"
	_ "embed" // the scripts
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"
)

// completeWord is the first argument with which a script calls the program: __complete WORD... CURRENT. It prints the words that CURRENT
// can become, one a line, each with a tab and what it means.
const completeWord = "__complete"

// The scripts. $PROGRAM is the name of the program, $FUNCTION a name for functions of the shell.
var (
	//go:embed completion.bash
	bashScript string
	//go:embed completion.zsh
	zshScript string
	//go:embed completion.fish
	fishScript string
)

var shells = []string{"bash", "zsh", "fish"}

func (p Program) completionVerb() verb {
	return verb{name: "completion", usage: "print the completion script of a shell: source <(" + p.Name + " completion bash)", argsUsage: "bash|zsh|fish", maxArgs: 1,
		do: func(_ context.Context, c *cli.Command) error {
			script, ok := map[string]string{"bash": bashScript, "zsh": zshScript, "fish": fishScript}[c.Args().First()]
			if !ok {
				return Usagef("completion: want %s", strings.Join(shells, ", "))
			}
			function := strings.Map(func(r rune) rune {
				if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
					return r
				}
				return '_'
			}, p.Name)
			_, err := fmt.Fprint(p.Stdout, strings.NewReplacer("$PROGRAM", p.Name, "$FUNCTION", "_"+function).Replace(script))
			return err
		}}
}

// candidate is a word that can be written, and what it means.
type candidate struct{ word, usage string }

// complete prints what the last of the words can become. It reports no error: it is called while a person writes.
func (p Program) complete(ctx context.Context, words []string) error {
	if len(words) == 0 {
		return nil
	}
	line := commandLine{Program: p, root: p.command()}
	line.command = line.root
	for _, w := range words[:len(words)-1] {
		line.add(w)
	}
	for _, c := range line.candidates(ctx, words[len(words)-1]) {
		fmt.Fprintf(p.Stdout, "%s\t%s\n", c.word, c.usage)
	}
	return nil
}

// commandLine is a command line as far as it is written.
type commandLine struct {
	Program
	root, command *cli.Command
	flag          cli.Flag // that the next word is the value of; nil = none
	args          []string // of the command
}

// add reads one word.
func (l *commandLine) add(w string) {
	switch name, value, given := strings.Cut(strings.TrimLeft(w, "-"), "="); {
	case l.flag != nil:
		setFlag(l.flag, w)
		l.flag = nil
	case strings.HasPrefix(w, "-"):
		if f := l.find(name); f != nil && given {
			setFlag(f, value)
		} else if f != nil && takesValue(f) {
			l.flag = f
		}
	case l.command == l.root && len(l.args) == 0 && l.root.Command(w) != nil:
		l.command = l.root.Command(w)
	default:
		l.args = append(l.args, w)
	}
}

// setFlag sets a flag of the agent, so that the agent is found whose candidates are wanted.
func setFlag(f cli.Flag, value string) {
	if g, ok := f.(*cli.GenericFlag); ok {
		_ = g.Value.Set(value)
	}
}

// flags are those that can be given here.
func (l *commandLine) flags() []cli.Flag {
	if l.command == l.root {
		return l.root.Flags
	}
	return append(append([]cli.Flag{}, l.command.Flags...), l.root.Flags...)
}

func (l *commandLine) find(name string) cli.Flag {
	for _, f := range l.flags() {
		for _, n := range f.Names() {
			if n == name {
				return f
			}
		}
	}
	return nil
}

func takesValue(f cli.Flag) bool {
	switch f := f.(type) {
	case *cli.BoolFlag:
		return false
	case *cli.GenericFlag:
		b, ok := f.Value.(interface{ IsBoolFlag() bool })
		return !ok || !b.IsBoolFlag()
	}
	return true
}

// candidates are what a word can become.
func (l *commandLine) candidates(ctx context.Context, current string) (all []candidate) {
	add := func(prefix string, from []candidate) {
		for _, c := range from {
			if strings.HasPrefix(strings.ToLower(prefix+c.word), strings.ToLower(current)) {
				all = append(all, candidate{prefix + c.word, oneLineOf(c.usage)})
			}
		}
	}
	name, value, given := strings.Cut(strings.TrimLeft(current, "-"), "=")
	switch {
	case l.flag != nil:
		add("", l.values(ctx, l.flag, current))
	case strings.HasPrefix(current, "-") && given:
		if f := l.find(name); f != nil {
			add(current[:len(current)-len(value)], l.values(ctx, f, value))
		}
	case strings.HasPrefix(current, "-"):
		add("", l.flagNames())
	case l.command == l.root && len(l.args) == 0:
		for _, c := range l.root.Commands {
			add("", []candidate{{c.Name, c.Usage}})
		}
	default:
		add("", l.arguments(ctx, current))
	}
	return all
}

func oneLineOf(text string) string { return strings.Join(strings.Fields(text), " ") }

func (l *commandLine) flagNames() (names []candidate) {
	for _, f := range l.flags() {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		usage := ""
		if d, ok := f.(cli.DocGenerationFlag); ok {
			usage = d.GetUsage()
		}
		names = append(names, candidate{"--" + f.Names()[0], usage})
	}
	return append(names, candidate{"--help", "show the help"})
}
