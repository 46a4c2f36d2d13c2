package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestValidate(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "--config-file=" + path
	}
	for name, c := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string // what they end with, without the folder
	}{
		"good":     {[]string{"validate", write("policy: {rules: [{select: {index: 0}, use: reserved}]}\n")}, 0, "MIG strategy: none\nc.yaml:1: policy.rules[0].select: not offered: reserved by c.yaml:1\nno problem\n", ""},
		"notes":    {[]string{"--fail-on-init-error", "validate"}, 0, "--fail-on-init-error has no effect: without a driver this agent waits for one\nMIG strategy: none\nno problem\n", ""},
		"bad":      {[]string{"validate", write("policy: {rules: [{use: reserved}, {select: {index: -}}]}\nsharing: 1\n")}, 1, "", "c.yaml:1: policy.rules[0].select = \"\": want a selector such as {index: 0}, or {model: \"*\"} for every device\nc.yaml:1: policy.rules[1].select.index = \"-\": want the number of a GPU, a range or GPU:instance, up to 255: 0, \"2-4\" or \"0:1\"\nc.yaml:2: sharing = \"1\": want a mapping with timeSlicing or mps\n"},
		"argument": {[]string{"validate", strings.TrimPrefix(write("version: v1\n"), "--config-file=")}, 0, "MIG strategy: none\nno problem\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr strings.Builder
			cmd := exec.CommandContext(t.Context(), binary(t), c.args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the code says it
			said := strings.ReplaceAll(stderr.String(), "k8s-gpu: ", "")
			if _, file, ok := strings.Cut(strings.Join(c.args, " "), "--config-file="); ok {
				said = strings.ReplaceAll(said, filepath.Dir(file)+"/", "")
			}
			if code := cmd.ProcessState.ExitCode(); code != c.code || stdout.String() != c.stdout || said != c.stderr {
				t.Errorf("%d %q %q\nwant %d %q %q", code, stdout.String(), said, c.code, c.stdout, c.stderr)
			}
		})
	}
}

// A changed policy is adopted, and what it leaves as it is is not disturbed; a bad one changes nothing.
func TestReloadChangesShares(t *testing.T) {
	t.Parallel()
	m, k, dir, c := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir)...)
	a.awaitHealthy(k, 8)
	a.said("msg=registered")
	const shares = header + `policy:
  rules:
    - {select: {index: "0-2"}, use: time-slicing, replicas: 4}
    - {select: {index: 7}, for: nomad}
`
	a.reload(c, shares, adopted+`" changed="policy.exclude or policy.rules`)
	a.awaitHealthy(k, 4)
	const shared = "nvidia.com/gpu.shared"
	if err := k.Await(a.ctx, "shares", func() bool { _, healthy := k.Capacity(shared); return healthy == 12 }); err != nil {
		t.Fatal(err)
	}
	r, err := k.Allocate(a.ctx, shared, m.UUID(0)+"::0", m.UUID(0)+"::3")
	if err != nil || r.GetEnvs()[inventory.VisibleDevices] != m.UUID(0) {
		t.Errorf("%v, %v", r, err)
	}
	a.reload(c, "# as before\n"+shares, unchanged)
	a.reload(c, strings.Replace(shares, "replicas: 4", "replicas: 1", 1), notReloaded)
	a.said(`level=ERROR msg="configuration not reloaded" problem=".*config.yaml:4: policy.rules\[0\].replicas = .*1.*: want 2 or more`)
	if all, healthy := k.Capacity(shared); all != 12 || healthy != 12 {
		t.Errorf("%d shares, %d of them healthy", all, healthy)
	}
	if n := len(k.Registrations()); n != 2 {
		t.Errorf("%d registrations of two resources", n)
	}
	says(t, dir, "left to nomad by config.yaml:5", "inspect")
	a.endsWith(syscall.SIGTERM, k, dir, false)
}
