package placement

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// examples are the machines in docs/placement.md, with GPUs that are in use.
var examples = []struct {
	machine, title, text string
	used                 [][]int
}{
	{
		"h100x8", "H100 x8 behind NVSwitches",
		"All pairs are equal over NVLink. NUMA nodes are kept together, and used up one after the other.",
		[][]int{nil, {0, 1}, {0, 4, 5, 6}},
	},
	{
		"a100-islands", "A100 on two boards of four",
		"A request stays on one board if it fits, on the fuller one if it fits on both.",
		[][]int{nil, {0}, {0, 1, 4}},
	},
	{
		"dgx1", "DGX-1: a hybrid cube mesh of V100",
		"Each GPU has two NVLinks to two others, one to two others, none to three. A single GPU is taken where it breaks the fewest links.",
		[][]int{nil, {0}, {1, 2, 5}},
	},
	{
		"gb200", "GB200 x4",
		"The NVSwitches are outside the node. Each CPU has two GPUs.",
		[][]int{nil, {0}},
	},
	{
		"l40s", "L40S x8: PCIe only",
		"Two GPUs share a PCIe switch, two switches a NUMA node.",
		[][]int{nil, {0}, {0, 1, 4}},
	},
}

// TestDocument compares the examples in docs/placement.md with what is chosen. -update writes them.
func TestDocument(t *testing.T) {
	const path, marker = "../../docs/placement.md", "<!-- examples -->\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	prose, _, found := strings.Cut(string(text), marker)
	if !found {
		t.Fatalf("%s has no line %s", path, marker)
	}
	var out strings.Builder
	for _, e := range examples {
		t.Run(e.machine, func(t *testing.T) {
			m := Read(t, e.machine)
			fmt.Fprintf(&out, "\n### %s\n\n%s\n\n```text\n%s\n", e.title, e.text, m.matrix())
			for _, used := range e.used {
				out.WriteString(m.choices(used) + "\n")
			}
			out.WriteString(m.sequence(1, 2, 1, len(m.GPUs)-4) + "```\n")
		})
	}
	goldenfile.Compare(t, path, prose+marker+out.String())
}

// paths are the names of nvidia-smi.
var paths = map[gpu.PCIePath]string{
	gpu.PathSystem: "SYS", gpu.PathNUMA: "NODE", gpu.PathHostBridge: "PHB", gpu.PathMultiSwitch: "PXB", gpu.PathSingleSwitch: "PIX",
}

// matrix is like nvidia-smi topo -m, with NVLinks and PCIe path.
func (m Machine) matrix() string {
	var out strings.Builder
	for i := range m.GPUs {
		fmt.Fprintf(&out, "%12d", i)
	}
	header := "    " + strings.TrimLeft(out.String(), " ")
	lines := []string{header}
	for a := range m.GPUs {
		line := fmt.Sprintf("%-4d", a)
		for b := range m.GPUs {
			l, cell := m.link(a, b), "-"
			if a != b {
				cell = paths[l.Path]
			}
			if l.NVLinks > 0 {
				cell = fmt.Sprintf("NV%d %s", l.NVLinks, cell)
			}
			line += fmt.Sprintf("%-12s", cell)
		}
		lines = append(lines, strings.TrimRight(line, " "))
	}
	return strings.Join(lines, "\n") + "\n"
}

// choices shows what requests of several sizes get while some GPUs are in use.
func (m Machine) choices(used []int) string {
	available := slices.DeleteFunc(m.indices(), func(i int) bool { return slices.Contains(used, i) })
	lines := []string{m.header()}
	for _, n := range []int{1, 2, 3, 4, 5, 6, 8} {
		if n > len(available) {
			continue
		}
		marks := map[int]string{}
		for _, i := range m.Prefer(available, nil, n) {
			marks[i] = "#"
		}
		for _, i := range used {
			marks[i] = "x"
		}
		lines = append(lines, m.row(fmt.Sprintf("%d of %d", n, len(available)), marks))
	}
	return strings.Join(lines, "\n") + "\n"
}

// sequence shows what requests of these sizes get one after the other.
func (m Machine) sequence(sizes ...int) string {
	available, marks, name := m.indices(), map[int]string{}, []string{}
	for k, n := range slices.DeleteFunc(sizes, func(n int) bool { return n == 0 }) {
		letter := string(rune('a' + k))
		for _, i := range m.Prefer(available, nil, n) {
			marks[i] = letter
		}
		available = slices.DeleteFunc(available, func(i int) bool { return marks[i] != "" })
		name = append(name, fmt.Sprint(n))
	}
	return m.header() + "\n" + m.row(strings.Join(name, ", "), marks) + "\n"
}

func (m Machine) indices() []int {
	all := make([]int, len(m.GPUs))
	for i := range all {
		all[i] = i
	}
	return all
}

// header has the indices of the GPUs, by NUMA node.
func (m Machine) header() string {
	marks := map[int]string{}
	for i := range m.GPUs {
		marks[i] = fmt.Sprint(i)
	}
	return m.row("GPU", marks)
}

func (m Machine) row(name string, marks map[int]string) string {
	line := fmt.Sprintf("%-12s", name)
	for i, d := range m.GPUs {
		if i > 0 && d.NUMANode != m.GPUs[i-1].NUMANode {
			line += " |"
		}
		mark := marks[i]
		if mark == "" {
			mark = "."
		}
		line += " " + mark
	}
	return line
}
