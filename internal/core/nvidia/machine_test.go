package nvidia

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var _ monitor.Session = (*Session)(nil)

var update = flag.Bool("update", false, "write the golden files anew")

// roots are those of a simulated machine.
func roots(m *simdriver.Machine) core.Roots {
	return core.Roots{
		Driver: m.Root, Dev: m.Root, Sys: filepath.Join(m.Root, "sys"), Proc: filepath.Join(m.Root, "proc"),
	}
}

// open opens a session on a simulated machine and closes it with the test.
func open(t testing.TB, m *simdriver.Machine) *Session {
	t.Helper()
	// A call that an earlier test left hanging comes back soon after its machine is gone.
	eventually(t, func() (any, bool) { return nil, !anyStuck() })
	return openWith(t, m, Options{})
}

// anyStuck reports whether a closed session has a call in the driver still.
func anyStuck() bool {
	initialised.Lock()
	defer initialised.Unlock()
	return slices.ContainsFunc(initialised.sessions, func(s *Session) bool {
		return s.closed.Load() && len(s.stuck()) > 0
	})
}

// openWith is open with options. Closing may end with an error that is expected.
func openWith(t testing.TB, m *simdriver.Machine, o Options, expected ...error) *Session {
	t.Helper()
	o.Roots = roots(m)
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := s.Close()
		if err != nil && !slices.ContainsFunc(expected, func(e error) bool { return errors.Is(err, e) }) {
			t.Error("close:", err)
		}
	})
	return s
}

// calls counts the NVML calls that a machine got so far.
func calls(t testing.TB, m *simdriver.Machine) map[string]uint64 {
	t.Helper()
	n, err := m.Calls()
	must(t, err)
	return n
}

func snapshot(t testing.TB, s *Session) core.Snapshot {
	t.Helper()
	snap, err := s.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

// must fails the test if scripting the machine did not work.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestMachines reads every machine that ships and compares with testdata/NAME.golden.
func TestMachines(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			s := open(t, simdriver.Start(t, name))
			got := render(snapshot(t, s))
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				must(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			must(t, err)
			if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Error("go test -update writes the files anew\n", diff)
			}
		})
	}
}

// engines are those of an instance that has any, by their letters in nvidia-smi.
func engines(s core.Slices) string {
	var all []string
	for _, e := range []struct {
		letters string
		n       int
	}{{"CE", s.CopyEngines}, {"DEC", s.Decoders}, {"ENC", s.Encoders}, {"JPEG", s.JPEGDecoders}, {"OFA", s.OFAs}} {
		if e.n > 0 {
			all = append(all, fmt.Sprint(e.n, e.letters))
		}
	}
	return cmp.Or(strings.Join(all, " "), "-")
}

// render is a snapshot as text, one line per device. Absent values are "-".
func render(s core.Snapshot) string {
	var b strings.Builder
	fmt.Fprintf(&b, "driver %s %s, CUDA %s\n\n", s.Driver.State, s.Driver.Version, s.Driver.CUDA)
	var table strings.Builder
	fmt.Fprintln(&table, "#\tID\tmodel\tprofile\tat\tpci\tnuma\tminor\tcaps\tMiB\tBAR1 MiB\tW\tMHz\tmemory MHz\tPCIe\tcc\tdisplay\tpersistence\tserial\tarchitecture\tbrand\tECC\tNVLinks\tslices\tSM\tengines")
	or := func(v any) string {
		if text := fmt.Sprint(v); !slices.Contains([]string{"", "0", "0 0", "0.0", "0x0", "0/0"}, text) {
			return text
		}
		return "-"
	}
	for _, d := range s.Devices {
		at := "whole"
		if d.At.GI != core.Whole {
			at = fmt.Sprintf("gi%d/ci%d", d.At.GI, d.At.CI)
		} else if d.MIG {
			at = "whole, MIG"
		}
		fmt.Fprintf(&table, "%d\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			d.Index, d.ID, or(d.Model), or(d.Profile), at, d.PCI, d.NUMANode, d.Minor, or(fmt.Sprintf("%d %d", d.GICap, d.CICap)),
			or(d.Memory>>20), or(d.BAR1>>20), or(d.PowerLimit/1000), or(d.CoreClock), or(d.MemoryClock),
			or(fmt.Sprintf("%dx%d", d.PCIeGen, d.PCIeWidth)), or(d.Compute), or(d.DisplayState), or(d.PersistenceMode),
			or(d.Serial), or(d.Architecture), or(d.Brand), or(d.ECC), or(d.NVLinks),
			or(fmt.Sprintf("%d/%d", d.Slices.GPU, d.Slices.Compute)), or(d.Slices.Multiprocessors), engines(d.Slices))
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, err := io.WriteString(w, table.String())
	if err := errors.Join(err, w.Flush()); err != nil {
		return err.Error()
	}
	for _, e := range s.Excluded {
		fmt.Fprintf(&b, "excluded %d %s %s: %s\n", e.Index, e.At, e.PCI, e.Reason)
	}
	index := map[core.DeviceID]int{}
	for _, d := range s.Devices {
		if d.At.GI == core.Whole {
			index[d.ID] = d.Index
		}
	}
	fmt.Fprintln(&b)
	for _, l := range s.Links {
		fmt.Fprintf(&b, "link %d-%d path %d nvlinks %d\n", index[l.A], index[l.B], l.Path, l.NVLinks)
	}
	fmt.Fprintf(&b, "\nnodes %s\n", strings.Join(s.Nodes, " "))
	return b.String()
}
