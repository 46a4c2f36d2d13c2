package report

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// WriteTable writes the report as text for operators.
func (r Report) WriteTable(w io.Writer) error {
	if r.Driver.Reason != "" {
		fmt.Fprintf(w, "driver %s: %s\n", r.Driver.State, r.Driver.Reason)
	} else {
		fmt.Fprintf(w, "driver %s %s, CUDA %s%s, %d devices%s, %d excluded\n",
			r.Driver.State, r.Driver.Version, r.Driver.CUDA, r.Driver.reset(), len(r.hardware()), r.units(), len(r.Excluded))
	}
	for _, warning := range r.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	for _, warning := range r.PolicyWarnings {
		fmt.Fprintf(w, "policy warning: %s\n", warning)
	}
	if err := r.writeDevices(w); err != nil {
		return err
	}
	for _, b := range r.Bindings {
		fmt.Fprintf(w, "binding: %s\n", b)
	}
	r.writeInjection(w)
	r.writeDRA(w)
	r.writeLimits(w)
	if len(r.Conditions) > 0 {
		fmt.Fprint(w, "\nCONDITIONS\n")
	}
	for _, c := range r.Conditions {
		if _, err := io.WriteString(w, c.Text()); err != nil {
			return err
		}
	}
	if err := errors.Join(r.writeMemoryLimits(w), r.writeProofs(w), r.writeResets(w)); err != nil {
		return err
	}
	return r.writeCounts(w)
}

// NewTable returns a writer of the tables that commands print: cells end with tabs, and columns are as wide as their longest cell. Flush writes it.
func NewTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

