package xid_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode"

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

// all has every rule: those of XIDs, of events, and of codes that are not in the table.
var all = slices.Values(slices.Concat(slices.Collect(xid.XIDs()), slices.Collect(xid.Events()),
	[]xid.Rule{xid.XID(0), xid.XID(180), xid.XID(999), xid.XID(math.MaxUint64)}, named()))

// named has the rules for the XIDs whose severity the kernel log names.
func named() (rules []xid.Rule) {
	for code := uint64(144); code <= 150; code++ {
		for _, s := range []xid.Severity{xid.Nonfatal, xid.LinkTakenDown, xid.Fatal} {
			rules = append(rules, xid.Named(code, s))
		}
	}
	return rules
}

func name(r xid.Rule) string { return fmt.Sprintf("%#x/%d %s", r.Code, r.Code, r.Name) }

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
			t.Errorf("%s is better without a recovery action (%s) than immediately (%s)", name(r), r.SettledEffect, r.Effect)
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
			t.Errorf("%s: withdrawn, and neither a reset nor a reboot clears it", name(r))
		}
	}
}

func TestBuckets(t *testing.T) {
	for r := range all {
		for _, b := range []string{r.Immediate, r.Investigatory} {
			if !slices.Contains(buckets, b) {
				t.Errorf("%s: %q is not in the catalogue", name(r), b)
			}
		}
	}
}

// TestTableIsComplete requires each code once: 1 to 172 of the catalogue, 173 to 177 and 185 of the driver's sources.
func TestTableIsComplete(t *testing.T) {
	want, names := uint64(1), map[string]uint64{}
	for r := range xid.XIDs() {
		if r.Code != want {
			t.Fatalf("%s follows %d", name(r), want-1)
		}
		if want++; want == 178 {
			want = 185
		}
		if got := xid.XID(r.Code); got != r {
			t.Errorf("XID(%d) = %+v, the table has %+v", r.Code, got, r)
		}
		if r.Name == "" || strings.ContainsAny(r.Name, " %|") {
			t.Errorf("%s: no mnemonic", name(r))
		}
		if other, taken := names[r.Name]; taken {
			t.Errorf("%s is also %d", name(r), other)
		}
		names[r.Name] = r.Code
	}
	if want != 186 {
		t.Errorf("the table ends before %d", want)
	}
}

func TestUnknownCodes(t *testing.T) {
	for _, code := range []uint64{0, 178, 184, 186, 998, 999, math.MaxUint64} {
		r := xid.XID(code)
		if r.Code != code || r.Class != xid.Suspect || r.Name != "" || r.Effect != xid.Degrades {
			t.Errorf("XID(%d) = %+v", code, r)
		}
		if r.Meaning == xid.XID(1).Meaning {
			t.Errorf("XID(%d) is called %q", code, r.Meaning)
		}
	}
	if xid.XID(999).Meaning == xid.XID(178).Meaning {
		t.Error("999 means that NVML could not identify the fault: it is not an unknown code")
	}
}

func TestEvents(t *testing.T) {
	for _, hint := range []uint64{0, 0x1, 0x2, 0x4, 0x8, 0x10, 0x80, 0x100, 0x8000, 0x600} {
		if r, is := xid.Event(hint); is {
			t.Errorf("Event(%#x) = %+v, want none", hint, r)
		}
	}
	var kinds []uint64
	for r := range xid.Events() {
		kinds = append(kinds, r.Code)
	}
	if want := []uint64{0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000}; !slices.Equal(kinds, want) {
		t.Errorf("events are %#x, want %#x", kinds, want)
	}
}

// TestTexts: meaning and action are shown on one line with the name of a GPU.
func TestTexts(t *testing.T) {
	for r := range all {
		for _, text := range []string{r.Meaning, r.Action} {
			first, _, _ := strings.Cut(text, " ")
			acronym := len(first) > 1 && strings.IndexFunc(first[1:], unicode.IsUpper) >= 0
			switch {
			case len(text) > 50:
				t.Errorf("%s: %q has %d characters", name(r), text, len(text))
			case strings.HasSuffix(text, "."), strings.TrimSpace(text) != text:
				t.Errorf("%s: %q ends with a full stop or a space", name(r), text)
			case text != "" && unicode.IsUpper(rune(text[0])) && !acronym:
				t.Errorf("%s: %q begins with a capital letter", name(r), text)
			}
		}
		if r.Meaning == "" {
			t.Errorf("%s: no meaning", name(r))
		}
	}
}
