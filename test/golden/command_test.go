package golden

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/agent"
)

// Policy files for validate and for the agents. mixed and broken are also what the scripted run reloads.
const (
	mixed = `version: v1
flags: {migStrategy: mixed}
policy:
  exclude: [{index: 7}]
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2}
    - {select: {index: 1}, use: mps, replicas: 2, name: alone}
    - {select: {index: 2}, use: mps, replicas: 2}
    - {select: {index: 3}, use: reserved}
    - {select: {index: 4}, use: exclusive, name: mine}
    - {select: {index: 5}, for: kubernetes}
    - {select: {index: 6}, for: nomad}
    - {select: {index: 12}, use: exclusive, name: absent}
`
	broken = `version: v1
flags: {migStrategy: mixt}
policy:
  rule: []
  rules:
    - {select: {index: zero}, use: reserved}
    - {select: {index: 1}, use: time-sharing, replica: 2}
    - {select: {index: 2}, use: time-slicing, replicas: 1}
`
	shares = `version: v1
policy:
  rules:
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 2}
`
	injection = `version: v1
policy:
  rules:
    - {select: {index: 0}, name: bare, injection: devices}
    - {select: {index: 1}, use: mps, replicas: 2, injection: [libraries, devices]}
    - {select: {index: 2}, name: podman, for: nomad, injection: cdi}
flags: {mpsRoot: /run/nvidia/mps}
`
	incumbent = `version: v1
flags:
  migStrategy: single
  failOnInitError: false
  plugin: {passDeviceSpecs: true, deviceListStrategy: [envvar], deviceIDStrategy: uuid}
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing:
  timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}
`
)

var files = map[string]string{
	"mixed.yaml": mixed, "broken.yaml": broken, "shares.yaml": shares, "injection.yaml": injection, "incumbent.yaml": incumbent,
	"empty.yaml": "", "v2.yaml": "version: v2\n", "text.yaml": "no: [yaml\n",
	"clash.yaml": "version: v1\npolicy:\n  rules:\n    - {select: {index: 0}, use: mps, replicas: 2, name: a}\n    - {select: {index: 1}, use: time-slicing, replicas: 3, name: a}\n",
}

