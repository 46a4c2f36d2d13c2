package report

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/terminal"
)

// historyLines is how many rescues the text has; the JSON has all.
const historyLines = 10

// WriteText writes the document for a terminal: what needs a person first. A line is cut at the width of the terminal, if w is one.
func (d Document) WriteText(w io.Writer) { d.text(w, width(w)) }

// width is that of a terminal; 0 = w is none.
func width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		columns, _, _ := terminal.Size(f)
		return columns
	}
	return 0
}

func (d Document) text(w io.Writer, columns int) {
	t := newTables(w, columns, d.At)
	t.head(d)
	t.alerts(d.Alerts)
	t.clusters(d.Clusters)
	t.nodes(d.Nodes)
	t.acts("ACTS DUE", d.Acts)
	t.marks("MARKS DUE", d.Marks)
	t.waits(d.Waits)
	t.refusals(d.Refusals)
	t.free(d.Free)
	t.budget(d.Budget, d.Ledger)
	t.history(d.History)
}

// tables writes sections of text.
type tables struct {
	out     io.Writer
	columns int // 0 = lines are not cut
	now     time.Time
}

func newTables(w io.Writer, columns int, now time.Time) *tables { return &tables{w, columns, now} }

func (t *tables) line(format string, args ...any) { t.cut(fmt.Sprintf(format, args...)) }

// cut writes a line, at most as long as the terminal is wide.
func (t *tables) cut(line string) {
	line = strings.TrimRight(line, " ")
	if t.columns > 1 && utf8.RuneCountInString(line) > t.columns {
		line = string([]rune(line)[:t.columns-1]) + "…"
	}
	fmt.Fprintln(t.out, line)
}

// table writes a table under a title; without rows it writes nothing.
func (t *tables) table(title, head string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	var b strings.Builder
	columns := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, head)
	for _, r := range rows {
		for i := range r {
			r[i] = cmp.Or(printable(r[i]), "-")
		}
		fmt.Fprintln(columns, strings.Join(r, "\t"))
	}
	_ = columns.Flush() // a strings.Builder does not fail
	t.cut("")
	t.cut(title)
	for line := range strings.Lines(b.String()) {
		t.cut(strings.TrimSuffix(line, "\n"))
	}
}

// printable is a text in one line, without what a terminal would act on: names and answers are of others.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, text)
}

func (t *tables) head(d Document) {
	leads := "no process is known to lead"
	switch {
	case d.Leads:
		leads = "this process (" + d.Identity + ") leads"
	case d.Leader != "":
		leads = d.Leader + " leads"
	}
	t.line("gpu-fleet at %s: %s", stamp(d.At), leads)
	nodes, gpus, faulty, held := 0, 0, 0, 0
	for _, c := range d.Clusters {
		nodes, gpus, faulty, held = nodes+c.Nodes, gpus+c.GPUs, faulty+c.FaultyGPUs, held+c.HeldGPUs
	}
	t.line("%d nodes, %d GPUs: %d out of service, %d held; %d acts due, %d waits, %d refused", nodes, gpus, faulty, held, len(d.Acts), len(d.Waits), len(d.Refusals))
}

func (t *tables) alerts(all []Alert) {
	var rows [][]string
	for _, a := range all {
		rows = append(rows, []string{a.Code, a.where(), a.String()})
	}
	t.table("NEEDS A PERSON", "CODE\tWHERE\tWHAT", rows)
}

func (t *tables) clusters(all []Cluster) {
	var rows [][]string
	for _, c := range all {
		read := "never"
		if !c.ReadAt.IsZero() {
			read = span(t.now.Sub(c.ReadAt)) + " ago"
		}
		rows = append(rows, []string{c.Name, string(c.Kind), c.Mode.String(), fmt.Sprint(c.Nodes), fmt.Sprint(c.GPUs), fmt.Sprint(c.FaultyGPUs), fmt.Sprint(c.HeldGPUs), read, c.Problem})
	}
	t.table("CLUSTERS", "NAME\tKIND\tMODE\tNODES\tGPUS\tFAULTY\tHELD\tREAD\tPROBLEM", rows)
}

