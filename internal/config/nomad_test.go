package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The block has precedence over the policy file, and the file over the defaults.
func TestBlockAndPolicyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte("flags: {migStrategy: single, mpsRoot: /file}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		block   map[string]any
		mig     inventory.MIGStrategy
		mpsRoot string
	}{
		"defaults": {map[string]any{}, inventory.MIGMixed, defaultMPSRoot},
		"file":     {map[string]any{"policy_file": path}, inventory.MIGSingle, "/file"},
		"block":    {map[string]any{"policy_file": path, "mig_strategy": "none", "mps_root": "/block/"}, inventory.MIGNone, "/block"},
	} {
		s, f, err := NewBlock(c.block).Read()
		if err != nil || s.Core.MIG != c.mig || s.MPSRoot != c.mpsRoot || (f.Text == "") != (name == "defaults") {
			t.Errorf("%s: %s, %s, %q, %v", name, s.Core.MIG, s.MPSRoot, f.Text, err)
		}
	}
}

// The problems of the block and of the policy file are reported together.
func TestBlockProblems(t *testing.T) {
	block := map[string]any{
		"enabled": "maybe", "ignored_gpu_ids": []any{"GPU-1", "0"}, "driver_root": "run", "policy_file": "/nowhere/policy.yaml",
		"mig_strategy": "double", "group_by": []any{"numa"}, "mps_root": "mps", "xids": []any{"63"}, "recovery_checks": 2.5,
	}
	want := strings.Split(`enabled = "maybe": want true or false
ignored_gpu_ids = "0": want UUIDs (GPU-... or MIG-...) as nvidia-smi -L prints them
driver_root = "run": want an absolute path such as /
mig_strategy = "double": want none, single or mixed
group_by = "[numa]": want a single value
mps_root = "mps": want an absolute path such as /run/nvidia/mps
xids = "[63]": want a mapping
recovery_checks = "2.5": want a number of 1 or more`, "\n")
	_, _, err := NewBlock(block).Read()
	if got := strings.Split(errorText(err), "\n"); got[0] != "configuration file: open /nowhere/policy.yaml: no such file or directory" || strings.Join(got[1:], "\n") != strings.Join(want, "\n") {
		t.Errorf("%q", got)
	}
	_, _, err = NewBlock(block).Compile("/c.yaml", []byte("flags: {migStrategy: some}\n"))
	if got := strings.Split(errorText(err), "\n"); strings.Join(got, "\n") != strings.Join(append(want, `/c.yaml:1: flags.migStrategy = "some": want none, single or mixed`), "\n") {
		t.Errorf("%q", got)
	}
}
