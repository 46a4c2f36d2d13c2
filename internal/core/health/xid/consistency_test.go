package xid_test

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// operatorOnly are the faults with an effect that only an operator can clear: permanent damage.
var operatorOnly = []uint64{157, 161, 164, 165}

// buckets are the resolution buckets of NVIDIA's catalogue.
var buckets = []string{
	"", "CHECK_APP/CUDA", "CHECK_MECHANICALS", "CHECK_UVM", "CONTACT_SUPPORT", "IGNORE", "IGNORE (sympathetic)",
	"INVESTIGATE_LINK_SI", "INVESTIGATE_SW", "INVESTIGATE_SW_USER", "N/A (informational, regarding another XID)",
	"RESET_GPU", "RESTART_APP", "RESTART_BM", "RESTART_VM", "SYMPATHETIC_REPORT_SOLO",
	"Solo: RESTART_FM; not solo: IGNORE (follow other XID)", "UPDATE_SWFW", "WORKFLOW_NVLINK5_ERR",
	"WORKFLOW_NVLINK_ERR", "WORKFLOW_XID_13", "WORKFLOW_XID_31", "WORKFLOW_XID_45", "WORKFLOW_XID_48",
	"XID_137_FLOW", "XID_154",
}

// worst is the greatest effect of the rule without a recovery action.
func worst(r xid.Rule) xid.Effect { return max(r.Effect, r.SettledEffect, r.RepeatEffect) }

func TestClasses(t *testing.T) {
	for r := range all {
		switch r.Class {
		case xid.Application, xid.Info:
			if worst(r) > xid.Degrades {
				t.Errorf("%s (%s) withdraws", name(r), r.Class)
			}
		case xid.Contained:
			if r.Effect != xid.Degrades || worst(r) != xid.Degrades {
				t.Errorf("%s (%s) does %s", name(r), r.Class, worst(r))
			}
		case xid.Reset, xid.Node:
			if r.SettledEffect < xid.Withdraws {
				t.Errorf("%s (%s) does no more than %s", name(r), r.Class, r.SettledEffect)
			}
		case xid.Fabric, xid.Suspect:
			if r.Effect < xid.Degrades {
				t.Errorf("%s (%s) does nothing", name(r), r.Class)
			}
		case xid.Trigger:
			if worst(r) != xid.None || r.Clears != 0 {
				t.Errorf("%s (%s) is no fault", name(r), r.Class)
			}
		default:
			t.Errorf("%s has class %d", name(r), r.Class)
		}
	}
}

func TestEffects(t *testing.T) {
	for r := range all {
		if r.SettledEffect < r.Effect {
			t.Errorf("%s is better without a verdict (%s) than at once (%s)", name(r), r.SettledEffect, r.Effect)
		}
		if (r.RepeatWindow > 0) != (r.RepeatEffect > r.SettledEffect) {
			t.Errorf("%s: a second one within %s does %s, the first %s", name(r), r.RepeatWindow, r.RepeatEffect, r.SettledEffect)
		}
		if r.NVLinkOnly && r.SettledEffect == r.Effect {
			t.Errorf("%s: links make no difference", name(r))
		}
		if worst(r) > xid.None && r.Action == "" {
			t.Errorf("%s: no action for the operator", name(r))
		}
		if !slices.Contains([]int{0, 1, 565, 570, 575}, r.RecoveryActionSince) {
			t.Errorf("%s: no branch %d in the catalogue", name(r), r.RecoveryActionSince)
		}
	}
}

func TestEvidence(t *testing.T) {
	const rest = xid.NoRecoveryAction | xid.ResetSeen | xid.LevelClear | xid.Quiet
	for r := range all {
		if r.Clears&rest != 0 && r.Clears&xid.Reboot == 0 {
			t.Errorf("%s: a reboot is no evidence, but %s is", name(r), r.Clears)
		}
		if r.Clears&xid.Quiet != 0 && worst(r) > xid.Degrades {
			t.Errorf("%s: absence of repeats is no evidence that a GPU works", name(r))
		}
		if (r.Clears&xid.LevelClear != 0) != (r.Level != xid.LevelNone) {
			t.Errorf("%s: cleared by %s, level %s", name(r), r.Clears, r.Level)
		}
		if r.Level != xid.LevelNone && worst(r) > xid.Degrades {
			t.Errorf("%s: a level that was never seen set may not return a GPU to service", name(r))
		}
		if only := slices.Contains(operatorOnly, r.Code); only != (worst(r) > xid.None && r.Clears == 0) {
			t.Errorf("%s: does %s, cleared by %s", name(r), worst(r), r.Clears)
		}
		if worst(r) > xid.Degrades && r.Clears&(xid.ResetSeen|xid.Reboot) == 0 {
			t.Errorf("%s: withdrawn, and neither reset nor reboot bring it back", name(r))
		}
	}
}

func TestBuckets(t *testing.T) {
	for r := range all {
		for _, b := range []string{r.Immediate, r.Investigatory} {
			if !slices.Contains(buckets, b) {
				t.Errorf("%s: %q is no word of the catalogue", name(r), b)
			}
		}
	}
}
