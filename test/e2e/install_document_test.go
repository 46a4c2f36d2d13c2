//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/docs/markdown"
)

// documentChange is a text of a document in whose place a test has another one, and why.
type documentChange struct{ old, new, why string }

// documentChanges are all that is changed in what docs/install.md has before it is run.
var documentChanges = []documentChange{
	{"      driver = \"docker\"\n      config {\n        image   = \"nvidia/cuda:12.8.1-base-ubuntu24.04\"\n        command = \"nvidia-smi\"\n        args    = [\"-L\"]\n      }\n",
		"      driver = \"exec\"\n      config {\n        command = \"/bin/busybox\"\n        args = [\"sh\", \"-c\", \"env; exec sleep 1000000\"]\n      }\n",
		"there is no registry"},
	{"      image: nvidia/cuda:12.8.1-base-ubuntu24.04\n      command: [nvidia-smi, -L]\n",
		"      image: localhost/busybox:1\n      command: [sh, -c, 'trap exit TERM; echo my GPUs are $NVIDIA_VISIBLE_DEVICES; sleep 1000000 & wait']\n",
		"there is no registry"},
	{"registry.example.com/", "127.0.0.1:5000/", "a registry of the test"},
}

// installDocument is docs/install.md.
type installDocument struct {
	markdown.Document
	used map[int]bool // lines at which blocks begin
}

func readInstallDocument(t *testing.T) installDocument {
	t.Helper()
	text, err := os.ReadFile("../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	return installDocument{markdown.Parse(string(text)), map[int]bool{}}
}

// block returns the block of this language below a heading, the first one or a later one, with the documentChanges.
func (d installDocument) block(t *testing.T, section, language string, which int) string {
	t.Helper()
	for _, b := range d.Blocks {
		if b.Section != section || b.Language != language {
			continue
		}
		if which--; which < 0 {
			d.used[b.Line] = true
			for _, r := range documentChanges {
				b.Text = strings.ReplaceAll(b.Text, r.old, r.new)
			}
			return b.Text
		}
	}
	t.Fatalf("docs/install.md has no such block of %s below #%s", language, section)
	return ""
}

// checkUsed fails if a script below a heading that begins so was not run.
func (d installDocument) checkUsed(t *testing.T, sections ...string) {
	t.Helper()
	for _, b := range d.Blocks {
		begins := func(section string) bool { return strings.HasPrefix(b.Section, section) }
		if b.Language == "sh" && slices.ContainsFunc(sections, begins) && !d.used[b.Line] {
			t.Errorf("docs/install.md:%d: not run:\n%s", b.Line, b.Text)
		}
	}
}

// looks are the commands of documents that only look at something. They are repeated until they show it, as an operator repeats them.
var looks = regexp.MustCompile(`^(nomad node status|nomad-gpu inspect|k8s-gpu inspect|/opt/\S+ inspect|kubectl get|kubectl \S+ \S+ exec|journalctl)`)

// shell runs lines as they are typed on a machine, until one fails.
type shell func(lines string) (string, error)

// must is the shell for what has to work.
func (sh shell) must(t *testing.T, lines string) string {
	t.Helper()
	out, err := sh(lines)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s\n%s", strings.TrimSpace(lines), strings.TrimSpace(out))
	return out
}

// follow runs a script of a document line by line. Those that look at something must show a text in the end.
func (sh shell) follow(t *testing.T, script, shows string) {
	t.Helper()
	for line := range strings.Lines(script) {
		if !looks.MatchString(line) {
			sh.must(t, line)
			continue
		}
		await(t, strings.TrimSpace(line), 60*time.Second, func() error {
			out, err := sh(line)
			if err == nil && !strings.Contains(out, shows) {
				err = fmt.Errorf("want %q in\n%s", shows, out)
			}
			return err
		})
	}
}

// typed runs lines in a folder with these variables. Questions get the answer "y".
func typed(folder string, env []string, argv ...string) shell {
	return func(lines string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, argv[0], append(argv[1:], "/bin/bash", "-ec", "cd "+folder+"\n"+lines)...)
		cmd.Env = append(os.Environ(), env...)
		cmd.Stdin = strings.NewReader(strings.Repeat("y\n", 9))
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w\n%s", lines, err, out)
		}
		return string(out), err
	}
}
