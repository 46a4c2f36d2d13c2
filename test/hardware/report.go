package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tandem-gpu/tandem/test/hardware/compare"
	"github.com/tandem-gpu/tandem/test/hardware/record"
)

// Result is the result of a check.
type Result string

// The results.
const (
	OK      Result = "ok"
	Failed  Result = "FAILED"
	Note    Result = "note"     // to be read; no fault of an agent
	LeftOut Result = "left out" // it could not be made here
)

// Check is one check.
type Check struct {
	Part   string `json:"part"`
	Name   string `json:"check"`
	Result Result `json:"result"`
	Detail string `json:"detail,omitempty"`
}

// Report is the report of a run.
type Report struct {
	Date    time.Time `json:"date"`
	Seconds float64   `json:"seconds"`
	Root    bool      `json:"root"`
	Machine string    `json:"machine,omitempty"` // "simulated driver" if it is one
	Driver  string    `json:"driver"`
	CUDA    string    `json:"cuda"`
	GPUs    []string  `json:"gpus"` // names

	Checks      []Check             `json:"checks"`
	Values      []compare.Row       `json:"values"`
	Answers     []record.Answer     `json:"answers"`
	Model       string              `json:"simulatedModel,omitempty"` // machine of the simulated driver with the same GPU
	Differences []record.Difference `json:"differencesFromModel"`

	terminal io.Writer
	Parts    map[string]float64 `json:"partSeconds"`
	files    map[string]string  // by name, written beside the report
}

func newReport(out io.Writer) *Report {
	return &Report{
		Date: time.Now(), Root: os.Getuid() == 0, terminal: out, Parts: map[string]float64{}, files: map[string]string{},
		Differences: []record.Difference{},
	}
}

// add adds a check, and prints it.
func (r *Report) add(part, name string, result Result, detail string) {
	r.Checks = append(r.Checks, Check{part, name, result, detail})
	line := fmt.Sprintf("%-8s  %-12s  %s", result, part, name)
	if detail != "" {
		line += ": " + strings.ReplaceAll(strings.TrimSpace(detail), "\n", "\n"+strings.Repeat(" ", 24))
	}
	fmt.Fprintln(r.terminal, line)
}

// check adds a check that an error fails.
func (r *Report) check(part, name, detail string, err error) bool {
	if err != nil {
		r.add(part, name, Failed, err.Error())
		return false
	}
	r.add(part, name, OK, detail)
	return true
}

// timed runs a part.
func (r *Report) timed(part string, run func()) {
	began := time.Now()
	run()
	r.Parts[part] = time.Since(began).Seconds()
}

// Bad counts checks that failed.
func (r *Report) Bad() int {
	n := 0
	for _, c := range r.Checks {
		if c.Result == Failed {
			n++
		}
	}
	return n
}

// addValues adds a comparison: a check for each result.
func (r *Report) addValues(rows []compare.Row) {
	const part = "values"
	r.Values = rows
	count := map[compare.Result]int{}
	var bad []string
	for _, row := range rows {
		count[row.Result]++
		switch {
		case row.Result == compare.NotListed:
			bad = append(bad, fmt.Sprintf("%s is not listed by %s", r.label(row.Device), row.Source))
		case row.Bad():
			bad = append(bad, fmt.Sprintf("%s %s: %s has %s, nvidia-smi has %s%s",
				r.label(row.Device), row.Value, row.Source, quoted(row.Ours), quoted(row.SMI), within(row)))
		}
	}
	var parts []string
	for _, result := range []compare.Result{compare.Equal, compare.Within, compare.OnlyOurs, compare.OnlySMI} {
		parts = append(parts, fmt.Sprintf("%d %s", count[result], result))
	}
	r.add(part, "compared with nvidia-smi", Note, strings.Join(parts, ", "))
	for _, text := range bad {
		r.add(part, "differs", Failed, text)
	}
	if len(bad) == 0 {
		r.add(part, "nothing differs", OK, fmt.Sprint(len(rows), " values"))
	}
}

func quoted(text string) string { return cmp.Or(text, "nothing") }

func within(row compare.Row) string {
	if row.Why == "" {
		return ""
	}
	return " (" + row.Why + ")"
}

// label is a device in texts: a GPU by its index.
func (r *Report) label(device string) string {
	if device == "" {
		return "machine"
	}
	for _, row := range r.Values {
		if row.Device == device && row.Value == compare.Index {
			return "GPU " + cmp.Or(row.SMI, row.Ours)
		}
	}
	return device
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// folder is the name of the folder of the report: "2026-11-22-nvidia-h100-80gb-hbm3".
func (r *Report) folder() string {
	name := "gpu"
	if len(r.GPUs) > 0 {
		name = r.GPUs[0]
	}
	return r.Date.Format("2006-01-02-1504-") + strings.Trim(notInNames.ReplaceAllString(strings.ToLower(name), "-"), "-")
}

// write writes the report into its folder beneath out, and returns the folder.
func (r *Report) write(out string) (string, error) {
	dir := filepath.Join(out, r.folder())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return "", err
	}
	r.files["report.json"], r.files["section.md"], r.files["values.txt"] = string(text)+"\n", r.Markdown(), r.table()
	for name, text := range r.files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// table is every value, a line each.
func (r *Report) table() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "DEVICE\tVALUE\tSOURCE\tHERE\tNVIDIA-SMI\tRESULT")
	for _, row := range r.Values {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s%s\n", r.label(row.Device), row.Value, row.Source, cmp.Or(row.Ours, "-"), cmp.Or(row.SMI, "-"), row.Result, within(row))
	}
	_ = w.Flush() // into memory
	return b.String()
}

// kinds are the names of the GPUs with their number: "8x NVIDIA H100 80GB HBM3".
func (r *Report) kinds() string {
	var texts []string
	for _, name := range slices.Compact(slices.Sorted(slices.Values(r.GPUs))) {
		n := 0
		for _, g := range r.GPUs {
			if g == name {
				n++
			}
		}
		texts = append(texts, fmt.Sprintf("%dx %s", n, name))
	}
	return strings.Join(texts, ", ")
}