func policyFiles(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

var verbs = []string{"inspect", "clear", "ignore", "simulate", "quiesce", "resume", "rebind", "debug", "validate", "version", "help"}

func TestHelp(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for _, c := range [][]string{{k8sGPU, "--help"}, {nomadGPU, "--help"}, {nomadGPU}, {k8sGPU, "version"}, {nomadGPU, "version"}} {
		fmt.Fprintln(&all, transcript(t.Context(), t.TempDir(), c[0], c[1:]...))
	}
	for _, name := range []string{k8sGPU, nomadGPU} {
		for _, verb := range verbs {
			fmt.Fprintln(&all, transcript(t.Context(), t.TempDir(), name, verb, "--help"))
		}
	}
	compare(t, "help", all.String())
}

func TestErrors(t *testing.T) {
	t.Parallel()
	dir := policyFiles(t)
	var all strings.Builder
	for _, c := range [][]string{
		{k8sGPU, "--frobnicate"}, {k8sGPU, "inspekt"}, {k8sGPU, "inspect", "now"}, {k8sGPU, "inspect", "--jsno"},
		{k8sGPU, "--mig-strategy=all", "--rescan=fast", "--health-mode=on", "--xids=94=bad", "--xids=x=ignore", "validate"},
		{k8sGPU, "--device-list-strategy=cdi", "--device-id-strategy=name", "--gds-enabled=maybe", "--imex-channel-ids=1", "validate"},
		{k8sGPU, "--device-list-strategy=", "--cdi-disable-hooks=symlinks", "--cdi-feature-flags=gids", "validate"},
		{k8sGPU, "--device-list-strategy=auto,cdi-cri", "--cdi-annotation-prefix=cdi", "--cdi-dir=here", "--nvidia-ctk-path=ctk", "validate"},
		{k8sGPU, "--http-address=9410", "--kubelet-socket=here", "--state-dir=here", "--log-level=loud", "--recovery-limit=-1", "validate"},
		{k8sGPU, "--health-period=0s", "--health-settle=1d", "--call-deadline=1ns", "--recovery=maybe", "--recovery-checks=0", "validate"},
		{k8sGPU, "--degraded=no", "--application-faults=x", "--kernel-log=log", "--overlap=maybe", "--reservation-check=maybe", "--simulation=maybe", "validate"},
		{k8sGPU, "--exclude=GPU-1,x", "--pass-device-specs=maybe", "--fail-on-init-error=maybe", "validate", "file"},
		{k8sGPU, "--config-file=$/missing.yaml", "validate"},
		{k8sGPU, "--state-dir=$", "clear"}, {k8sGPU, "--state-dir=$", "ignore", "--gpu=0"}, {k8sGPU, "--state-dir=$", "simulate"},
		{k8sGPU, "--state-dir=$", "simulate", "xid", "79"}, {k8sGPU, "--state-dir=$", "simulate", "gremlin", "x"},
		{k8sGPU, "--state-dir=$", "quiesce", "--for=soon"}, {k8sGPU, "--state-dir=$", "resume"}, {k8sGPU, "--state-dir=$", "rebind"},
		{k8sGPU, "--state-dir=$", "debug"}, {k8sGPU, "--state-dir=", "resume"},
		{nomadGPU, "--frobnicate"}, {nomadGPU, "inspekt"}, {nomadGPU, "inspect", "now"}, {nomadGPU, "inspect", "--jsno"},
		{nomadGPU, "inspect", "--state-dir=here"}, {nomadGPU, "inspect", "--driver-root=here"}, {nomadGPU, "inspect", "--mig-strategy=all"},
		{nomadGPU, "inspect", "--policy-file=$/missing.yaml"}, {nomadGPU, "validate"}, {nomadGPU, "validate", "a", "b"},
		{nomadGPU, "validate", "$/missing.yaml"},
		{nomadGPU, "clear", "--state-dir=$"}, {nomadGPU, "ignore", "--state-dir=$", "--gpu=0"}, {nomadGPU, "simulate", "--state-dir=$"},
		{nomadGPU, "simulate", "xid", "--state-dir=$"}, {nomadGPU, "quiesce", "--state-dir=$", "--for=soon"},
		{nomadGPU, "resume", "--state-dir=$"}, {nomadGPU, "rebind", "--state-dir="}, {nomadGPU, "debug", "--state-dir=$"},
	} {
		fmt.Fprintln(&all, typed(t, dir, c...))
	}
	compare(t, "errors", all.String())
}

// What is wrong with a command line or a configuration is written, however late its reader is: a process that ends with exit code 1 and
// without a reason does not help an operator. The plugin, whose log must not block it, waits for some seconds.
func TestErrorsWaitForTheirReader(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		words []string
		late  time.Duration
		want  string
	}{
		"command of k8s-gpu":   {[]string{k8sGPU, "--mig-strategy=all", "validate"}, 500 * time.Millisecond, `k8s-gpu: --mig-strategy = "all": want none`},
		"command of nomad-gpu": {[]string{nomadGPU, "inspect", "--mig-strategy=all"}, 500 * time.Millisecond, `nomad-gpu: --mig-strategy = "all": want none`},
		"agent, JSON":          {[]string{k8sGPU, "--mig-strategy=all"}, agent.ReaderTimeout + time.Second, `"msg":"k8s-gpu ends","error":"--mig-strategy = \"all\": want none`},
		"agent, text":          {[]string{k8sGPU, "--mig-strategy=all", "--log-format=text"}, agent.ReaderTimeout + time.Second, `k8s-gpu: --mig-strategy = "all": want none`},
		"plugin":               {[]string{nomadGPU}, 2 * time.Second, `"@message":"plugin init error"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, w, err := os.Pipe()
			must(t, err)
			full := fill(t, w)
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, tc.words[0]), tc.words[1:]...)
			cmd.Stderr, cmd.Env = w, []string{}
			if name == "plugin" {
				cmd.Env = []string{base.Handshake.MagicCookieKey + "=" + base.Handshake.MagicCookieValue, "PLUGIN_PROTOCOL_VERSIONS=2", "TMPDIR=/nowhere"}
			}
			must(t, cmd.Start(), w.Close())
			time.Sleep(tc.late) // it has nothing else to wait for
			text, err := io.ReadAll(r)
			must(t, err, r.Close())
			_ = cmd.Wait() // the exit code is looked at
			if got := string(text[full:]); !strings.Contains(got, tc.want) || cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("exit code %d, and stderr has %q", cmd.ProcessState.ExitCode(), got)
			}
		})
	}
}

// fill fills a pipe and returns the number of bytes.
func fill(t *testing.T, w *os.File) (size int) {
	t.Helper()
	must(t, w.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
	size, err := w.Write(make([]byte, 1<<20))
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	return size
}

func TestValidate(t *testing.T) {
	t.Parallel()
	dir := policyFiles(t)
	var all strings.Builder
	for _, file := range []string{"mixed", "shares", "injection", "incumbent", "empty", "v2", "text", "clash", "broken"} {
		fmt.Fprintf(&all, "======== %s.yaml\n%s\n", file, files[file+".yaml"])
		fmt.Fprintln(&all, typed(t, dir, k8sGPU, "--config-file=$/"+file+".yaml", "validate"))
		fmt.Fprintln(&all, typed(t, dir, nomadGPU, "validate", "$/"+file+".yaml"))
	}
	fmt.Fprintln(&all, typed(t, dir, k8sGPU, "--config-file=$/mixed.yaml", "--mps-root=/run/nvidia/mps", "validate"))
	compare(t, "validate", all.String())
}

// typed is the transcript of a command in which $ stands for dir.
func typed(t *testing.T, dir string, words ...string) string {
	t.Helper()
	args := make([]string, len(words)-1)
	for i, w := range words[1:] {
		args[i] = strings.ReplaceAll(w, "$", dir)
	}
	return transcript(t.Context(), dir, words[0], args...)
}
