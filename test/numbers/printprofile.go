package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// printProfiles prints what each part of each subject costs, and the ratios of the first to the others.
func printProfiles(w io.Writer, group []*subject, d time.Duration) error {
	fmt.Fprintf(w, "\n%s, by part: the CPU time above in the proportions of what perf recorded in another %v of the last process.\n", group[0].idle, d)
	fmt.Fprintln(w, `"with runtime": with what the scheduler, sysmon and the kernel took while the part ran. System calls and waits are of a third `+
		"interval.")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	var header strings.Builder
	for i, s := range group {
		header.WriteString("\t" + s.name + ": CPU\tof it driver library\twith runtime\tsystem calls\twaits of threads")
		if i > 0 {
			header.WriteString("\tratio of CPU")
		}
	}
	fmt.Fprintln(t, header.String()+"\t")
	for _, name := range costliest(group) {
		row(t, name, group, func(p *profile) cost { return *p.part(name) })
	}
	row(t, "all", group, (*profile).all)
	row(t, "of it in the kernel", group, func(p *profile) cost { return cost{cpu: p.inKernel} })
	row(t, "times that the process woke up", group, func(p *profile) cost { return cost{waits: p.wakeups} })
	if err := t.Flush(); err != nil || group[0].profile.names == nil {
		return err
	}
	return printCalls(w, group)
}

// costliest are the names of all parts, those first that cost the first subject most.
func costliest(group []*subject) []string {
	names := map[string]bool{}
	for _, s := range group {
		for name := range s.profile.parts {
			names[name] = true
		}
	}
	return slices.SortedFunc(maps.Keys(names), func(a, b string) int {
		for _, s := range group {
			if c := cmp.Compare(s.profile.part(b).withRuntime, s.profile.part(a).withRuntime); c != 0 {
				return c
			}
		}
		return cmp.Compare(a, b)
	})
}

// row prints a cost of each subject.
func row(w io.Writer, name string, group []*subject, of func(*profile) cost) {
	line, ours := name, 0.0
	for i, s := range group {
		c, all := of(s.profile), s.idleCPU()
		line += "\t" + cell("%.1f ms", c.cpu*all) + "\t" + cell("%.1f ms", c.inDriver*all) +
			"\t" + cell("%.1f ms", c.withRuntime*all) + "\t" + cell("%.0f", c.calls) + "\t" + cell("%.0f", c.waits)
		if i == 0 {
			ours = c.cpu * all
			continue
		}
		line += "\t" + quotient(ours, c.cpu*all)
	}
	fmt.Fprintln(w, line+"\t")
}

// printCalls prints the system calls of a minute by name.
func printCalls(w io.Writer, group []*subject) error {
	fmt.Fprintf(w, "\n%s: system calls\n", group[0].idle)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	names := map[string]bool{}
	header := ""
	for i, s := range group {
		for name := range s.profile.names {
			names[name] = true
		}
		header += "\t" + s.name
		if i > 0 {
			header += "\tratio"
		}
	}
	fmt.Fprintln(t, header+"\t")
	order := func(a, b string) int {
		ours := group[0].profile.names
		return cmp.Or(cmp.Compare(ours[b], ours[a]), cmp.Compare(a, b))
	}
	for _, name := range slices.SortedFunc(maps.Keys(names), order) {
		line := name
		for i, s := range group {
			line += "\t" + cell("%.0f", s.profile.names[name])
			if i > 0 {
				line += "\t" + quotient(group[0].profile.names[name], s.profile.names[name])
			}
		}
		fmt.Fprintln(t, line+"\t")
	}
	return t.Flush()
}

func cell(format string, value float64) string {
	if value == 0 {
		return "-"
	}
	return fmt.Sprintf(format, value)
}

func quotient(ours, theirs float64) string {
	if theirs == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", ours/theirs)
}
