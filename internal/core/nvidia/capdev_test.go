package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestParseMIGMinors(t *testing.T) {
	got := parseMIGMinors(strings.Join([]string{
		"config 1", "monitor 2",
		"gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu12/gi14/ci7/access 1758",
		"", "gpu0/gi0/ci0/access", "gpu0/gi0/ci0/access x", "gpu0/gi0/ci0/access -1", "gpu0/gi0/ci0/config 9",
		"gpu0/gi0/ci0/dec0/access 9", "gpu0/gi/access 9", "gpu0/gi99999/access 9", "access 9", "gpu1/gi2/access 5 6",
	}, "\n"))
	want := capabilities{{0, 0, core.Whole}: 3, {0, 0, 0}: 4, {12, 14, 7}: 1758}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(capability{})); diff != "" {
		t.Error(diff)
	}
	gi, ci := got.of(12, core.Placement{GI: 14, CI: 7})
	if gi != 0 || ci != 1758 {
		t.Errorf("gi %d, ci %d", gi, ci)
	}
	if gi, ci := capabilities(nil).of(0, core.Placement{}); gi != 0 || ci != 0 {
		t.Errorf("without a list: gi %d, ci %d", gi, ci)
	}
}

// Every instance of every machine has two capabilities of its own, of which there are nodes, whatever the GPUs beside it
// do; what is no instance has none.
func TestCapabilitiesOfMachines(t *testing.T) {
	for _, name := range simdriver.Names() {
		s := open(t, simdriver.Start(t, name))
		snap := snapshot(t, s)
		owner := map[int]core.DeviceID{}
		for _, d := range snap.Devices {
			if d.At.GI == core.Whole {
				if d.GICap != 0 || d.CICap != 0 {
					t.Errorf("%s: a GPU with capabilities: %+v", name, d)
				}
				continue
			}
			for _, n := range []int{d.GICap, d.CICap} {
				if !slices.Contains(snap.Nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", n)) || owner[n] != "" {
					t.Errorf("%s: %s has capability %d, which is of %q", name, d.ID, n, owner[n])
				}
				owner[n] = d.ID
			}
		}
		must(t, s.Close())
	}
}

// A container may lack the list of capabilities (/proc/driver/nvidia-caps), and so does a driver before R450 or one
// that has its capabilities in procfs only (module parameter nv_cap_enable_devfs=0): there are instances, and no
// nodes of theirs. The list is found when it comes.
func TestNoCapabilities(t *testing.T) {
	m := simdriver.Start(t, "a30")
	list := filepath.Join(m.Root, "proc/driver/nvidia-caps")
	must(t, os.Rename(list, list+".gone"))
	s := open(t, m)
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Profile == "" {
			t.Errorf("%+v", d)
		}
	}
	must(t, os.Rename(list+".gone", list))
	found := instances(snapshot(t, s), 1)
	if len(found) != 3 || found[0].GICap != 147 || found[0].CICap != 148 {
		t.Errorf("%+v", found)
	}
	// The minor number is the way into the list: a GPU that does not tell it has instances without nodes.
	must(t, m.Set(1, "unsupported", "nvmlDeviceGetMinorNumber"))
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Minor != -1 {
			t.Errorf("%+v", d)
		}
	}
}

// FuzzParseMIGMinors: whatever was understood, written down again, is understood the same.
func FuzzParseMIGMinors(f *testing.F) {
	f.Add("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
	f.Add("gpu-1/gi0/access 3")
	f.Add("gpu0/gi0/access 99999999999999999999")
	f.Fuzz(func(t *testing.T, text string) {
		got := parseMIGMinors(text)
		var again strings.Builder
		for c, n := range got {
			if c.ci == core.Whole {
				fmt.Fprintf(&again, "gpu%d/gi%d/access %d\n", c.minor, c.gi, n)
			} else {
				fmt.Fprintf(&again, "gpu%d/gi%d/ci%d/access %d\n", c.minor, c.gi, c.ci, n)
			}
			if c.minor < 0 || n < 0 || c.gi == core.Whole {
				t.Errorf("%+v: %d", c, n)
			}
		}
		if diff := cmp.Diff(got, parseMIGMinors(again.String()), cmp.AllowUnexported(capability{})); diff != "" {
			t.Error(diff)
		}
	})
}

// FuzzProfileInName: a profile that is found ends the name, and is found again in another.
func FuzzProfileInName(f *testing.F) {
	f.Add("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb+me")
	f.Fuzz(func(t *testing.T, name string) {
		p := profileInName(name)
		if p == "" {
			return
		}
		if !strings.HasSuffix(name, " MIG "+p) || profileInName("GPU MIG "+p) != p {
			t.Errorf("%q: %q", name, p)
		}
	})
}
