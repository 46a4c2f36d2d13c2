package cli_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// words are those that a shell offers for a command line: of what the program prints, those that begin as the last word. The shell passes
// that one only if it is a flag.
func words(t *testing.T, program string, line ...string) (all []string) {
	t.Helper()
	args, current := line[:len(line)-1], line[len(line)-1]
	if strings.HasPrefix(current, "-") {
		args = line
	}
	code, out, errs := run(t, program, append(slices.Clone(args), "--generate-shell-completion")...)
	if code != 0 || errs != "" {
		t.Errorf("%v: %d, %s", line, code, errs)
	}
	for l := range strings.Lines(out) {
		if word, _, _ := strings.Cut(strings.TrimSuffix(l, "\n"), ":"); strings.HasPrefix(word, current) {
			all = append(all, word)
		}
	}
	return all
}

// What is offered at each place of a command line; with the devices, pools and causes of the running agent that the line refers to.
func TestComplete(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	state, _ := startAgent(t, m, "--simulation=true")
	if code, _, errs := run(t, "k8s-gpu", "simulate", "xid", "79", "--gpu=3", "--state-dir="+state); code != 0 {
		t.Fatal(errs)
	}
	at, devices := "--state-dir="+state, "0 1 2 3 4 5 6 7"
	for i := range 8 {
		devices += " " + m.UUID(i)
	}
	for _, tc := range []struct {
		line []string
		want string
	}{
		{[]string{"insp"}, "inspect"}, {[]string{"re"}, "resume reload rebind reset reset-server"}, {[]string{"inspect", "--js"}, "--json"}, {[]string{"inspect", "--json", "--mig"}, "--mig-strategy"},
		{[]string{"inspect", "--mig-strategy", "s"}, "single"}, {[]string{"--log-format="}, "--log-format=auto --log-format=text --log-format=json"},
		{[]string{"inspect", "--http-address", ""}, ""}, {[]string{"--xids", ""}, ""}, {[]string{"--kernel-log="}, "--kernel-log=auto --kernel-log=off"},
		{[]string{"--cdi-disable-hooks", "ch"}, "chmod"}, {[]string{"--device-list-strategy", ""}, "auto envvar volume-mounts cdi-annotations cdi-cri"}, {[]string{"--gds-enabled="}, "--gds-enabled=true --gds-enabled=false"},
		{[]string{"cdi", ""}, "list remove"}, {[]string{"cdi", "list", ""}, ""}, {[]string{"completion", "z"}, "zsh"}, {[]string{"help", "simu"}, "simulate"}, {[]string{"simulate", ""}, "xid event"},
		{[]string{"clear", at, "--gpu", ""}, devices}, {[]string{"--state-dir", state, "clear", "--gpu=GPU-94"}, "--gpu=" + m.UUID(3)}, {[]string{"explain", "2", at, "GPU-94"}, m.UUID(3)},
		{[]string{"migrate", "plan", at, ""}, devices}, {[]string{"reset", at, ""}, devices}, {[]string{"reset", at, "0", ""}, ""}, {[]string{"prove-gpu", at, "--gpu", ""}, strings.TrimPrefix(devices, "0 1 2 3 4 5 6 7 ")}, {[]string{"explain", at, "--pool", ""}, "gpu"}, {[]string{"clear", at, "--cause", ""}, "XID_79"},
		{[]string{"migrate", "apply", "--to", ""}, "device-plugin dra nomad"}, {[]string{"migrate", "--json", ""}, "plan apply back"},
		{[]string{"--log-format=text", "insp"}, "inspect"}, {[]string{"explain", at, "--pool=gpu", "7"}, "7"}, {[]string{"inspect", "--lo"}, "--log-level --log-format"},
		// As bash divides words:
		{[]string{"clear", "--state-dir", "=", state, "--gpu", "=", "GPU-94"}, m.UUID(3)}, {[]string{"explain", "0000", ":", "61", ":", "00.0", "--state-dir", "=", state, "--pool", ""}, "gpu"},
		{[]string{"--metrics-address", "=", "127.0.0.1", ":", "80", "insp"}, "inspect"}, {[]string{"--log-format", "=", "t"}, "text"},
		{[]string{"clear", "--state-dir=/nowhere", "--gpu", ""}, ""}, {[]string{"nothing", ""}, ""}, {[]string{""}, strings.Join(words(t, "k8s-gpu", "help", ""), " ")},
	} {
		if got := strings.Join(words(t, "k8s-gpu", tc.line...), " "); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.line, got, tc.want)
		}
	}
	for _, program := range programs {
		for args, want := range map[string]string{
			"": "completion: want bash, zsh, fish", "tcsh": "completion: want bash, zsh, fish", "pwsh": "completion: want bash, zsh, fish",
			"bash --nothing": "unknown flag --nothing: see " + program + " completion bash --help",
		} {
			if code, out, errs := run(t, program, append([]string{"completion"}, strings.Fields(args)...)...); code != 2 || out != "" || errs != program+": "+want+"\n" {
				t.Errorf("%q: %d, %s%s", args, code, out, errs)
			}
		}
	}
	for name, inShell := range map[string]func(*testing.T, string, string){"bash": inBash, "zsh": inZsh, "fish": inFish} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(name); err != nil {
				t.Skip("the shell is not installed: ", err)
			}
			for _, program := range programs {
				inShell(t, program, state)
			}
		})
	}
}

