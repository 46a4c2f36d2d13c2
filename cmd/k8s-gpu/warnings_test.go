package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What a file means otherwise than to NVIDIA's plugin is logged at the start and when the file has changed, and not with
// every HUP or life.
func TestWarningsAreLoggedOncePerFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		s.written.File.Text, s.written.File.Warnings = "one", []string{"c.yaml:1: a", "c.yaml:2: b"}
		count := func(of string) int { return strings.Count(s.said.String(), `warning="`+of) }
		expect := func(when string, a, b, c int) {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			if count("c.yaml:1: a") != a || count("c.yaml:2: b") != b || count("c.yaml:9: c") != c {
				t.Errorf("%s:\n%s", when, &s.said)
			}
		}
		_, err := s.play(t, func() {
			expect("at the start", 1, 1, 0)
			s.change(func(*settings) {}, nil)
			expect("the same file", 1, 1, 0)
			s.write("another", nil) // by the environment
			expect("another life", 1, 1, 0)
			s.change(func(now *settings) { now.File.Text = "# one" }, nil)
			expect("another file that means the same", 2, 2, 0)
			s.change(func(now *settings) { now.File.Text, now.File.Warnings = "two", []string{"c.yaml:9: c"} }, os.ErrInvalid)
			expect("a bad file", 2, 2, 0)
			s.change(func(*settings) {}, nil)
			expect("which is good now", 2, 2, 1)
		})
		if err != nil {
			t.Error(err)
		}
	})
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
