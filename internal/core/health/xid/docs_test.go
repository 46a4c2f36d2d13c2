package xid_test

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const (
	document  = "../../../../docs/faults.md"
	generated = "<!-- Generated from internal/core/health/xid by `go test ./internal/core/health/xid -update`; do not edit. The text above the tables is testdata/preface.md of that package. -->\n\n"
)

// severities is the text above the table of severities.
const severities = "The driver's line in the kernel log names the unit and the severity of these faults, such as " +
	"`NETIR_BER_EVENT Nonfatal`. NVML reports only the XID.\nWith both, the line decides. Without a line, or with a line " +
	"of another form, the rows above count. An effect that an operator has set for the XID is for every severity.\n\n" +
	"- **nonfatal**: NVIDIA's table has IGNORE, or what XID 154 names. For bit errors (`NETIR_BER_EVENT`) look at the cables.\n" +
	"- **link-taken-down**: `NETIR_LINK_EVT` or `NETIR_LINK_DOWN` with one of the two reasons for which the table has IGNORE " +
	"(`100110` and `101000` in bits 20 to 25 of the first word).\n" +
	"- **fatal**: the table has RESET_GPU. `RLW_RXPIPE Nonfatal` is fatal, too, if its first word has the bit of the table's action 2.\n\n"

// TestDocument compares docs/faults.md, which has every column of every rule, with the preface and the table.
func TestDocument(t *testing.T) {
	preface, err := os.ReadFile("testdata/preface.md")
	if err != nil {
		t.Fatal(err)
	}
	goldenfile.Compare(t, document, generated+string(preface)+sections())
}

func sections() string {
	var known, unused []xid.Rule
	for r := range xid.XIDs() {
		like := xid.XID(999)
		like.Code, like.Name, like.Meaning, like.Immediate = r.Code, r.Name, r.Meaning, "CONTACT_SUPPORT"
		if r == like {
			unused = append(unused, r)
		} else {
			known = append(known, r)
		}
	}
	var b strings.Builder
	b.WriteString("\n## XIDs\n\n")
	table(&b, "XID", known, func(code uint64) string { return fmt.Sprint(code) })

	b.WriteString("\n## XIDs 144 to 150 by severity\n\n")
	b.WriteString(severities)
	b.WriteString("| severity | class | effect | without recovery action | cleared by | action |\n|---|---|---|---|---|---|\n")
	for _, s := range []xid.Severity{xid.Nonfatal, xid.LinkTakenDown, xid.Fatal} {
		r := xid.Named(149, s)
		cells := []string{string(s), r.Class.String(), r.Effect.String(), settled(r), cmp.Or(clears(r), "-"), cmp.Or(r.Action, "-")}
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
	}

	b.WriteString("\n## NVML events\n\n")
	b.WriteString("The first five correspond to XIDs 92, 63, 64, 94 and 95. Other event types are not faults: they cause a health check.\n\n")
	table(&b, "event", slices.Collect(xid.Events()), func(code uint64) string { return fmt.Sprintf("%#x", code) })

	r := xid.XID(999)
	b.WriteString("\n## XIDs without a known meaning\n\n")
	fmt.Fprintf(&b, "These, 999 (%s) and every number that is in no table are %s: %s until the driver reports a recovery action; cleared by %s; action: %s.\n",
		r.Meaning, r.Class, r.Effect, r.Clears, r.Action)
	b.WriteString("The catalogue lists them as unused since Ampere, with the action CONTACT_SUPPORT.\n\n| XID | name |\n|---|---|\n")
	for _, r := range unused {
		fmt.Fprintf(&b, "| %d | %s |\n", r.Code, r.Name)
	}
	return b.String()
}

func table(b *strings.Builder, kind string, rules []xid.Rule, code func(uint64) string) {
	fmt.Fprintf(b, "| %s | name | meaning | class | effect | without recovery action | recovery action since | cleared by | action | NVIDIA: immediate | NVIDIA: investigatory |\n", kind)
	b.WriteString(strings.Repeat("|---", 11) + "|\n")
	for _, r := range rules {
		cells := []string{
			code(r.Code), r.Name, r.Meaning, r.Class.String(), r.Effect.String(),
			settled(r), since(r), clears(r), r.Action, r.Immediate, r.Investigatory,
		}
		for i, cell := range cells {
			if cell == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
	}
}

func settled(r xid.Rule) string {
	text := "same"
	if r.SettledEffect != r.Effect {
		text = r.SettledEffect.String()
	}
	if r.NVLinkOnly {
		text += " (a GPU with NVLinks)"
	}
	if r.RepeatWindow > 0 {
		text += fmt.Sprintf("; a second one within %.0f min: %s", r.RepeatWindow.Minutes(), r.RepeatEffect)
	}
	return text
}

func since(r xid.Rule) string {
	switch r.RecoveryActionSince {
	case 0:
		return ""
	case 1:
		return "always"
	}
	return fmt.Sprintf("R%d", r.RecoveryActionSince)
}

func clears(r xid.Rule) string {
	if worst(r) == xid.None && r.Clears == 0 {
		return ""
	}
	signs := r.Clears
	if signs != 0 && r.RecoveryActionSince == 1 {
		signs |= xid.NoRecoveryAction
	}
	text := signs.String()
	if r.Level != xid.LevelNone {
		text += fmt.Sprintf(" (%s)", r.Level)
	}
	if signs != 0 && signs&xid.NoRecoveryAction == 0 && r.RecoveryActionSince > 1 { // internal/core shows that the ledger does so
		text += fmt.Sprintf("; from %s on also %s", since(r), xid.NoRecoveryAction)
	}
	return text
}
