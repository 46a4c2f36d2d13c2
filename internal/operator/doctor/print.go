package doctor

import (
	"fmt"
	"io"
	"strings"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// Write prints findings for operators: problems first, then warnings and notes, each with place and remedy. What is in order is one
// line of names, with all one line each.
func Write(w io.Writer, findings []Finding, all bool) error {
	var b strings.Builder
	var fine, skipped []string
	for _, f := range findings {
		if f.Severity == OK && !all {
			fine = append(fine, f.Check)
			continue
		}
		if f.Severity == Skipped {
			skipped = append(skipped, f.Check)
			continue
		}
		label := string(f.Severity)
		if f.Severity == Problem || f.Severity == Warning {
			label = strings.ToUpper(label)
		}
		fmt.Fprintf(&b, "%-7s  %s: %s\n", label, f.Check, f.Found)
		if f.Severity != OK {
			fmt.Fprintf(&b, "         at: %s\n", f.Place)
		}
		if f.Remedy != "" {
			fmt.Fprintf(&b, "         do: %s\n", f.Remedy)
		}
	}
	if len(skipped) > 0 {
		fmt.Fprintf(&b, "skipped  %s: not possible because of what is broken above\n", strings.Join(skipped, ", "))
	}
	if len(fine) > 0 {
		fmt.Fprintf(&b, "ok       %s\n", strings.Join(fine, ", "))
	}
	fmt.Fprintf(&b, "\n%s, %s\n", report.Noun(Problems(findings), "problem"), report.Noun(count(findings, Warning), "warning"))
	_, err := io.WriteString(w, oneline.Printable(b.String())) // it may have names that other programs chose
	return err
}

// WriteJSON prints findings for programs.
func WriteJSON(w io.Writer, findings []Finding) error {
	return report.WriteJSON(w, struct {
		Problems int       `json:"problems"`
		Warnings int       `json:"warnings"`
		Findings []Finding `json:"findings"`
	}{Problems(findings), count(findings, Warning), findings})
}
