package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v3"
)

// A page of help fits terminals of helpWidth columns. A name with more than nameWidth columns has a line of its own.
const (
	helpWidth = 100
	nameWidth = 26
)

// setHelpPrinter gives the library, which has one printer for all programs of a process, that of this package.
var setHelpPrinter = sync.OnceFunc(func() {
	cli.HelpPrinter = func(w io.Writer, _ string, command any) {
		if c, ok := command.(*cli.Command); ok {
			writeHelp(w, c)
		}
	}
})

// writeHelp prints the help of a command: its own flags, not those of the program.
func writeHelp(w io.Writer, c *cli.Command) {
	h := page{w: w}
	root := c.Root()
	name := c.Name
	if c != root {
		name = root.Name + " " + strings.TrimPrefix(c.FullName(), root.Name+" ")
	}
	h.section("NAME")
	h.paragraph("   " + name + " - " + c.Usage)
	h.section("USAGE")
	if c == root {
		h.paragraph("   " + name + " [flags] [command [flags]]")
		h.section("DESCRIPTION")
		for line := range strings.Lines(c.Description) {
			h.paragraph("   " + strings.TrimSuffix(line, "\n"))
		}
	} else {
		h.paragraph("   " + strings.TrimSpace(name+" [flags] "+c.ArgsUsage))
	}
	h.commands(c.Commands)
	h.flags(c.Flags)
	if c != root {
		h.printf("\nThe program's flags, such as --%s, can be given, too: see %s help\n", flagConfigFile, root.Name)
	}
}

// page is a page of help.
type page struct {
	w       io.Writer
	started bool
}

func (h *page) printf(format string, args ...any) { fmt.Fprintf(h.w, format, args...) }

func (h *page) section(title string) {
	if h.started {
		h.printf("\n")
	}
	h.started = true
	h.printf("%s:\n", title)
}

// columns is a line of a table: a name, and after two spaces or more what it means.
var columns = regexp.MustCompile(`^ *\S+( \S+)* {2,}`)

// paragraph prints a line, divided where it is too long. The rest is indented as the line is, or as the second column of a table.
func (h *page) paragraph(line string) {
	head := columns.FindString(line)
	if head == "" {
		head = line[:len(line)-len(strings.TrimLeft(line, " "))]
	}
	lines := wrap(line[len(head):], helpWidth-len(head))
	if len(lines) == 0 {
		h.printf("\n")
	}
	for _, text := range lines {
		h.printf("%s%s\n", head, text)
		head = strings.Repeat(" ", len(head))
	}
}

// row prints a name and, in a second column, what it means.
func (h *page) row(name, usage string) {
	lines := wrap(usage, helpWidth-nameWidth-5)
	if len(name) > nameWidth {
		h.printf("   %s\n", name)
	} else if len(lines) > 0 {
		h.printf("   %-*s  %s\n", nameWidth, name, lines[0])
		lines = lines[1:]
	}
	for _, line := range lines {
		h.printf("   %-*s  %s\n", nameWidth, "", line)
	}
}

func (h *page) commands(commands []*cli.Command) {
	shown := slices.DeleteFunc(slices.Clone(commands), func(c *cli.Command) bool { return c.Hidden })
	if len(shown) == 0 {
		return
	}
	h.section("COMMANDS")
	for _, c := range shown {
		h.row(c.Name, c.Usage)
	}
}

func (h *page) flags(flags []cli.Flag) {
	h.section("FLAGS")
	for _, f := range flags {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		name, usage := flagHelp(f)
		h.row(name, usage)
	}
}

// flagHelp is a flag with its aliases and the form of its value, and what it means with its default.
func flagHelp(f cli.Flag) (name, usage string) {
	for i, n := range f.Names() {
		if i > 0 {
			name += ", "
		}
		name += strings.Repeat("-", min(len(n), 2)) + n
	}
	d, ok := f.(cli.DocGenerationFlag)
	if !ok {
		return name, ""
	}
	usage = d.GetUsage()
	byDefault := defaultOf(f)
	switch {
	case IsBool(f) && byDefault == "true":
		name += "[=false]"
	case !IsBool(f):
		name += " " + valueForm(f)
	}
	if byDefault != "" && (byDefault != "false" || !IsBool(f)) {
		usage += " (default: " + byDefault + ")"
	}
	return name, usage
}

// defaultOf is the default of a flag as text; "" = none.
func defaultOf(f cli.Flag) string {
	switch f := f.(type) {
	case *cli.GenericFlag: // of the program: its value is that of the command line
		return f.DefaultText
	case *cli.BoolFlag:
		return fmt.Sprint(f.Value)
	case *cli.DurationFlag:
		if f.Value != 0 {
			return f.Value.String()
		}
	case *cli.StringFlag:
		return f.Value
	}
	return ""
}

// valueForm is what a flag's value looks like.
func valueForm(f cli.Flag) string {
	switch f := f.(type) {
	case *cli.DurationFlag:
		return "DURATION"
	case *cli.IntFlag:
		return "NUMBER"
	case *cli.StringFlag:
		return cmp.Or(f.DefaultText, "TEXT")
	}
	return "VALUE"
}

// wrap divides a text into lines of at most width columns, between words.
func wrap(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) > width:
			lines, line = append(lines, line), word
		default:
			line += " " + word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// wantedBy is the remedy for a value that a flag of a command can't have; those of the agent accept any text.
func wantedBy(f cli.Flag) string {
	switch {
	case f == nil:
		return "see its help"
	case IsBool(f):
		return "want true or false"
	}
	if f, ok := f.(*cli.DurationFlag); ok {
		return "want a duration such as " + cmp.Or(f.Value, time.Minute).String()
	}
	return "want a whole number"
}

// IsBool reports whether a flag needs no value.
func IsBool(f cli.Flag) bool {
	switch f := f.(type) {
	case *cli.BoolFlag:
		return true
	case *cli.GenericFlag:
		v, ok := f.Value.(interface{ IsBoolFlag() bool })
		return ok && v.IsBoolFlag()
	}
	return false
}

var helpVerb = Verb{Name: "help", Usage: "print this, or the help of a command", ArgsUsage: "[COMMAND]", MaxArgs: 1, Do: help}

func help(ctx context.Context, c *cli.Command) error {
	name := c.Args().First()
	if name == "" {
		return cli.ShowRootCommandHelp(c)
	}
	if c.Root().Command(name) == nil {
		return unknownCommand(c.Root(), name)
	}
	return cli.ShowCommandHelp(ctx, c.Root(), name)
}
