package main

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The warnings of a configuration file are logged once for each text of the file.
func TestWarningsAreLoggedOncePerFile(t *testing.T) {
	var text strings.Builder
	log := slog.New(slog.NewTextHandler(&text, nil))
	r := newReloader(&runner{}, nil, nil, nil)
	one, two := []string{"c.yaml:1: a", "c.yaml:2: b"}, []string{"c.yaml:9: c"}
	for _, step := range []struct {
		name    string
		s       settings
		a, b, c int // how often each was logged so far
	}{
		{"at the start", withFile("one", one), 1, 1, 0},
		{"the same file", withFile("one", one), 1, 1, 0},
		{"another text with the same meaning", withFile("# one", one), 2, 2, 0},
		{"another file", withFile("two", two), 2, 2, 1},
	} {
		r.Announce(step.s, log)
		count := func(of string) int { return strings.Count(text.String(), `warning="`+of) }
		if count("c.yaml:1: a") != step.a || count("c.yaml:2: b") != step.b || count("c.yaml:9: c") != step.c {
			t.Errorf("%s:\n%s", step.name, text.String())
		}
	}
}

// withFile are settings by a file with that text and those warnings.
func withFile(text string, warnings []string) (s settings) {
	s.File.Text, s.File.Warnings = text, warnings
	return s
}

const moved = `version: v1
resources:
  gpus: [{pattern: "*H100*", name: h100}]
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/h100
      rename: nvidia.com/shared-h100
      devices: [0, 1, 2]
      replicas: 2
`

// The three fields that NVIDIA's plugin ignores are named by "validate", with exit code 0, and by the agent.
func TestAFileThatMovesOverIsWarnedOf(t *testing.T) {
	t.Parallel()
	fields := []string{":3: resources.gpus: ", ":8: sharing.timeSlicing.resources[0].rename: ", ":9: sharing.timeSlicing.resources[0].devices: "}
	path := filepath.Join(t.TempDir(), "moved.yaml")
	if err := os.WriteFile(path, []byte(moved), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), binary(t), "validate", "--config-file="+path).Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, field := range fields {
		if strings.Count(string(out), "warning: "+path+field+"NVIDIA's k8s-device-plugin ignores this field") != 1 {
			t.Errorf("%s in:\n%s", field, out)
		}
	}
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	a := start(t, append(on(m.Root, k), "--config-file="+path, "--state-dir="+dir)...)
	for resource, n := range map[string]int{"nvidia.com/h100": 5, "nvidia.com/shared-h100": 6} {
		if err := k.AwaitHealthy(a.ctx, resource, n); err != nil {
			t.Error(err)
		}
	}
	for _, field := range fields {
		a.said(`level=WARN msg="configuration differs in effect .*` + strings.NewReplacer("[", `\[`, "]", `\]`).Replace(field))
	}
	a.endsWith(syscall.SIGTERM, k, dir, false)
}