func (r Report) writeDevices(w io.Writer) error {
	t := NewTable(w)
	if len(r.Devices) > 0 {
		fmt.Fprintln(t, "GPU\tID\tPCI\tNUMA\tMEMORY\tHEALTH\tPOOL\tMODEL")
	}
	for _, d := range r.Devices {
		numa := "-"
		if d.NUMANode >= 0 {
			numa = strconv.Itoa(d.NUMANode)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d MiB\t%s\t%s\t%s\n", d.number(), d.ID, d.PCI, numa, d.MemoryBytes>>20, r.state(d),
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
		fmt.Fprintf(w, "excluded: %s: %s\n", strings.TrimSpace(fmt.Sprintf("GPU %d %s", e.Index, name)), e.Reason)
	}
	r.writeUse(w)
	for _, c := range r.Overlaps {
		fmt.Fprintf(w, "overlap: GPU %d %s: also offered by %s\n", c.Index, c.ID, c.Agent)
	}
	return nil
}

// units is the number of units, if it differs from the number of devices.
func (r Report) units() string {
	n := 0
	for _, d := range r.Devices {
		n += max(d.Replicas, 1)
	}
	if n == len(r.hardware()) {
		return ""
	}
	return fmt.Sprintf(" as %d units", n)
}

// hardware has each device once: one whose units differ in health has several entries.
func (r Report) hardware() []Device {
	return slices.CompactFunc(slices.Clone(r.Devices), func(a, b Device) bool { return a.ID == b.ID })
}

// number is the index of the device, with the one by which a policy selects it if that differs.
func (d Device) number() string {
	if d.PolicyIndex == "" {
		return d.CurrentIndex()
	}
	return d.CurrentIndex() + " (policy: " + d.PolicyIndex + ")"
}

// CurrentIndex is the NVML index: "0", or "0:1" for a MIG instance.
func (d Device) CurrentIndex() string {
	if d.Instance == nil {
		return strconv.Itoa(d.Index)
	}
	return fmt.Sprintf("%d:%d", d.Index, *d.Instance)
}

// pool is the pool, and how the device is shared: "gpu.shared, time-slicing by 4, 18432 MiB each", with ", not limited" where the node can't limit it.
func (d Device) pool() string {
	if d.Replicas == 0 {
		return d.Pool
	}
	text := fmt.Sprintf("%s, %s by %d", d.Pool, d.Sharing, d.Replicas)
	if d.MemoryLimitBytes > 0 {
		text += fmt.Sprintf(", %d MiB each", d.MemoryLimitBytes>>20)
	}
	if d.MemoryNotLimited != "" {
		text += ", not limited"
	}
	return text
}

// state is the health state of a device, with the cause only if no condition in the report has it.
func (r Report) state(d Device) string {
	text := d.State.String()
	if d.Cause != "" && !r.hasCondition(d) {
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

// hasCondition reports whether a condition in the report has the cause of a device's health.
func (r Report) hasCondition(d Device) bool {
	return slices.ContainsFunc(r.Conditions, func(c Condition) bool { return c.Cause == d.Cause && (c.GPU == d.GPU || c.GPU == "") })
}

// writeLimits writes which health data the driver does not report, why devices without a condition take no work, and which device nodes are missing.
func (r Report) writeLimits(w io.Writer) {
	for _, limitation := range r.HealthLimitations {
		fmt.Fprintf(w, "health limited: %s\n", limitation)
	}
	r.writeOnce(w, "health limited", func(d Device) string { return d.HealthLimitations })
	r.writeOnce(w, "takes no work", func(d Device) string {
		if d.Cause == "" || d.Schedulable || r.hasCondition(d) {
			return ""
		}
		return d.Health
	})
	r.writeOnce(w, "device nodes missing", func(d Device) string {
		if len(d.MissingNodes) == 0 {
			return ""
		}
		return strings.Join(d.MissingNodes, ", ") + ": run " + d.CreateNodesCommand
	})
}

// writeOnce writes one line for each distinct text, with the GPUs that have it: "health limited (GPU 0, 1): no XID events".
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
	t := NewTable(w)
	fmt.Fprintln(t, "\nGPU\tCAUSE\tCOUNT\tLAST SEEN")
	for _, c := range r.Counts {
		cause := c.Cause
		if c.Detail != "" {
			cause += " (" + c.Detail + ")"
		}
		fmt.Fprintf(t, "%d\t%s\t%d\t%s\n", c.Index, cause, c.Count, stamp(c.LastSeen))
	}
	return t.Flush()
}

// Text describes the condition: a line that names it, and indented lines with details.
func (c Condition) Text() string {
	var b strings.Builder
	effect := c.State.String()
	if c.RecordedOnly {
		effect = "recorded, no effect yet"
	}
	if c.Simulated {
		effect = "simulated: " + effect
	}
	fmt.Fprintf(&b, "%s  %s  %s  since %s", c.where(), c.Cause, effect, stamp(c.Since))
	if c.LastSeen.After(c.Since) {
		fmt.Fprintf(&b, ", %d times, last %s", c.Count, stamp(c.LastSeen))
	}
	b.WriteByte('\n')
	for _, line := range []struct{ head, text string }{
		{"", c.Detail}, {"action: ", c.Action}, {"cleared by: ", c.Clears}, {"", c.progress()},
	} {
		if line.text != "" {
			fmt.Fprintf(&b, "    %s%s\n", line.head, line.text)
		}
	}
	return b.String()
}

// where is the placement, with the index of the GPU instead of its UUID.
func (c Condition) where() string {
	if c.Index < 0 {
		return c.Placement
	}
	return fmt.Sprintf("GPU %d%s", c.Index, strings.TrimPrefix(c.Placement, string(c.GPU)))
}

// progress is how far the condition has recovered, or until when it is ignored.
func (c Condition) progress() string {
	switch {
	case c.IgnoredUntilGone:
		return "cleared by an operator: ignored until it is gone"
	case !c.IgnoredUntil.IsZero():
		return "ignored until " + stamp(c.IgnoredUntil)
	case c.Recovery != nil:
		return c.Recovery.String()
	}
	return ""
}

// String describes the progress: "recovering: 2 of 3 checks, 40 s of 60 s".
func (r Recovery) String() string {
	return fmt.Sprintf("recovering: %d of %d checks, %d s of %d s", r.ChecksPassed, r.ChecksRequired, r.SecondsElapsed, r.SecondsRequired)
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

// String describes the binding in one line.
func (b Binding) String() string {
	return strings.TrimPrefix(fmt.Sprintf("%s: %s is bound to %s", b.Location, b.Position, IDs(b.Devices)), ": ")
}

// IDs lists devices, separated by commas.
func IDs(devices []gpu.DeviceID) string {
	if len(devices) == 0 {
		return "no device"
	}
	var texts []string
	for _, id := range devices {
		texts = append(texts, string(id))
	}
	return strings.Join(texts, ", ")
}
