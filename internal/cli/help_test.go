package cli_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Each command of both programs has a page of help with at most 100 columns, with its own flags and not those of the program, under the
// program's own name; what it does not understand is one line with that name, key, value and remedy.
func TestHelpOfEachCommand(t *testing.T) {
	t.Parallel()
	for _, program := range programs {
		page := helpOf(t, program)
		own := flagsOf(page)
		if len(own) < 10 || !slices.Contains(own, "--config-file VALUE") && !slices.Contains(own, "--config-file, --policy-file VALUE") {
			t.Errorf("%s has the flags %q", program, own)
		}
		commands := section(page, "COMMANDS")
		if len(commands) < 18 {
			t.Errorf("%s has the commands %q", program, commands)
		}
		for _, command := range commands {
			t.Run(program+"/"+command, func(t *testing.T) {
				t.Parallel()
				checkCommand(t, program, command, own)
			})
		}
	}
}

func checkCommand(t *testing.T, program, command string, programFlags []string) {
	page := helpOf(t, program, command)
	if !strings.HasPrefix(page, "NAME:\n   "+program+" "+command+" - ") || !strings.Contains(page, "\nUSAGE:\n   "+program+" "+command+" ") {
		t.Errorf("the page has another name:\n%s", page)
	}
	if code, text, _ := run(t, program, "help", command); code != 0 || text != page {
		t.Errorf("help %s: exit code %d, and another page:\n%s", command, code, text)
	}
	flags := flagsOf(page)
	if !slices.Contains(flags, "--help, -h") {
		t.Errorf("no flag --help: %q", flags)
	}
	wrong := []string{"--nothing"}
	for _, flag := range flags {
		name, value, _ := strings.Cut(flag, " ")
		switch {
		case flag != "--help, -h" && slices.Contains(programFlags, flag):
			t.Errorf("%s is a flag of the program", flag)
		case value == "DURATION", value == "NUMBER":
			wrong = append(wrong, name+"=x")
		case value == "": // a bool
			wrong = append(wrong, strings.TrimSuffix(name, "[=false]")+"=perhaps")
		}
	}
	for _, flag := range wrong {
		code, stdout, stderr := run(t, program, command, flag)
		name, value, _ := strings.Cut(flag, "=")
		line, ok := strings.CutPrefix(stderr, program+": ")
		if code != 2 || stdout != "" || !ok || strings.Count(line, "\n") != 1 || !strings.Contains(line, name) || !strings.Contains(line, value) ||
			!strings.Contains(line, ": want ") && !strings.Contains(line, ": see "+program) && !strings.Contains(line, ": did you mean ") || other(program, line) || raw.MatchString(line) {
			t.Errorf("%s %s: exit code %d, %q, %q", command, flag, code, stdout, stderr)
		}
	}
}

// raw matches errors of Go's packages that do not help an operator.
var raw = regexp.MustCompile(`strconv|invalid syntax|parse error|invalid duration|invalid value`)

// other reports whether a text has the name of the other program.
func other(program, text string) bool {
	return slices.ContainsFunc(programs, func(p string) bool { return p != program && strings.Contains(text, p) })
}

// helpOf is the page of a command; of the program without one.
func helpOf(t *testing.T, program string, command ...string) string {
	t.Helper()
	code, page, stderr := run(t, program, append(command, "--help")...)
	if code != 0 || stderr != "" {
		t.Errorf("%v --help: exit code %d, %s", command, code, stderr)
	}
	for line := range strings.Lines(page) {
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 100 {
			t.Errorf("%v: more than 100 columns: %s", command, line)
		}
	}
	return page
}

// section are the names in the first column of a section.
func section(page, title string) (names []string) {
	_, rest, _ := strings.Cut(page, "\n"+title+":\n")
	rest, _, _ = strings.Cut(rest, "\n\n")
	for line := range strings.Lines(rest) {
		if row, ok := strings.CutPrefix(line, "   "); ok && !strings.HasPrefix(row, " ") {
			name, _, _ := strings.Cut(strings.TrimSpace(row), "  ")
			names = append(names, name)
		}
	}
	return names
}

func flagsOf(page string) []string { return section(page, "FLAGS") }

// A flag that is a bool has no value, and its default is only there if it is true.
func TestBoolsInHelp(t *testing.T) {
	t.Parallel()
	flags := flagsOf(helpOf(t, "k8s-gpu"))
	for _, want := range []string{"--pass-device-specs", "--fail-on-init-error[=false]", "--mig-strategy VALUE"} {
		if !slices.Contains(flags, want) {
			t.Errorf("no %s: %q", want, flags)
		}
	}
	if want := "--extended-resources[=false]"; !slices.Contains(flagsOf(helpOf(t, "k8s-gpu", "classes")), want) {
		t.Errorf("classes has no %s", want)
	}
}
