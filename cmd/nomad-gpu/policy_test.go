package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	divided = `version: v1
flags: {migStrategy: mixed, mpsRoot: /srv/mps, failOnInitError: false}
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing:
  timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/h100, replicas: 4}]}
policy:
  include: [{model: "*"}]
  exclude: [{index: 6}]
  rules:
    - {select: {index: 7}, for: kubernetes}
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 3}
    - {select: {index: 2}, use: exclusive, name: mine, migStrategy: none}
`
	undecided = "version: v1\npolicy:\n  rules:\n  - {select: {index: zero}, use: reserved}\n  - {select: {index: 1}, use: quartered}\n"
)

func policyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestValidate(t *testing.T) {
	path := policyFile(t, divided)
	var out, errs strings.Builder
	if code := command("nomad-gpu", []string{"validate", path}, &out, &errs); code != cli.ExitOK {
		t.Errorf("exit code %d: %s", code, errs.String())
	}
	for _, want := range []string{
		"MIG strategy: mixed\n", "MPS root: /srv/mps\n",
		":7: policy.include[0]: offered; devices that no include selects are not\n", ":8: policy.exclude[0]: not offered: excluded by",
		":10: policy.rules[0].select: not offered: left to kubernetes", ":11: policy.rules[1].select: time-slicing by 3\n",
		":12: policy.rules[2].select: exclusive, MIG strategy none, named mine\n",
		":3: resources.gpus[0]: named h100\n", ":5: sharing.timeSlicing.resources[0]: pool h100, time-slicing by 4, named h100.shared\n",
		"warning: " + path + ":3: resources.gpus: NVIDIA's k8s-device-plugin ignores this field", "\nno problem\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
	for name, tc := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"problems": {[]string{policyFile(t, undecided)}, cli.ExitFailed, []string{"policy.yaml:4", `"zero"`, "\nnomad-gpu: ", "policy.yaml:5", `"quartered"`}},
		"no file":  {[]string{"/nowhere/policy.yaml"}, cli.ExitFailed, []string{"no such file"}},
		"no word":  {nil, cli.ExitUsage, []string{"validate: want a policy file"}},
	} {
		var out, errs strings.Builder
		if code := command("nomad-gpu", append([]string{"validate"}, tc.args...), &out, &errs); code != tc.code || out.Len() > 0 {
			t.Errorf("%s: exit code %d, %q", name, code, out.String())
		}
		for _, want := range tc.want {
			if !strings.Contains(errs.String(), want) {
				t.Errorf("%s: %q is not in:\n%s", name, want, errs.String())
			}
		}
	}
}

// Without a plugin that runs, inspect says what one would offer under a policy.
func TestInspectUnderAPolicy(t *testing.T) {
	t.Parallel()
	m := install(t, "h100x8")
	out, err := exec.Command(binary, inspectArgs(m, "--json", "--policy-file", policyFile(t, divided))...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got report.Report
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var excluded []int
	for _, e := range got.Excluded {
		excluded = append(excluded, e.Index)
	}
	if !slices.Equal(excluded, []int{6, 7}) {
		t.Errorf("excluded: %v", excluded)
	}
	for _, tc := range [][]string{{"--policy-file", policyFile(t, undecided)}, {"--mig-strategy", "double"}} {
		if out, err := exec.Command(binary, inspectArgs(m, tc...)...).CombinedOutput(); err == nil {
			t.Errorf("%v: accepted\n%s", tc, out)
		}
	}
}

// kinds counts the devices of the latest fingerprint that are whole GPUs and shares.
func (a *testAgent) kinds() (gpus, shares int) {
	for id := range a.devices() {
		if strings.Contains(id, "::") {
			shares++
		} else {
			gpus++
		}
	}
	return gpus, shares
}

// A policy that changes takes effect in place, one that is wrong not at all: no session is opened anew, and who is
// sick stays sick.
func TestHangupReadsThePolicy(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	path := policyFile(t, "version: v1\n")
	a := run(t, m, shortDir(t), map[string]any{"policy_file": path})
	a.healthy(8, 8)
	if err := m.XID(0, 95); err != nil {
		t.Fatal(err)
	}
	a.healthy(8, 7)
	opened := opens(t, m)
	hangup := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := a.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	hangup(undecided)
	a.said("[ERROR]", "policy refused", "policy.yaml:4", "zero")
	a.said("[ERROR]", "policy refused", "policy.yaml:5", "quartered")
	a.healthy(8, 7)

	hangup("version: v1\npolicy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 4}, {select: {index: 7}, use: reserved}]}\n")
	await(t, "five GPUs and eight shares", patience, func() bool { gpus, shares := a.kinds(); return gpus == 5 && shares == 8 })
	a.healthy(13, 9)
	if _, err := a.Reserve([]string{m.UUID(1) + "::2"}); err != nil {
		t.Error(err)
	}
	if n := opens(t, m); n != opened {
		t.Errorf("the driver was opened %d times more", n-opened)
	}
	hangup("version: v1\n")
	await(t, "eight GPUs", patience, func() bool { gpus, shares := a.kinds(); return gpus == 8 && shares == 0 })
	a.healthy(8, 7)
}

// opens is how often the driver was opened.
func opens(t *testing.T, m *simdriver.Machine) (n uint64) {
	t.Helper()
	calls, err := m.Calls()
	if err != nil {
		t.Fatal(err)
	}
	for name, count := range calls {
		if strings.HasPrefix(name, "nvmlInit") {
			n += count
		}
	}
	return n
}