// nodes writes the GPUs with faults, and the nodes that are not as they should be.
func (t *tables) nodes(all []Node) {
	var gpus, nodes [][]string
	for i := range all {
		n := &all[i]
		if state := n.state(); state != "" {
			nodes = append(nodes, []string{n.Cluster, n.Name, state})
		}
		for _, g := range n.GPUs {
			if g.Health == health.Healthy && len(g.Faults) == 0 {
				continue
			}
			gpus = append(gpus, []string{n.Cluster, n.Name, string(g.ID), g.Health.String(), t.faults(g.Faults), holders(g.Holders)})
		}
	}
	t.table("FAULTY GPUS", "CLUSTER\tNODE\tGPU\tHEALTH\tFAULTS\tHELD BY", gpus)
	t.table("NODES", "CLUSTER\tNODE\tSTATE", nodes)
}

// state is what is not as it should be with a node; "" = nothing.
func (n *Node) state() string {
	var all []string
	if !n.Ready {
		all = append(all, "not ready")
	}
	if n.Draining {
		all = append(all, "draining")
	}
	if !n.Schedulable {
		all = append(all, "takes no new work")
	}
	if n.Mark != health.NoRepair {
		whose := "by another program or person"
		if n.MarkIsOurs {
			whose = "by gpu-fleet"
		}
		all = append(all, "marked for "+n.Mark.String()+" "+whose)
	}
	for _, f := range n.Faults {
		all = append(all, f.Cause)
	}
	return strings.Join(all, ", ")
}

