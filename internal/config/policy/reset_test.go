package policy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/test/check"
)

// Each key of the section "reset" has its meaning for both agents, and its default.
func TestReset(t *testing.T) {
	for text, want := range map[string]reset.Policy{
		"version: v1\n":                         {},
		"reset:\n":                              {},
		"reset: {mode: off}\n":                  {Attempts: 2},
		"reset: {mode: \"off\", attempts: 1}\n": {Attempts: 1},
		"reset: {migLayout: lost}\n":            {Attempts: 2, LoseMIG: true}, // for a person
		"reset: {mode: act}\n":                  {Mode: reset.Act, Attempts: 2},
		"reset: {mode: report, attempts: 1, migLayout: lost}\n": {Mode: reset.Report, Attempts: 1, LoseMIG: true},
		"reset: {mode: act, attempts: 2, migLayout: keep}\n":    {Mode: reset.Act, Attempts: 2},
	} {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			f, err := read(text, to)
			check.NoError(t, err)
			if diff := cmp.Diff(want, f.Reset); diff != "" {
				t.Errorf("%s%s", text, diff)
			}
			if has := len(f.Summary()) > 0; has != want.On() {
				t.Errorf("%s%q", text, f.Summary())
			}
		}
	}
}

// The program is one of nomad-gpu; for k8s-gpu it has no effect, and that is noted.
func TestResetProgram(t *testing.T) {
	const text = "reset: {program: /opt/nvidia/bin/nvidia-smi}\n"
	f, err := read(text, policy.Nomad)
	if err != nil || f.ResetProgram != "/opt/nvidia/bin/nvidia-smi" || f.Notes != nil {
		t.Errorf("%q, %q, %v", f.ResetProgram, f.Notes, err)
	}
	f, err = read(text, policy.Kubernetes)
	want := []string{"/c.yaml:1: reset.program has no effect: on Kubernetes a component of its own runs nvidia-smi"}
	if err != nil || f.ResetProgram != "" || !slices.Equal(f.Notes, want) {
		t.Errorf("%q, %q, %v", f.ResetProgram, f.Notes, err)
	}
}

// The programs that watch GPUs are given with both commands, or not at all.
func TestResetPause(t *testing.T) {
	const text = "reset: {pause: {programs: [nv-hostengine, dcgm-exporter], command: [/bin/systemctl, stop, dcgm], resume: [/bin/systemctl, start, dcgm]}}\n"
	want := reset.Pause{
		Programs: []string{"nv-hostengine", "dcgm-exporter"}, Stop: []string{"/bin/systemctl", "stop", "dcgm"}, Resume: []string{"/bin/systemctl", "start", "dcgm"},
	}
	f, err := read(text, policy.Nomad)
	if diff := cmp.Diff(want, f.ResetPause); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	f, err = read(text, policy.Kubernetes)
	if err != nil || len(f.ResetPause.Programs) > 0 || len(f.Notes) != 1 {
		t.Errorf("%+v, %q, %v", f.ResetPause, f.Notes, err)
	}
	for text, want := range map[string]string{
		"reset: {pause: {programs: [dcgm-exporter], command: [/bin/a]}}\n":                      "reset.pause.resume",
		"reset: {pause: {programs: [/usr/bin/dcgm], command: [/bin/a], resume: [/bin/b]}}\n":    "want names of programs without a folder",
		"reset: {pause: {programs: [dcgm-exporter], command: [systemctl], resume: [/bin/b]}}\n": "want the absolute path of a program",
		"reset: {pause: {programs: [dcgm-exporter], command: [/bin/a], resume: []}}\n":          "reset.pause.resume",
	} {
		if _, err := read(text, policy.Nomad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s%v", text, err)
		}
	}
}

func TestResetSummary(t *testing.T) {
	for text, want := range map[string]string{
		"reset: {mode: act}\n":                                  "reset: a faulty GPU that a reset can repair is reset while no work has it, at most 2 times for one fault; GPUs with MIG instances are not",
		"reset: {mode: report, attempts: 1, migLayout: lost}\n": "reset: no GPU is reset; it is shown which one would be, at most once for one fault; also with MIG instances, which it loses",
	} {
		f, err := read(text, policy.Kubernetes)
		check.NoError(t, err)
		if got := f.Summary(); !slices.Equal(got, []string{want}) {
			t.Errorf("%s%q", text, got)
		}
	}
}
