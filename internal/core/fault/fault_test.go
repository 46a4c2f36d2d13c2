package fault_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/core/fault"
)

// The evidence, in the short words of the table below.
const (
	dv = fault.NoRecoveryAction
	rv = fault.ResetSeen
	rb = fault.Reboot
	lc = fault.LevelClear
	qu = fault.Quiet
)

// all yields every rule there is: the table's, the events', and those of codes in no table.
func all(yield func(fault.Rule) bool) {
	rules := slices.Collect(fault.XIDs())
	rules = slices.AppendSeq(rules, fault.Events())
	rules = append(rules, fault.XID(0), fault.XID(180), fault.XID(999), fault.XID(math.MaxUint64))
	for _, r := range rules {
		if !yield(r) {
			return
		}
	}
}

func name(r fault.Rule) string { return fmt.Sprintf("%#x/%d %s", r.Code, r.Code, r.Name) }

// A hand-typed copy of the rows that matter most, so that a slip in a shared treatment shows.
func TestRules(t *testing.T) {
	for _, tc := range []struct {
		xid             uint64
		class           fault.Class
		effect, settled fault.Effect
		since           int
		clears          fault.Evidence
		immediate       string
	}{
		{1, fault.Suspect, fault.Degrades, fault.Degrades, 0, dv | rv | rb | qu, "CONTACT_SUPPORT"},
		{8, fault.Application, fault.None, fault.None, 0, 0, "RESTART_APP"},
		{13, fault.Application, fault.None, fault.None, 0, 0, "RESTART_APP"},
		{31, fault.Application, fault.None, fault.None, 0, 0, "RESTART_APP"},
		{32, fault.Application, fault.None, fault.None, 0, qu | rb, "RESTART_APP"},
		{38, fault.Info, fault.None, fault.None, 0, 0, "IGNORE"},
		{43, fault.Application, fault.None, fault.None, 0, 0, "IGNORE"},
		{45, fault.Application, fault.None, fault.None, 0, 0, "WORKFLOW_XID_45"},
		{46, fault.Reset, fault.Withdraws, fault.Withdraws, 0, rv | rb, "RESET_GPU"},
		{48, fault.Reset, fault.Withdraws, fault.Withdraws, 565, dv | rv | rb, "WORKFLOW_XID_48"},
		{54, fault.Node, fault.Withdraws, fault.Withdraws, 0, rb, "CHECK_MECHANICALS"},
		{62, fault.Reset, fault.Withdraws, fault.Withdraws, 565, rv | rb, "RESET_GPU"},
		{63, fault.Contained, fault.Degrades, fault.Degrades, 565, lc | dv | rv | rb, "IGNORE"},
		{64, fault.Reset, fault.Withdraws, fault.Withdraws, 565, rv | rb, "RESET_GPU"},
		{74, fault.Fabric, fault.Degrades, fault.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK_ERR"},
		{78, fault.Info, fault.None, fault.None, 0, 0, "UPDATE_SWFW"},
		{79, fault.Node, fault.Loses, fault.Loses, 565, rv | rb, "RESTART_BM"},
		{80, fault.Application, fault.None, fault.None, 0, qu | rb, "RESTART_APP"},
		{92, fault.Contained, fault.Degrades, fault.Degrades, 0, qu | rb, "IGNORE"},
		{94, fault.Contained, fault.Degrades, fault.Degrades, 565, dv | rv | rb, "RESTART_APP"},
		{95, fault.Reset, fault.Withdraws, fault.Withdraws, 565, dv | rv | rb, "RESET_GPU"},
		{109, fault.Suspect, fault.Degrades, fault.Degrades, 570, dv | rv | rb, "RESET_GPU"},
		{110, fault.Reset, fault.Withdraws, fault.Withdraws, 565, rv | rb, "RESET_GPU"},
		{119, fault.Reset, fault.Withdraws, fault.Withdraws, 0, rv | rb, "RESET_GPU"},
		{120, fault.Reset, fault.Withdraws, fault.Withdraws, 565, rv | rb, "RESET_GPU"},
		{121, fault.Info, fault.Degrades, fault.Degrades, 0, rv | rb | qu, "IGNORE"},
		{136, fault.Fabric, fault.Withdraws, fault.Withdraws, 565, rv | rb, "RESET_GPU"},
		{140, fault.Reset, fault.Withdraws, fault.Withdraws, 0, rv | rb, "RESET_GPU"},
		{143, fault.Reset, fault.Withdraws, fault.Withdraws, 575, rv | rb, "RESET_GPU"},
		{144, fault.Fabric, fault.Degrades, fault.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK5_ERR"},
		{147, fault.Info, fault.None, fault.None, 565, 0, "WORKFLOW_NVLINK5_ERR"},
		{149, fault.Fabric, fault.Degrades, fault.Withdraws, 565, dv | rv | rb, "WORKFLOW_NVLINK5_ERR"},
		{151, fault.Node, fault.Withdraws, fault.Withdraws, 0, rb, "RESTART_VM"},
		{154, fault.Trigger, fault.None, fault.None, 0, 0, "XID_154"},
		{155, fault.Fabric, fault.Degrades, fault.Degrades, 565, dv | lc | rb, "RESET_GPU"},
		{156, fault.Reset, fault.Withdraws, fault.Withdraws, 565, dv | rv | rb, "RESET_GPU"},
		{157, fault.Contained, fault.Degrades, fault.Degrades, 0, 0, "IGNORE"},
		{158, fault.Reset, fault.Withdraws, fault.Withdraws, 1, rv | rb, "RESET_GPU"},
		{159, fault.Reset, fault.Degrades, fault.Withdraws, 1, dv | rv | rb, "CHECK_UVM"},
		{160, fault.Contained, fault.Degrades, fault.Degrades, 575, lc | rv | rb, "IGNORE"},
		{161, fault.Contained, fault.Degrades, fault.Degrades, 575, 0, "IGNORE"},
		{165, fault.Info, fault.Degrades, fault.Degrades, 0, 0, ""},
		{166, fault.Fabric, fault.Degrades, fault.Degrades, 0, dv | rv | rb, ""},
		{167, fault.Reset, fault.Withdraws, fault.Withdraws, 0, rv | rb, ""},
		{168, fault.Contained, fault.Degrades, fault.Degrades, 0, rv | rb, ""},
		{171, fault.Reset, fault.Withdraws, fault.Withdraws, 0, dv | rv | rb, ""},
		{173, fault.Fabric, fault.Withdraws, fault.Withdraws, 0, rv | rb, ""},
		{175, fault.Reset, fault.Withdraws, fault.Withdraws, 0, rv | rb, ""},
		{176, fault.Contained, fault.Degrades, fault.Degrades, 0, qu | rb, ""},
		{177, fault.Contained, fault.Degrades, fault.Degrades, 0, rv | rb, ""},
		{178, fault.Suspect, fault.Degrades, fault.Degrades, 0, dv | rv | rb | qu, ""},
		{185, fault.Contained, fault.Degrades, fault.Degrades, 0, rv | rb, ""},
		{999, fault.Suspect, fault.Degrades, fault.Degrades, 0, dv | rv | rb | qu, ""},
	} {
		r := fault.XID(tc.xid)
		if r.Code != tc.xid || r.Class != tc.class || r.Effect != tc.effect || r.Settled != tc.settled ||
			r.RecoveryActionSince != tc.since || r.Clears != tc.clears || r.Immediate != tc.immediate {
			t.Errorf("XID %d = %+v, want %+v", tc.xid, r, tc)
		}
	}
}

func TestRareColumns(t *testing.T) {
	for r := range all {
		var want fault.Rule
		switch {
		case r.Name == "NVLINK_ERROR":
			want.LinkedOnly = true
		case r.Name == "PBDMA_PUSHBUFFER_CRC_MISMATCH":
			want.Again, want.AgainEffect = time.Hour, fault.Degrades
		case r.Name == "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR":
			want.Again, want.AgainEffect = 10*time.Minute, fault.Withdraws
		case r.Code == 63, r.Name == "nvmlEventTypeDramRetirementEvent":
			want.Level = fault.LevelMemoryRepair
		case r.Code == 160:
			want.Level = fault.LevelResourceRepair
		case r.Code == 155:
			want.Level = fault.LevelLinks
		}
		got := fault.Rule{LinkedOnly: r.LinkedOnly, Again: r.Again, AgainEffect: r.AgainEffect, Level: r.Level}
		if got != want {
			t.Errorf("%s: %+v, want %+v", name(r), got, want)
		}
	}
}

// The catalogue has 1 to 172, the driver's own sources 173 to 177 and 185: each is there, and once.
func TestTableIsComplete(t *testing.T) {
	want := uint64(1)
	for r := range fault.XIDs() {
		if r.Code != want {
			t.Fatalf("%s follows %d", name(r), want-1)
		}
		if want++; want == 178 {
			want = 185
		}
		if got := fault.XID(r.Code); got != r {
			t.Errorf("XID(%d) = %+v, the table says %+v", r.Code, got, r)
		}
		if r.Name == "" || strings.ContainsAny(r.Name, " %|") {
			t.Errorf("%s: no mnemonic", name(r))
		}
	}
	if want != 186 {
		t.Errorf("the table ends before %d", want)
	}
	names := make(map[string]uint64)
	for r := range fault.XIDs() {
		if other, taken := names[r.Name]; taken {
			t.Errorf("%s is also %d", name(r), other)
		}
		names[r.Name] = r.Code
	}
}

func TestUnknownCodes(t *testing.T) {
	for _, code := range []uint64{0, 178, 184, 186, 998, 999, math.MaxUint64} {
		r := fault.XID(code)
		if r.Code != code || r.Class != fault.Suspect || r.Name != "" || r.Effect != fault.Degrades {
			t.Errorf("XID(%d) = %+v", code, r)
		}
		if r.Meaning == fault.XID(1).Meaning {
			t.Errorf("XID(%d) is called %q", code, r.Meaning)
		}
	}
	if fault.XID(999).Meaning == fault.XID(178).Meaning {
		t.Error("999 is what NVML says when it can't tell, not a code that we don't know")
	}
}

func TestEngineNumbers(t *testing.T) {
	for xid, want := range map[uint64]string{
		39: "CE0", 41: "CE2", 70: "CE3", 72: "CE5", 75: "CE6", 77: "CE8", 85: "CE9", 126: "CE10", 135: "CE19",
		68: "NVDEC0", 83: "NVDEC1", 84: "NVDEC2", 88: "NVDEC3", 89: "NVDEC4", 96: "NVDEC5", 98: "NVDEC7",
		82: "NVJPG0", 99: "NVJPG1", 105: "NVJPG7", 86: "OFA0", 139: "OFA1",
	} {
		if got := fault.XID(xid); got.Name != "ROBUST_CHANNEL_"+want+"_ERROR" || got.Class != fault.Application {
			t.Errorf("XID %d is %+v, want %s", xid, got, want)
		}
	}
}

func TestEvents(t *testing.T) {
	for _, tc := range []struct {
		kind   uint64
		class  fault.Class
		effect fault.Effect
		since  int
		clears fault.Evidence
	}{
		{0x200, fault.Contained, fault.Degrades, 0, qu | rb},
		{0x400, fault.Contained, fault.Degrades, 565, lc | dv | rv | rb},
		{0x800, fault.Reset, fault.Withdraws, 565, rv | rb},
		{0x1000, fault.Contained, fault.Degrades, 565, dv | rv | rb},
		{0x2000, fault.Reset, fault.Withdraws, 565, dv | rv | rb},
		{0x4000, fault.Reset, fault.Withdraws, 0, rv | rb},
	} {
		r, is := fault.Event(tc.kind)
		if !is || r.Code != tc.kind || r.Class != tc.class || r.Effect != tc.effect || r.Settled != tc.effect ||
			r.RecoveryActionSince != tc.since || r.Clears != tc.clears {
			t.Errorf("Event(%#x) = %+v, %t, want %+v", tc.kind, r, is, tc)
		}
	}
	for _, hint := range []uint64{0, 0x1, 0x2, 0x4, 0x8, 0x10, 0x80, 0x100, 0x8000, 0x600} {
		if r, is := fault.Event(hint); is {
			t.Errorf("Event(%#x) = %+v, want none", hint, r)
		}
	}
	var kinds []uint64
	for r := range fault.Events() {
		kinds = append(kinds, r.Code)
	}
	if want := []uint64{0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000}; !slices.Equal(kinds, want) {
		t.Errorf("events are %#x, want %#x", kinds, want)
	}
}

func TestWholeGPU(t *testing.T) {
	for r := range all {
		want := map[fault.Class]bool{fault.Reset: true, fault.Node: true, fault.Fabric: true}[r.Class]
		if got := r.WholeGPU(); got != want {
			t.Errorf("%s (%s) concerns the whole GPU: %t", name(r), r.Class, got)
		}
	}
}

func TestWords(t *testing.T) {
	for set, want := range map[fault.Evidence]string{
		0:                 "operator",
		rb:                "reboot",
		rv | rb:           "reset seen or reboot",
		dv | rv | rb:      "driver verdict None, reset seen or reboot",
		rb | lc | qu:      "reboot, condition gone or no repeat for a while",
		dv | rv | rb | qu: "driver verdict None, reset seen, reboot or no repeat for a while",
	} {
		if got := set.String(); got != want {
			t.Errorf("%#b is %q, want %q", set, got, want)
		}
	}
	if got := fmt.Sprint(fault.Application, fault.Contained, fault.Reset, fault.Node, fault.Fabric, fault.Info, fault.Suspect, fault.Trigger); got != "application contained reset node fabric info suspect trigger" {
		t.Error(got)
	}
	if got := fmt.Sprint(fault.None, fault.Degrades, fault.Withdraws, fault.Loses); got != "none degraded unhealthy lost" {
		t.Error(got)
	}
	if got := fmt.Sprintf("%s/%s/%s/%s", fault.LevelNone, fault.LevelMemoryRepair, fault.LevelResourceRepair, fault.LevelLinks); got != "/memory repair pending/resource repair pending/link down" {
		t.Error(got)
	}
}

// What is said about a fault goes into one line beside a GPU's name.
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
