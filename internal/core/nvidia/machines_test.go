package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestMachines compares a Snapshot of every machine with testdata/NAME.golden, and with the next Snapshot of the session and
// of another session.
func TestMachines(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			m := simdriver.Start(t, name)
			s := open(t, m)
			snap := snapshot(t, s)
			got := render(snap)
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				must(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			must(t, err)
			if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Error("go test -update rewrites the files\n", diff)
			}
			checkCapabilities(t, snap)
			if next := snapshot(t, s); !next.Equal(snap) {
				t.Error("the next Snapshot differs", gocmp.Diff(snap, next))
			}
			must(t, s.Close(), s.Close())
			if next := snapshot(t, open(t, m)); !next.Equal(snap) {
				t.Error("the Snapshot of another session differs", gocmp.Diff(snap, next))
			}
		})
	}
}

// engineText lists the engines of an instance by their names in nvidia-smi.
func engineText(s gpu.Slices) string {
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

// render formats a snapshot, one line per device. Missing values are "-".
func render(s gpu.Snapshot) string {
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
		if d.At.GI != gpu.Whole {
			at = fmt.Sprintf("gi%d/ci%d", d.At.GI, d.At.CI)
		} else if d.MIG {
			at = "whole, MIG"
		}
		fmt.Fprintf(&table, "%d\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			d.Index, d.ID, or(d.Model), or(d.Profile), at, d.PCI, d.NUMANode, d.Minor, or(fmt.Sprintf("%d %d", d.GICap, d.CICap)),
			or(d.Memory>>20), or(d.BAR1>>20), or(d.PowerLimit/1000), or(d.CoreClock), or(d.MemoryClock),
			or(fmt.Sprintf("%dx%d", d.PCIeGen, d.PCIeWidth)), or(d.Compute), or(d.DisplayState), or(d.PersistenceMode),
			or(d.Serial), or(d.Architecture), or(d.Brand), or(d.ECC), or(d.NVLinks),
			or(fmt.Sprintf("%d/%d", d.Slices.GPU, d.Slices.Compute)), or(d.Slices.Multiprocessors), engineText(d.Slices))
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, err := io.WriteString(w, table.String())
	if err := errors.Join(err, w.Flush()); err != nil {
		return err.Error()
	}
	for _, e := range s.Excluded {
		fmt.Fprintf(&b, "excluded %d %s %s: %s\n", e.Index, e.At, e.PCI, e.Reason)
	}
	index := map[gpu.DeviceID]int{}
	for _, d := range s.Devices {
		if d.At.GI == gpu.Whole {
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

// checkCapabilities: every instance has two capabilities of its own, with device nodes; a GPU has none.
func checkCapabilities(t *testing.T, snap gpu.Snapshot) {
	t.Helper()
	owner := map[int]gpu.DeviceID{}
	for _, d := range snap.Devices {
		if d.At.GI == gpu.Whole {
			if d.GICap != 0 || d.CICap != 0 {
				t.Errorf("a GPU with capabilities: %+v", d)
			}
			continue
		}
		for _, n := range []int{d.GICap, d.CICap} {
			if !slices.Contains(snap.Nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", n)) || owner[n] != "" {
				t.Errorf("%s has capability %d of %q", d.ID, n, owner[n])
			}
			owner[n] = d.ID
		}
	}
}