// shellOf returns a shell with an empty home, and the folder of the programs first in its path.
func shellOf(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	home := t.TempDir()
	cmd.Dir = home
	cmd.Env = []string{"PATH=" + filepath.Dir(binaries.Path(t, "k8s-gpu")) + ":" + os.Getenv("PATH"), "HOME=" + home, "TERM=xterm", "PS1=> ", "LC_ALL=C.UTF-8"}
	return cmd
}

// typed writes keys and waits until the shell shows text. It then clears the line.
func (s *screen) typed(t *testing.T, keys, text string) {
	t.Helper()
	from := len(s.shown(0))
	if _, err := s.WriteString(keys); err != nil {
		t.Fatal(err)
	}
	s.await(t, from, text)
	if _, err := s.WriteString("\x15"); err != nil { // Ctrl-U
		t.Fatal(err)
	}
}

// The package bash-completion is not needed; a value is completed after "=", too, which divides words for bash.
func inBash(t *testing.T, program, state string) {
	t.Helper()
	s := openScreen(t, 200, 50, shellOf(t, "bash", "--norc", "--noprofile", "-i"))
	s.typed(t, "bind 'set enable-bracketed-paste off'; source <("+program+" completion bash); echo rea''dy\n", "ready")
	s.typed(t, program+" insp\t", program+" inspect ")
	s.typed(t, program+" inspect --mig-strategy=s\t", "--mig-strategy=single ")
	s.typed(t, program+" cdi \t\t", "remove")
	if program == "k8s-gpu" {
		s.typed(t, program+" explain --state-dir="+state+" --pool=\t", " --pool=gpu ")
		s.typed(t, program+" explain --state-dir "+state+" GPU-94\t", " GPU-94b996fc-")
		s.typed(t, program+" clear --state-dir "+state+" --gpu \t\t", "NVIDIA H100 80GB HBM3 healthy")
		s.typed(t, program+" clear --state-dir="+state+" --gpu=GPU-94\t", "--gpu=GPU-94b996fc-")
	}
}

func inZsh(t *testing.T, program, state string) {
	t.Helper()
	s := openScreen(t, 200, 50, shellOf(t, "zsh", "-f", "-i"))
	s.typed(t, "unsetopt beep; autoload -U compinit; compinit -u -D; source <("+program+" completion zsh); echo rea''dy\n", "ready")
	s.typed(t, program+" insp\t", program+" inspect")
	s.typed(t, program+" inspect --mig-strategy=s\t", "ingle")
	s.typed(t, program+" cdi \t\t", "remove")
	if program == "k8s-gpu" {
		s.typed(t, program+" clear --state-dir="+state+" --gpu \t\t", "NVIDIA H100 80GB HBM3 healthy")
	}
}

func inFish(t *testing.T, program, state string) {
	t.Helper()
	for line, want := range map[string]string{
		"insp": "inspect", "inspect --mig-strategy=s": "--mig-strategy=single", "cdi ": "list", "clear --state-dir=" + state + " --gpu ": "3",
	} {
		if program == "nomad-gpu" && strings.Contains(line, "--gpu") { // Nomad starts it
			continue
		}
		out, err := shellOf(t, "fish", "--no-config", "-c", fmt.Sprintf("%s completion fish | source; complete -C '%s %s'", program, program, line)).CombinedOutput()
		var got []string
		for l := range strings.Lines(string(out)) {
			word, _, _ := strings.Cut(strings.TrimSpace(l), "\t")
			got = append(got, word)
		}
		if err != nil || !slices.Contains(got, want) {
			t.Errorf("%s %s: %v, %s", program, line, err, out)
		}
	}
}
