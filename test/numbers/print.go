package main

import (
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

// print prints the medians of each subject, and the ratios of the first to the others.
func print(group []*subject) error {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := "\n"
	for i, s := range group {
		header += "\t" + s.name
		if i > 0 {
			header += "\tratio"
		}
	}
	fmt.Fprintln(t, header+"\t")
	for i, f := range group[0].runs[0] {
		ours := group[0].median(i)
		line := fmt.Sprintf("%s\t%s", f.name, f.format(ours))
		for _, other := range group[1:] {
			theirs := other.median(i)
			line += fmt.Sprintf("\t%s\t%.2f", f.format(theirs), ours/theirs)
		}
		fmt.Fprintln(t, line+"\t")
	}
	return t.Flush()
}

// median is that of the figure with an index.
func (s *subject) median(i int) float64 {
	var values []float64
	for _, figures := range s.runs {
		values = append(values, figures[i].value)
	}
	return quantile(values, 0.5)
}

func (f figure) format(value float64) string {
	if f.unit == ratio {
		return fmt.Sprintf("%.2f", value)
	}
	return strings.TrimSuffix(fmt.Sprintf("%.4g %s", value, f.unit), " ")
}
