package nvidia

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
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
