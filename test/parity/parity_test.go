// Package parity compares the two adapters: one machine, one core, both orchestrators' real protocols. They must offer the same
// units, agree on health, and allocate the same devices.
package parity

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var (
	must  = check.NoError
	until = check.Until
)

// both are the two orchestrators' views of one monitor.
type both struct{ *inprocess.Rig }

// start runs a monitor of a machine with short intervals, and serves it to both.
func start(t testing.TB, m *simdriver.Machine, tune ...func(*core.Config)) *both {
	t.Helper()
	short := func(c *core.Config) { c.Probe, c.Rescan = 100*time.Millisecond, 500*time.Millisecond }
	return &both{inprocess.Start(t, m, append([]func(*core.Config){short}, tune...)...)}
}

func (b *both) unit(id string) inventory.Unit {
	u, _ := b.Monitor.Current().Unit(inventory.UnitID(id))
	return u
}

func TestEveryMachineLooksTheSame(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			b := start(t, simdriver.Start(t, name))
			b.AwaitOnly("all healthy", b.Units())
			goldenfile.Compare(t, filepath.Join("testdata", name+".golden"), b.dump())
		})
	}
}

// dump writes what both list and allocate.
func (b *both) dump() string {
	var out strings.Builder
	kubelet := b.KubeletDevices()
	for _, g := range b.Nomad.Groups() {
		fmt.Fprintf(&out, "nomad group %s/%s/%s\n", g.Vendor, g.Type, g.Name)
		for _, key := range slices.Sorted(maps.Keys(g.Attributes)) {
			a := g.Attributes[key]
			fmt.Fprintf(&out, "  %s = %s\n", key, strings.TrimSpace(a.GoString()))
		}
		for _, d := range g.Devices {
			fmt.Fprintf(&out, "  %s  pci %s  kubelet resource %s\n", d.ID, d.HwLocality.PciBusID, kubelet[d.ID].Name)
			fmt.Fprintf(&out, "    %s\n", b.granted(d.ID))
		}
	}
	return out.String()
}

// granted reserves a device on both sides, and fails unless a container would get the same.
func (b *both) granted(id string) string {
	b.T.Helper()
	nomad, err := b.Nomad.Reserve(id)
	must(b.T, err)
	kubelet, err := b.Orchestrators.Allocate(id)
	must(b.T, err)
	delete(nomad.Env, "TANDEM_GPU_NODES") // for tasks whose nodes Nomad forgets; a kubelet gives a container its nodes at each start
	if diff := cmp.Diff(nomad, kubelet); diff != "" {
		b.T.Errorf("%s: (Nomad, kubelet): %s", id, diff)
	}
	return fmt.Sprintf("env %v  nodes %s", nomad.Env, strings.Join(nomad.Nodes, ", "))
}
