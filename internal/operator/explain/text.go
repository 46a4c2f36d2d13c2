package explain

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Write writes the explanation as text for operators.
func (e Explanation) Write(w io.Writer) error {
	var b strings.Builder
	for _, line := range e.Warnings {
		fmt.Fprintln(&b, line)
	}
	count := len(e.Requests) == 1 && e.Requests[0].Count > 0
	if count { // the devices of its pool are part of it
		e.Requests[0].write(&b, e.Devices)
		b.WriteString("\n")
	}
	for _, d := range e.Devices {
		if !count || d.Pool != e.Requests[0].Pool {
			d.write(&b)
		}
	}
	if len(e.Devices) == 0 {
		b.WriteString("no device\n")
	}
	for _, r := range e.Requests {
		if !count {
			b.WriteString("\n")
			r.write(&b, e.Devices)
		}
	}
	for _, line := range []string{e.Prove, e.Reset} {
		if line != "" {
			fmt.Fprintln(&b, "\n"+line)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// write writes one line, and a second one if there is more to know.
func (d Device) write(b *strings.Builder) {
	fmt.Fprintf(b, "%s: ", strings.Join(strings.Fields("GPU "+d.Index+" "+d.ID+" "+string(d.PCI)), " "))
	switch d.Outcome {
	case inventory.Offered:
		fmt.Fprintf(b, "offered as %s (by %s)", d.Pool, d.PoolBy)
		if d.Sharing != inventory.Exclusive.String() {
			fmt.Fprintf(b, ", %s (by %s)", d.Sharing, d.SharingBy)
		}
		if d.By != d.PoolBy && d.By != d.SharingBy {
			fmt.Fprintf(b, "; it is offered by %s", d.By)
		}
	case inventory.NotOffered:
		fmt.Fprintf(b, "not offered: %s (by %s)", d.Reason, d.By)
	case inventory.Represented:
		fmt.Fprintf(b, "hidden: %s (by %s)", d.Reason, d.By)
	}
	b.WriteByte('\n')
	var more []string
	if d.MemoryLimit > 0 {
		more = append(more, fmt.Sprintf("memory of a share %d MiB, limited by %s", d.MemoryLimit>>20, d.LimitedBy))
	}
	if d.Health != "" && d.Health != health.Healthy.String() {
		more = append(more, d.Health)
	}
	if len(d.HeldBy) > 0 {
		more = append(more, "held by "+strings.Join(d.HeldBy, ", "))
	}
	for _, o := range d.Others {
		more = append(more, fmt.Sprintf("not by %s: %s", o.By, o.Why))
	}
	if len(more) > 0 {
		fmt.Fprintf(b, "    %s\n", strings.Join(more, "; "))
	}
}

func (r Request) write(b *strings.Builder, devices []Device) {
	if r.Count > 0 {
		fmt.Fprintf(b, "request for %d of %s, %d available: ", r.Count, r.Name, r.Available)
	} else {
		fmt.Fprintf(b, "request for %d of %s: ", len(r.Units), r.Name)
	}
	if len(r.Units) == 0 {
		b.WriteString("nothing\n")
	} else {
		fmt.Fprintln(b, unitTexts(r.Units))
	}
	if r.Method != "" && len(r.Units) > 0 {
		fmt.Fprintf(b, "  chosen: %s\n", methodTexts[r.Method])
	}
	for _, line := range pairLines(r.Pairs, indices(devices)) {
		fmt.Fprintf(b, "  %s\n", line)
	}
	for _, n := range r.NotChosen {
		fmt.Fprintf(b, "  not GPU %s %s: %s\n", n.Index, n.ID, n.Why)
	}
	if r.Refused != "" {
		fmt.Fprintf(b, "  refused: %s\n", r.Refused)
	}
	if r.Limit > 0 {
		fmt.Fprintf(b, "  memory limit: %d MiB\n", r.Limit>>20)
	}
	if r.Injection != "" {
		fmt.Fprintf(b, "  injection: %s\n", r.Injection)
	}
	if r.Response != nil {
		r.Response.write(b)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(b, "  %s\n", note)
	}
}

var methodTexts = map[inventory.Method]string{
	inventory.MethodRequired:  "the devices that are asked for",
	inventory.MethodAll:       "all that are available",
	inventory.MethodShared:    "of shared devices, those with the fewest units in use",
	inventory.MethodEqual:     "of shared devices, the same number of units of each: one limit of memory for all",
	inventory.MethodPacked:    "of shared devices, those with the most units in use (packed)",
	methodListed:              "the first that fit, in the order in which they are listed",
	inventory.MethodConnected: "as few GPUs as possible, partly used ones first, then the best connected set, then the one that leaves the best connected GPUs",
}

func unitTexts(ids []inventory.UnitID) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = string(id)
	}
	return strings.Join(texts, ", ")
}

func indices(devices []Device) map[gpu.DeviceID]string {
	all := map[gpu.DeviceID]string{}
	for _, d := range devices {
		all[gpu.DeviceID(d.ID)] = d.Index
	}
	return all
}

// pairLines describes pairs of GPUs, one line for each kind of connection: "GPU 0-1, 0-2: 18 NVLinks (450 GB/s) over NVSwitches, PCIe SYS".
func pairLines(pairs []Pair, index map[gpu.DeviceID]string) (lines []string) {
	name := func(id gpu.DeviceID) string {
		if index[id] != "" {
			return index[id]
		}
		return string(id)
	}
	var kinds []string
	members := map[string][]string{}
	for _, p := range pairs {
		kind := "no NVLink"
		if p.NVLinks > 0 {
			kind = fmt.Sprintf("%d NVLinks (%d GB/s)", p.NVLinks, p.Bandwidth)
		}
		if p.NVSwitch {
			kind += " over NVSwitches"
		}
		if p.Path != "" {
			kind += ", PCIe " + p.Path
		}
		if p.SameNUMA {
			kind += ", one NUMA node"
		}
		if members[kind] == nil {
			kinds = append(kinds, kind)
		}
		members[kind] = append(members[kind], name(p.A)+"-"+name(p.B))
	}
	for _, kind := range kinds {
		of := strings.Join(members[kind], ", ")
		if n := len(members[kind]); n == len(pairs) && n > 3 {
			of = fmt.Sprintf("all %d pairs", n)
		}
		lines = append(lines, "GPU "+of+": "+kind)
	}
	return lines
}

func (r Response) write(b *strings.Builder) {
	for _, name := range slices.Sorted(maps.Keys(r.Env)) {
		fmt.Fprintf(b, "  environment: %s=%s\n", name, r.Env[name])
	}
	for _, n := range r.DeviceNodes {
		fmt.Fprintf(b, "  device node: %s%s %s\n", n.ContainerPath, from(n.HostPath, n.ContainerPath), n.Permissions)
	}
	for _, name := range r.CDIDevices {
		fmt.Fprintf(b, "  CDI device: %s\n", name)
	}
	for _, m := range r.Mounts {
		fmt.Fprintf(b, "  mount: %s%s\n", m.ContainerPath, from(m.HostPath, m.ContainerPath))
	}
	for _, name := range slices.Sorted(maps.Keys(r.Annotations)) {
		fmt.Fprintf(b, "  annotation: %s=%s\n", name, r.Annotations[name])
	}
}

// from is the path on the host, if it differs.
func from(host, container string) string {
	if host == container {
		return ""
	}
	return " from " + host
}