func (t *tables) faults(all []Fault) string {
	var texts []string
	for _, f := range all {
		text := f.Cause
		if f.At != "" {
			text += " (" + f.At + ")"
		}
		if f.Simulated {
			text += " simulated"
		}
		if f.Advisory {
			text += " reported only"
		}
		if f.Unconfirmed {
			text += " unconfirmed"
		}
		if f.Repair != health.NoRepair {
			text += ": " + f.Repair.String()
		}
		if !f.Since.IsZero() {
			text += ", for " + span(t.now.Sub(f.Since))
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}

func holders(all []Holder) string {
	var names []string
	for _, h := range all {
		if name := h.Namespace + "/" + h.Name; !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

func (t *tables) acts(title string, all []Act) {
	var rows [][]string
	for _, a := range all {
		what := "move"
		if a.Listed {
			what = "list only"
		}
		if a.Victims > 0 {
			what += fmt.Sprintf(", ends %d of lower priority", a.Victims)
		}
		rows = append(rows, []string{a.Cluster, a.Node, string(a.GPU), a.Cause, workloads(a.Workloads), what})
	}
	t.table(title, "CLUSTER\tNODE\tGPU\tCAUSE\tWORK\tACT", rows)
}

func workloads(all []Workload) string {
	var names []string
	for _, w := range all {
		names = append(names, cmp.Or(strings.Trim(w.Namespace+"/"+w.Name, "/"), w.ID))
	}
	return strings.Join(names, ", ")
}

func (t *tables) marks(title string, all []Mark) {
	var rows [][]string
	for _, m := range all {
		what := "remove the mark"
		if m.Repair != health.NoRepair {
			what = "mark for " + m.Repair.String()
		}
		if m.Eligible != nil {
			what += map[bool]string{true: ", make eligible", false: ", make ineligible"}[*m.Eligible]
		}
		if m.Listed {
			what += " (list only)"
		}
		rows = append(rows, []string{m.Cluster, m.Node, what})
	}
	t.table(title, "CLUSTER\tNODE\tCHANGE", rows)
}

func (t *tables) waits(all []Wait) {
	var rows [][]string
	for _, w := range all {
		until := "something changes"
		switch {
		case w.Alert:
			until = "a person acts"
		case !w.Until.IsZero():
			until = stamp(w.Until)
		}
		rows = append(rows, []string{string(w.Reason), w.where(), w.Name, until, w.Text})
	}
	t.table("WAITS", "REASON\tWHERE\tWORK\tUNTIL\tWHY", rows)
}

func (t *tables) refusals(all []Refusal) {
	var rows [][]string
	for _, r := range all {
		rows = append(rows, []string{string(r.Reason), r.where(), r.Name, r.Text})
	}
	t.table("NOT MOVED", "REASON\tWHERE\tWORK\tWHY", rows)
}

func (t *tables) free(all []Subject) {
	var rows [][]string
	for _, s := range all {
		rows = append(rows, []string{s.Cluster, s.Node, string(s.GPU), s.Cause})
	}
	t.table("FAULTY AND FREE", "CLUSTER\tNODE\tGPU\tCAUSE", rows)
}

func (t *tables) budget(b Budget, l Ledger) {
	rows := [][]string{used("nodes at a time", b.Nodes)}
	for _, group := range []struct {
		what string
		all  []Used
	}{{"GPUs of a node in an hour", b.GPUs}, {"attempts of a GPU in a day", b.Attempts}, {"nodes with one cause", b.Quorum}} {
		for _, u := range group.all {
			rows = append(rows, used(group.what, u))
		}
	}
	rows = append(rows, used("rescues in the ledger", b.Rescues), used("moves in the ledger", b.Moves),
		[]string{"bytes of the ledger", l.Where, fmt.Sprint(l.Bytes), "", fmt.Sprint(l.Limit), fmt.Sprint(max(0, l.Limit-l.Bytes))})
	t.table("BUDGET", "WHAT\tOF\tUSED\tLISTED\tLIMIT\tFREE", rows)
}

func used(what string, u Used) []string {
	listed := ""
	if u.Listed > 0 {
		listed = fmt.Sprint(u.Listed)
	}
	return []string{what, u.Of, fmt.Sprint(u.Used), listed, fmt.Sprint(u.Limit), fmt.Sprint(u.Free)}
}

func (t *tables) history(all []Rescue) {
	var rows [][]string
	for _, r := range all[:min(len(all), historyLines)] {
		for _, m := range r.Moves {
			rows = append(rows, []string{stamp(r.Reserved), r.Cluster, r.Node, string(r.GPU), r.Cause, workloads(m.Workloads), m.outcome(r.Listed), m.Answer})
		}
	}
	title := "HISTORY"
	if n := len(all) - historyLines; n > 0 {
		title += fmt.Sprintf(" (%d older ones: --json)", n)
	}
	t.table(title, "RESERVED\tCLUSTER\tNODE\tGPU\tCAUSE\tWORK\tOUTCOME\tANSWER", rows)
}

func (m Move) outcome(listed bool) string {
	text := m.Outcome.String()
	if listed && m.Outcome == rescue.Open {
		return rescue.Listed.String() // it is open for as long as an act would be under way
	}
	if !m.Ended.IsZero() && !m.Accepted.IsZero() && m.Outcome == rescue.Moved {
		text += " in " + span(m.Ended.Sub(m.Accepted))
	}
	return text
}

// where is "cluster/node GPU-... XID_95".
func (s Subject) where() string {
	at := strings.Trim(s.Cluster+"/"+s.Node, "/")
	return strings.Join(slices.DeleteFunc([]string{at, string(s.GPU), s.Cause}, func(p string) bool { return p == "" }), " ")
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }

// span is a duration for people: "40s", "12m", "3h", "2d".
func span(d time.Duration) string {
	switch {
	case d < 100*time.Second:
		return fmt.Sprintf("%ds", max(0, int(d.Seconds())))
	case d < 100*time.Minute:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
