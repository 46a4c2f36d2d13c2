package nomadadapter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
)

// policyFile writes a policy file and returns its path.
func policyFile(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, path, text)
	return path
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

const (
	validPolicy   = "version: v1\npolicy:\n  rules:\n  - {select: {index: 0}, use: reserved}\n  - {select: {index: 1}, use: time-slicing, replicas: 2}\n"
	invalidPolicy = "version: v1\npolicy:\n  rules:\n  - {select: {index: zero}, use: reserved}\n  - {select: {index: 1}, use: quartered}\n"
)

// Keys of the block have precedence over those of the policy file.
func TestOfferKeys(t *testing.T) {
	says := policyFile(t, "version: v1\nflags: {migStrategy: single, mpsRoot: /srv/mps}\n")
	for name, tc := range map[string]struct {
		keys    map[string]any
		mig     core.MIGStrategy
		groupBy config.GroupBy
		mpsRoot string
	}{
		"nothing":       {map[string]any{}, core.MIGMixed, config.GroupByNone, "/run/nvidia/mps"},
		"the block":     {map[string]any{"mig_strategy": "none", "group_by": "nvlink", "mps_root": "/run/mps/"}, core.MIGNone, config.GroupByNVLink, "/run/mps"},
		"the file":      {map[string]any{"policy_file": says, "group_by": "numa"}, core.MIGSingle, config.GroupByNUMA, "/srv/mps"},
		"both":          {map[string]any{"policy_file": says, "mig_strategy": "mixed", "mps_root": "/mps"}, core.MIGMixed, config.GroupByNone, "/mps"},
		"a silent file": {map[string]any{"policy_file": policyFile(t, "version: v1\n")}, core.MIGMixed, config.GroupByNone, "/run/nvidia/mps"},
		"of no concern": {map[string]any{"policy_file": policyFile(t, "version: v1\nflags: {plugin: {deviceListStrategy: cdi-cri}, gfd: {oneshot: true}}\n")}, core.MIGMixed, config.GroupByNone, "/run/nvidia/mps"},
	} {
		s := newFixture(t)
		if err := s.configure(tc.keys); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.currentRun()
		got := s.Started()[0]
		if got.Core.MIG != tc.mig || got.GroupBy != tc.groupBy || got.MPSRoot != tc.mpsRoot {
			t.Errorf("%s: %s, %s, %s", name, got.Core.MIG, got.GroupBy, got.MPSRoot)
		}
	}
}

func TestPolicyFile(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"policy_file": policyFile(t, validPolicy)})
	s.currentRun()
	inv := inventoryWith(s.Started()[0].Core, linked(3))
	want := map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2}
	if diff := cmp.Diff(want, groupSizes(groups(inv, assignment{}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// All errors in block and file are reported together, and the settings do not change.
func TestOfferErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]any
		want []string
	}{
		"no such file":     {map[string]any{"policy_file": "/nowhere/policy.yaml"}, []string{"/nowhere/policy.yaml: no such file"}},
		"a relative path":  {map[string]any{"policy_file": "policy.yaml"}, []string{`policy_file = "policy.yaml": want an absolute path`}},
		"no YAML":          {map[string]any{"policy_file": policyFile(t, "{")}, []string{"policy.yaml"}},
		"an unknown key":   {map[string]any{"policy_file": policyFile(t, "version: v1\npolice: {}\n")}, []string{"policy.yaml:2", "police"}},
		"no word":          {map[string]any{"mig_strategy": "double", "group_by": "rack"}, []string{`mig_strategy = "double": want none, single or mixed`, `group_by = "rack": want none, numa or nvlink`}},
		"no absolute path": {map[string]any{"mps_root": "mps"}, []string{`mps_root = "mps": want an absolute path`}},
		"all errors": {
			map[string]any{"policy_file": policyFile(t, invalidPolicy), "group_by": "rack", "fingerprint_period": "often", "recovery": "never"},
			[]string{"policy.yaml:4", `"zero"`, "policy.yaml:5", `"quartered"`, `group_by = "rack"`, `fingerprint_period = "often"`, `recovery = "never"`},
		},
	} {
		s := newFixture(t)
		err := s.configure(tc.keys)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in:\n%v", name, want, err)
			}
		}
		s.currentRun()
		if diff := cmp.Diff(core.Policy{}, s.Started()[0].Core.Policy); diff != "" {
			t.Errorf("%s: a refused policy took effect:\n%s", name, diff)
		}
	}
}
