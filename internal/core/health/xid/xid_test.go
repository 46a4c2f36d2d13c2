package xid_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Short names of evidence for the table below.
const (
	dv = xid.NoRecoveryAction
	rv = xid.ResetSeen
	rb = xid.Reboot
	lc = xid.LevelClear
	qu = xid.Quiet
)

// all yields every rule: those of XIDs, of events, and of codes that are not in the table.
func all(yield func(xid.Rule) bool) {
	rules := slices.Collect(xid.XIDs())
	rules = slices.AppendSeq(rules, xid.Events())
	rules = append(rules, xid.XID(0), xid.XID(180), xid.XID(999), xid.XID(math.MaxUint64))
	for _, r := range rules {
		if !yield(r) {
			return
		}
	}
}

func name(r xid.Rule) string { return fmt.Sprintf("%#x/%d %s", r.Code, r.Code, r.Name) }

// TestRules compares the most important rows with a copy, so that a mistake in a shared rule is found.
func TestRules(t *testing.T) {
	for _, tc := range []struct {
		xid             uint64
		class           xid.Class
		effect, settled xid.Effect
		since           int
		clears          xid.Evidence
		immediate       string
	}{
		{1, xid.Suspect, xid.Degrades, xid.Degrades, 0, dv | rv | rb | qu, "CONTACT_SUPPORT"},
		{8, xid.Application, xid.None, xid.None, 0, 0, "RESTART_APP"},
		{13, xid.Application, xid.None, xid.None, 0, 0, "RESTART_APP"},
		{31, xid.Application, xid.None, xid.None, 0, 0, "RESTART_APP"},
		{32, xid.Application, xid.None, xid.None, 0, qu | rb, "RESTART_APP"},
		{38, xid.Info, xid.None, xid.None, 0, 0, "IGNORE"},
		{43, xid.Application, xid.None, xid.None, 0, 0, "IGNORE"},
		{45, xid.Application, xid.None, xid.None, 0, 0, "WORKFLOW_XID_45"},
		{46, xid.Reset, xid.Withdraws, xid.Withdraws, 0, rv | rb, "RESET_GPU"},
		{48, xid.Reset, xid.Withdraws, xid.Withdraws, 565, dv | rv | rb, "WORKFLOW_XID_48"},
		{54, xid.Node, xid.Withdraws, xid.Withdraws, 0, rb, "CHECK_MECHANICALS"},
		{62, xid.Reset, xid.Withdraws, xid.Withdraws, 565, rv | rb, "RESET_GPU"},
		{63, xid.Contained, xid.Degrades, xid.Degrades, 565, lc | dv | rv | rb, "IGNORE"},
		{64, xid.Reset, xid.Withdraws, xid.Withdraws, 565, rv | rb, "RESET_GPU"},
		{74, xid.Fabric, xid.Degrades, xid.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK_ERR"},
		{78, xid.Info, xid.None, xid.None, 0, 0, "UPDATE_SWFW"},
		{79, xid.Node, xid.Loses, xid.Loses, 565, rv | rb, "RESTART_BM"},
		{80, xid.Application, xid.None, xid.None, 0, qu | rb, "RESTART_APP"},
		{92, xid.Contained, xid.Degrades, xid.Degrades, 0, qu | rb, "IGNORE"},
		{94, xid.Contained, xid.Degrades, xid.Degrades, 565, dv | rv | rb, "RESTART_APP"},
		{95, xid.Reset, xid.Withdraws, xid.Withdraws, 565, dv | rv | rb, "RESET_GPU"},
		{109, xid.Suspect, xid.Degrades, xid.Degrades, 570, dv | rv | rb, "RESET_GPU"},
		{110, xid.Reset, xid.Withdraws, xid.Withdraws, 565, rv | rb, "RESET_GPU"},
		{119, xid.Reset, xid.Withdraws, xid.Withdraws, 0, rv | rb, "RESET_GPU"},
		{120, xid.Reset, xid.Withdraws, xid.Withdraws, 565, rv | rb, "RESET_GPU"},
		{121, xid.Info, xid.Degrades, xid.Degrades, 0, rv | rb | qu, "IGNORE"},
		{136, xid.Fabric, xid.Withdraws, xid.Withdraws, 565, rv | rb, "RESET_GPU"},
		{140, xid.Reset, xid.Withdraws, xid.Withdraws, 0, rv | rb, "RESET_GPU"},
		{143, xid.Reset, xid.Withdraws, xid.Withdraws, 575, rv | rb, "RESET_GPU"},
		{144, xid.Fabric, xid.Degrades, xid.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK5_ERR"},
		{147, xid.Info, xid.None, xid.None, 565, 0, "WORKFLOW_NVLINK5_ERR"},
		{149, xid.Fabric, xid.Degrades, xid.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK5_ERR"},
		{151, xid.Node, xid.Withdraws, xid.Withdraws, 0, rb, "RESTART_VM"},
		{154, xid.Trigger, xid.None, xid.None, 0, 0, "XID_154"},
		{155, xid.Fabric, xid.Degrades, xid.Degrades, 565, dv | lc | rb, "RESET_GPU"},
		{156, xid.Reset, xid.Withdraws, xid.Withdraws, 565, dv | rv | rb, "RESET_GPU"},
		{157, xid.Contained, xid.Degrades, xid.Degrades, 0, 0, "IGNORE"},
		{158, xid.Reset, xid.Withdraws, xid.Withdraws, 1, rv | rb, "RESET_GPU"},
		{159, xid.Reset, xid.Degrades, xid.Withdraws, 1, dv | rv | rb, "CHECK_UVM"},
		{160, xid.Contained, xid.Degrades, xid.Degrades, 575, lc | rv | rb, "IGNORE"},
		{161, xid.Contained, xid.Degrades, xid.Degrades, 575, 0, "IGNORE"},
		{165, xid.Info, xid.Degrades, xid.Degrades, 0, 0, ""},
		{166, xid.Fabric, xid.Degrades, xid.Degrades, 0, dv | rv | rb, ""},
		{167, xid.Reset, xid.Withdraws, xid.Withdraws, 0, rv | rb, ""},
		{168, xid.Contained, xid.Degrades, xid.Degrades, 0, rv | rb, ""},
		{171, xid.Reset, xid.Withdraws, xid.Withdraws, 0, dv | rv | rb, ""},
		{173, xid.Fabric, xid.Withdraws, xid.Withdraws, 0, rv | rb, ""},
		{175, xid.Reset, xid.Withdraws, xid.Withdraws, 0, rv | rb, ""},
		{176, xid.Contained, xid.Degrades, xid.Degrades, 0, qu | rb, ""},
		{177, xid.Contained, xid.Degrades, xid.Degrades, 0, rv | rb, ""},
		{178, xid.Suspect, xid.Degrades, xid.Degrades, 0, dv | rv | rb | qu, ""},
		{185, xid.Contained, xid.Degrades, xid.Degrades, 0, rv | rb, ""},
		{999, xid.Suspect, xid.Degrades, xid.Degrades, 0, dv | rv | rb | qu, ""},
	} {
		r := xid.XID(tc.xid)
		if r.Code != tc.xid || r.Class != tc.class || r.Effect != tc.effect || r.SettledEffect != tc.settled ||
			r.RecoveryActionSince != tc.since || r.Clears != tc.clears || r.Immediate != tc.immediate {
			t.Errorf("XID %d = %+v, want %+v", tc.xid, r, tc)
		}
	}
}

func TestRareColumns(t *testing.T) {
	for r := range all {
		var want xid.Rule
		switch {
		case r.Name == "NVLINK_ERROR":
			want.NVLinkOnly = true
		case r.Name == "PBDMA_PUSHBUFFER_CRC_MISMATCH":
			want.RepeatWindow, want.RepeatEffect = time.Hour, xid.Degrades
		case r.Name == "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR":
			want.RepeatWindow, want.RepeatEffect = 10*time.Minute, xid.Withdraws
		case r.Code == 63, r.Name == "nvmlEventTypeDramRetirementEvent":
			want.Level = xid.LevelMemoryRepair
		case r.Code == 160:
			want.Level = xid.LevelResourceRepair
		case r.Code == 155:
			want.Level = xid.LevelLinks
		}
		got := xid.Rule{NVLinkOnly: r.NVLinkOnly, RepeatWindow: r.RepeatWindow, RepeatEffect: r.RepeatEffect, Level: r.Level}
		if got != want {
			t.Errorf("%s: %+v, want %+v", name(r), got, want)
		}
	}
}

// TestTableIsComplete requires each code once: 1 to 172 of the catalogue, 173 to 177 and 185 of the driver's sources.
func TestTableIsComplete(t *testing.T) {
	want := uint64(1)
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
	}
	if want != 186 {
		t.Errorf("the table ends before %d", want)
	}
	names := make(map[string]uint64)
	for r := range xid.XIDs() {
		if other, taken := names[r.Name]; taken {
			t.Errorf("%s is also %d", name(r), other)
		}
		names[r.Name] = r.Code
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

func TestEngineNumbers(t *testing.T) {
	for code, want := range map[uint64]string{
		39: "CE0", 41: "CE2", 70: "CE3", 72: "CE5", 75: "CE6", 77: "CE8", 85: "CE9", 126: "CE10", 135: "CE19",
		68: "NVDEC0", 83: "NVDEC1", 84: "NVDEC2", 88: "NVDEC3", 89: "NVDEC4", 96: "NVDEC5", 98: "NVDEC7",
		82: "NVJPG0", 99: "NVJPG1", 105: "NVJPG7", 86: "OFA0", 139: "OFA1",
	} {
		if got := xid.XID(code); got.Name != "ROBUST_CHANNEL_"+want+"_ERROR" || got.Class != xid.Application {
			t.Errorf("XID %d is %+v, want %s", code, got, want)
		}
	}
}

func TestEvents(t *testing.T) {
	for _, tc := range []struct {
		kind   uint64
		class  xid.Class
		effect xid.Effect
		since  int
		clears xid.Evidence
	}{
		{0x200, xid.Contained, xid.Degrades, 0, qu | rb},
		{0x400, xid.Contained, xid.Degrades, 565, lc | dv | rv | rb},
		{0x800, xid.Reset, xid.Withdraws, 565, rv | rb},
		{0x1000, xid.Contained, xid.Degrades, 565, dv | rv | rb},
		{0x2000, xid.Reset, xid.Withdraws, 565, dv | rv | rb},
		{0x4000, xid.Reset, xid.Withdraws, 0, rv | rb},
	} {
		r, is := xid.Event(tc.kind)
		if !is || r.Code != tc.kind || r.Class != tc.class || r.Effect != tc.effect || r.SettledEffect != tc.effect ||
			r.RecoveryActionSince != tc.since || r.Clears != tc.clears {
			t.Errorf("Event(%#x) = %+v, %t, want %+v", tc.kind, r, is, tc)
		}
	}
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

func TestWholeGPU(t *testing.T) {
	for r := range all {
		want := map[xid.Class]bool{xid.Reset: true, xid.Node: true, xid.Fabric: true}[r.Class]
		if got := r.WholeGPU(); got != want {
			t.Errorf("%s (%s) concerns the whole GPU: %t", name(r), r.Class, got)
		}
	}
}

func TestEvidenceString(t *testing.T) {
	for set, want := range map[xid.Evidence]string{
		0:                 "operator",
		rb:                "reboot",
		rv | rb:           "reset seen or reboot",
		dv | rv | rb:      "recovery action None, reset seen or reboot",
		rb | lc | qu:      "reboot, condition gone or no repeat for a while",
		dv | rv | rb | qu: "recovery action None, reset seen, reboot or no repeat for a while",
	} {
		if got := set.String(); got != want {
			t.Errorf("%#b is %q, want %q", set, got, want)
		}
	}
	if got := fmt.Sprint(xid.Application, xid.Contained, xid.Reset, xid.Node, xid.Fabric, xid.Info, xid.Suspect, xid.Trigger); got != "application contained reset node fabric info suspect trigger" {
		t.Error(got)
	}
	if got := fmt.Sprint(xid.None, xid.Degrades, xid.Withdraws, xid.Loses); got != "none degraded unhealthy lost" {
		t.Error(got)
	}
	if got := fmt.Sprintf("%s/%s/%s/%s", xid.LevelNone, xid.LevelMemoryRepair, xid.LevelResourceRepair, xid.LevelLinks); got != "/memory repair pending/resource repair pending/link down" {
		t.Error(got)
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
				t.Errorf("%s: %q ends badly", name(r), text)
			case text != "" && unicode.IsUpper(rune(text[0])) && !acronym:
				t.Errorf("%s: %q begins like a sentence", name(r), text)
			}
		}
		if r.Meaning == "" {
			t.Errorf("%s: no meaning", name(r))
		}
	}
}
