package report

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// WriteTable writes the report for people.
func (r Report) WriteTable(w io.Writer) error {
	if r.Driver.Reason != "" {
		fmt.Fprintf(w, "driver %s: %s\n", r.Driver.State, r.Driver.Reason)
	} else {
		fmt.Fprintf(w, "driver %s %s, CUDA %s, %d devices%s, %d excluded\n",
			r.Driver.State, r.Driver.Version, r.Driver.CUDA, len(r.Devices), r.units(), len(r.Excluded))
	}
	for _, note := range r.Warnings {
		fmt.Fprintf(w, "note: %s\n", note)
	}
	for _, finding := range r.PolicyWarnings {
		fmt.Fprintf(w, "policy: %s\n", finding)
	}
	if err := r.writeDevices(w); err != nil {
		return err
	}
	for _, b := range r.Bindings {
		fmt.Fprintf(w, "bound: %s\n", b)
	}
	r.writeWarnings(w)
	if len(r.Conditions) > 0 {
		fmt.Fprint(w, "\nCONDITIONS\n")
	}
	for _, c := range r.Conditions {
		if _, err := io.WriteString(w, c.Text()); err != nil {
			return err
		}
	}
	return r.writeCounts(w)
}

func (r Report) writeDevices(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(r.Devices) > 0 {
		fmt.Fprintln(t, "GPU\tID\tPCI\tNUMA\tMEMORY\tHEALTH\tPOOL\tMODEL")
	}
	for _, d := range r.Devices {
		numa := "-"
		if d.NUMANode >= 0 {
			numa = strconv.Itoa(d.NUMANode)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d MiB\t%s\t%s\t%s\n", d.number(), d.ID, d.PCI, numa, d.MemoryBytes>>20, r.standing(d),
			d.pool(), strings.TrimPrefix(d.Model, "NVIDIA "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, e := range r.Excluded {
		name := e.ID
		if name == "" {
			name = string(e.PCI)
		}
		fmt.Fprintf(w, "not offered: %s: %s\n", strings.TrimSpace(fmt.Sprintf("GPU %d %s", e.Index, name)), e.Reason)
	}
	for _, c := range r.Overlaps {
		fmt.Fprintf(w, "contested: GPU %d %s: also offered by %s\n", c.Index, c.ID, c.By)
	}
	return nil
}

// units says how many there are, if not one to each device.
func (r Report) units() string {
	n := 0
	for _, d := range r.Devices {
		n += max(d.Replicas, 1)
	}
	if n == len(r.Devices) {
		return ""
	}
	return fmt.Sprintf(" as %d units", n)
}

// number is the index of the device, with the one by which a policy selects it if that is another.
func (d Device) number() string {
	if d.Number == "" {
		return d.index()
	}
	return d.index() + " (policy: " + d.Number + ")"
}

// index is the device as the driver numbers it: "0", or "0:1" for a MIG instance.
func (d Device) index() string {
	if d.Instance == nil {
		return strconv.Itoa(d.Index)
	}
	return fmt.Sprintf("%d:%d", d.Index, *d.Instance)
}

// pool is what a request names, and how the device is shared: "gpu.shared, time-slicing by 4".
func (d Device) pool() string {
	if d.Replicas == 0 {
		return d.Pool
	}
	return fmt.Sprintf("%s, %s by %d", d.Pool, d.Sharing, d.Replicas)
}

// standing is the health of a device in few words: with its cause only where no condition tells more of it.
func (r Report) standing(d Device) string {
	text := d.State.String()
	if d.Cause != "" && !slices.ContainsFunc(r.Conditions, func(c Condition) bool {
		return c.Cause == d.Cause && (c.GPU == d.GPU || c.GPU == "")
	}) {
		text += " " + d.Cause
	}
	if d.Simulated {
		text = "simulated: " + text
	}
	if d.Advisory {
		text = "observed: " + text
	}
	return text
}

// writeWarnings says what can't be seen of devices and which nodes they lack, once for all GPUs of which it is the same.
func (r Report) writeWarnings(w io.Writer) {
	r.writeOnce(w, "health limited", func(d Device) string { return d.Limits })
	r.writeOnce(w, "device nodes missing", func(d Device) string {
		if len(d.MissingNodes) == 0 {
			return ""
		}
		return strings.Join(d.MissingNodes, ", ") + ": run " + d.CreateNodes
	})
}

// writeOnce writes a line for each text that devices have, with their GPUs: "health limited (GPU 0, 1): no XID events".
func (r Report) writeOnce(w io.Writer, head string, text func(Device) string) {
	var texts []string
	gpus := map[string][]string{} // by text
	for _, d := range r.Devices {
		t, n := text(d), strconv.Itoa(d.Index)
		if t == "" {
			continue
		}
		if gpus[t] == nil {
			texts = append(texts, t)
		}
		if !slices.Contains(gpus[t], n) {
			gpus[t] = append(gpus[t], n)
		}
	}
	for _, t := range texts {
		fmt.Fprintf(w, "%s (GPU %s): %s\n", head, strings.Join(gpus[t], ", "), t)
	}
}

func (r Report) writeCounts(w io.Writer) error {
	if len(r.Counts) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nGPU\tREPORTED\tTIMES\tLAST")
	for _, c := range r.Counts {
		fmt.Fprintf(t, "%d\t%s\t%d\t%s\n", c.Index, c.Cause, c.Count, stamp(c.Last))
	}
	return t.Flush()
}

// Text is the condition for people: a line that names it, and indented ones that say more.
func (c Condition) Text() string {
	var b strings.Builder
	effect := c.State.String()
	if c.Noted {
		effect = "noted, no effect yet"
	}
	if c.Simulated {
		effect = "simulated: " + effect
	}
	fmt.Fprintf(&b, "%s  %s  %s  since %s", c.where(), c.Cause, effect, stamp(c.Since))
	if c.Last.After(c.Since) {
		fmt.Fprintf(&b, ", %d times, last %s", c.Count, stamp(c.Last))
	}
	b.WriteByte('\n')
	for _, line := range []struct{ head, text string }{
		{"", c.Detail}, {"action: ", c.Action}, {"clears: ", c.Clears}, {"", c.progress()},
	} {
		if line.text != "" {
			fmt.Fprintf(&b, "    %s%s\n", line.head, line.text)
		}
	}
	return b.String()
}

// where is the placement with the GPU's index in front of its UUID, as the table has it.
func (c Condition) where() string {
	if c.Index < 0 {
		return c.At
	}
	return fmt.Sprintf("GPU %d%s", c.Index, strings.TrimPrefix(c.At, string(c.GPU)))
}

// progress says what stands between the condition and its end.
func (c Condition) progress() string {
	switch {
	case c.Disregarded:
		return "cleared by an operator: ignored until it is gone"
	case !c.IgnoredUntil.IsZero():
		return "ignored until " + stamp(c.IgnoredUntil)
	case c.Recovering != nil:
		return c.Recovering.String()
	}
	return ""
}

// String is the progress in words: "recovering: 2 of 3 checks, 40 s of 60 s".
func (r Recovery) String() string {
	return fmt.Sprintf("recovering: %d of %d checks, %d s of %d s", r.Checks, r.ChecksWanted, r.Held, r.HeldWanted)
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }

// String names the condition in one line: "GPU 3 XID_95 (uncontained memory error)".
func (c Condition) String() string {
	text := c.where() + " " + c.Cause
	if c.Detail != "" {
		text += " (" + c.Detail + ")"
	}
	if c.Simulated {
		text = "simulated: " + text
	}
	return text
}
