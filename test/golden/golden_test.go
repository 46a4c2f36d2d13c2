// Package golden compares what operators and orchestrators get from the built agents with files: help texts, errors,
// verbs, HTTP pages, metrics, logs, the device plugin API, the Nomad device API and the health history on disk.
//
// The command "go test ./test/golden -update" writes testdata/*.golden; "git diff" then lists what changed. The folders
// testdata/state-* are state directories that -save-state writes: -update does not touch them.
package golden

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

var (
	save = flag.Bool("save-state", false, "write testdata/state-*, the state directories of this version")
)

const (
	k8sGPU   = "k8s-gpu"
	nomadGPU = "nomad-gpu"
	timeout  = 60 * time.Second // for each step of a test, also on a busy machine
)

// bin is the folder of the built agents.
var bin string

func TestMain(m *testing.M) {
	check.Parallel(12)
	os.Exit(func() int {
		dir, err := binaries.Dir()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		bin = dir
		return m.Run()
	}())
}

// compare checks one topic against its file, or writes the file.
func compare(t *testing.T, topic, got string) {
	t.Helper()
	if t.Failed() {
		return
	}
	goldenfile.Compare(t, filepath.Join("testdata", topic+".golden"), got)
}

// pages collects the sections of the topics; tests that run in parallel add to it.
type pages struct {
	mu       sync.Mutex
	sections map[string]map[string]string // by topic and title
}

func (p *pages) add(topic, title, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sections == nil {
		p.sections = map[string]map[string]string{}
	}
	if p.sections[topic] == nil {
		p.sections[topic] = map[string]string{}
	}
	p.sections[topic][title] = strings.TrimRight(text, "\n") + "\n"
}

// compare compares all topics; the sections of a topic are in the order of titles.
func (p *pages) compare(t *testing.T, titles []string) {
	t.Helper()
	for topic, sections := range p.sections {
		var all strings.Builder
		for _, title := range titles {
			if text, ok := sections[title]; ok {
				fmt.Fprintf(&all, "======== %s\n%s\n", title, text)
			}
		}
		compare(t, topic, all.String())
	}
}

// What differs between two runs, with what stands for it.
var variable = []struct {
	pattern *regexp.Regexp
	mask    string
}{
	{regexp.MustCompile(`\b20\d\d-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)`), "TIME"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "127.0.0.1:PORT"},
	{regexp.MustCompile(`\bplugin\d+`), "pluginN"},
	{regexp.MustCompile(`(nomad-gpu-)\d+`), "${1}PID"},
	{regexp.MustCompile(`-[0-9a-f]{8}-(\d+\.sock)`), "-RUN-$1"},
	{regexp.MustCompile(`\bgo1\.\d+(\.\d+)?\b`), "goVERSION"},
	{regexp.MustCompile(`\bpid[ =:"]+\d+`), "pid PID"},
	{regexp.MustCompile(`\buid[ =:"]+\d+`), "uid UID"},
	{regexp.MustCompile(`agent \d+, begun at \d+, boot [0-9a-f-]+`), "agent PID, begun at TICKS, boot ID"},
}

// masked is text without what differs between two runs.
func masked(dir, text string) string {
	text = strings.NewReplacer(dir, "$DIR", os.TempDir()+"/", "$TMP/").Replace(text)
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.mask)
	}
	return text
}

// counted sorts lines and writes equal ones once, with their number where it is more than one.
func counted(lines []string) string {
	slices.Sort(lines)
	var out strings.Builder
	for i := 0; i < len(lines); {
		n := 1
		for i+n < len(lines) && lines[i+n] == lines[i] {
			n++
		}
		fmt.Fprint(&out, lines[i])
		if n > 1 {
			fmt.Fprintf(&out, "  (%d times)", n)
		}
		fmt.Fprintln(&out)
		i += n
	}
	return out.String()
}

// transcript runs a command and returns it as typed, with its output and its exit code.
func transcript(ctx context.Context, dir, name string, args ...string) string {
	cmd := exec.CommandContext(ctx, filepath.Join(bin, name), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		out = fmt.Appendln(out, err)
	}
	text := fmt.Sprintf("$ %s %s\n%s", name, strings.Join(args, " "), out)
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		text += fmt.Sprintf("exit code %d\n", code)
	}
	return masked(dir, text)
}

var must = check.NoError
