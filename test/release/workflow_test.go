package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// workflow is what these tests read of a hosted workflow.
type workflow struct {
	On          map[string]any    `yaml:"on"`
	Permissions map[string]string `yaml:"permissions"`
	Jobs        map[string]struct {
		Needs       any               `yaml:"needs"` // a name, or several
		Permissions map[string]string `yaml:"permissions"`
		Timeout     int               `yaml:"timeout-minutes"`
		Container   struct{ Image, Options string }
		Defaults    struct{ Run struct{ Shell string } }
		Steps       []struct{ Uses, Run string }
	}
}

// allowed are the permissions to write, by file and job.
var allowed = map[string]map[string]map[string]string{
	"release.yml": {"sign": {"packages": "write", "id-token": "write"}, "publish": {"contents": "write"}},
	"ci.yml":      {},
}

var (
	pinned   = regexp.MustCompile(`^[\w.-]+/[\w./-]+@[0-9a-f]{40}$`)
	digested = regexp.MustCompile(`^docker\.io/library/debian:12@sha256:[0-9a-f]{64}$`)
	useLine  = regexp.MustCompile(`(?m)^\s*(?:- )?uses: (.*)$`)
	versions = regexp.MustCompile(`^\S+ # v\d+\.\d+\.\d+$`)
	// What builds or tests, and with it all that it links or runs.
	builds = regexp.MustCompile(`\bmake \w|\bgo (build|generate|run|test|vet)\b|\.ci/|(^|\s)test/`)
	// Commands of the repository in a step: "make TARGET", a script by its path.
	makeUse   = regexp.MustCompile(`\bmake ([a-z][a-z0-9-]*)`)
	scriptUse = regexp.MustCompile(`(?:^|[\s(])((?:\.ci|tools|test)/[\w./-]+)`)
)

// Actions are pinned by commit, the system of a job by digest, a job has no permission that it does not need, one that may write builds and tests
// nothing, and each command of a step exists.
func TestWorkflows(t *testing.T) {
	files, err := filepath.Glob(root + ".github/workflows/*.yml")
	if err != nil || len(files) != len(allowed) {
		t.Fatalf("workflows %q (%v), want %d", files, err, len(allowed))
	}
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			text := read(t, path)
			var w workflow
			if err := yaml.Unmarshal([]byte(text), &w); err != nil {
				t.Fatal(err)
			}
			if len(w.Permissions) != 1 || w.Permissions["contents"] != "read" {
				t.Errorf("permissions %v of the workflow, want contents: read alone", w.Permissions)
			}
			for _, line := range useLine.FindAllStringSubmatch(text, -1) {
				if !versions.MatchString(line[1]) {
					t.Errorf("uses: %s has no comment with the version", line[1])
				}
			}
			checkJobs(t, w, allowed[filepath.Base(path)])
		})
	}
}

func checkJobs(t *testing.T, w workflow, allowed map[string]map[string]string) {
	t.Helper()
	steps := 0
	for name, job := range w.Jobs {
		writes := false
		for permission, level := range job.Permissions {
			if level == "read" {
				continue
			}
			if writes = true; allowed[name][permission] != level {
				t.Errorf("job %s has the permission %s: %s", name, permission, level)
			}
		}
		if writes && (job.Needs == nil || job.Container.Options != "") {
			t.Errorf("job %s may write, and begins before another has tested, or in a container with %q", name, job.Container.Options)
		}
		if job.Timeout == 0 {
			t.Errorf("job %s has no timeout-minutes", name)
		}
		if !digested.MatchString(job.Container.Image) || job.Defaults.Run.Shell != "bash" {
			t.Errorf("job %s runs in %q with the shell %q, want Debian 12 by its digest and bash", name, job.Container.Image, job.Defaults.Run.Shell)
		}
		for _, step := range job.Steps {
			steps++
			if writes && builds.MatchString(step.Run) {
				t.Errorf("job %s may write, and builds or tests: %s", name, step.Run)
			}
			if step.Uses != "" && !pinned.MatchString(step.Uses) {
				t.Errorf("job %s: uses: %s is not pinned by its commit", name, step.Uses)
			}
			if strings.Contains(step.Run, "${{") {
				t.Errorf("job %s: an expression in a script is replaced before the shell reads it; pass it by env: %s", name, step.Run)
			}
			checkCommands(t, step.Run)
		}
	}
	if steps < 2 {
		t.Errorf("%d steps", steps)
	}
}

// checkCommands compares the commands of a step with the Makefile and the files of the repository.
func checkCommands(t *testing.T, script string) {
	t.Helper()
	for _, m := range makeUse.FindAllStringSubmatch(script, -1) {
		if !strings.Contains(read(t, root+"Makefile"), "\n"+m[1]+":") {
			t.Errorf("make %s: the Makefile has no such target", m[1])
		}
	}
	for _, m := range scriptUse.FindAllStringSubmatch(script, -1) {
		info, err := os.Stat(root + m[1])
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			t.Errorf("%s: not a program of the repository (%v)", m[1], err)
		}
	}
	check := exec.CommandContext(t.Context(), "bash", "-n")
	check.Stdin = strings.NewReader(script)
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v: %s: %s", err, out, script)
	}
}

// What the workflow releases is what the tag names.
func TestReleaseIsThatOfItsTag(t *testing.T) {
	for _, c := range []struct {
		tag string
		ok  bool
	}{{"v" + makeVersion(t), true}, {makeVersion(t), false}, {"v0.0.1", false}, {"", false}} {
		out, err := exec.CommandContext(t.Context(), root+"tools/release/tag", c.tag).CombinedOutput()
		if (err == nil) != c.ok {
			t.Errorf("tools/release/tag %q: %v, %s", c.tag, err, out)
		}
	}
}
