package hostwatch

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// numbered is a round of an agent that has a number for a GPU.
func numbered(t *testing.T, r *register, gpu core.DeviceID, number int) view {
	t.Helper()
	o := want()
	o.numbering = core.NewNumbering(0, []core.Number{{ID: gpu, Index: core.DeviceIndex{GPU: number, Instance: -1}}})
	v, err := r.round(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (v view) number(gpu core.DeviceID) int {
	at, ok := v.numbering.Of(gpu)
	if !ok {
		return -1
	}
	return at.GPU
}

// Both have numbered a GPU before they have looked at what the other one has written.
func TestFirstNumberThatIsWrittenCounts(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	for range 2 {
		if v := numbered(t, b, "GPU-a", 3); v.number("GPU-a") != 3 {
			t.Errorf("the first is told %+v", v.numbering)
		}
		if v := numbered(t, a, "GPU-a", 4); v.number("GPU-a") != 3 {
			t.Errorf("the second is told %+v", v.numbering)
		}
	}
}

// Both have given the same number to new GPUs before they have looked at what the other one has written.
func TestNumberIsWrittenForOneDevice(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	for range 2 {
		if v := numbered(t, b, "GPU-b", 3); v.number("GPU-b") != 3 {
			t.Errorf("the first is told %+v", v.numbering)
		}
		if v := numbered(t, a, "GPU-a", 3); v.number("GPU-a") != -1 || v.number("GPU-b") != 3 {
			t.Errorf("the second is told %+v", v.numbering)
		}
	}
}

// A number that is written down is told to a later process of the agent: its history may be lost.
func TestNumbersOutliveTheHistory(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	numbered(t, a, "GPU-a", 3)
	a.close()
	again, _ := newRegister(t, folder, "nomad-gpu", true)
	if v := see(t, again); v.number("GPU-a") != 3 {
		t.Errorf("it is told %+v", v.numbering)
	}
}

// byIndex offers the first two GPUs.
func byIndex() core.Config {
	cfg := core.DefaultConfig()
	cfg.Policy.Include = []core.Selector{{Indices: []core.DeviceIndex{{GPU: 0, Instance: -1}, {GPU: 1, Instance: -1}}}}
	return cfg
}

// While another agent may be numbering GPUs none is offered by its index; but not for ever, and not where numbers can't be shared
// at all.
func TestNewGPUsWaitForTheRegister(t *testing.T) {
	for name, tc := range map[string]struct {
		folder func(t *testing.T, dir string)
		early  int // GPUs that are offered after two seconds
	}{
		"free": {func(*testing.T, string) {}, 2},
		"held": {func(t *testing.T, dir string) {
			folder := filepath.Join(dir, "claims")
			if err := os.Mkdir(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			unlock, err := lockFolder(t.Context(), folder)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(unlock)
		}, 0},
		"no folder": {func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, "claims"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, 2},
		"read only": {func(t *testing.T, dir string) {
			if err := os.MkdirAll(filepath.Join(dir, "claims", "nomad-gpu.json"), 0o700); err != nil { // can't be replaced by a file
				t.Fatal(err)
			}
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				tc.folder(t, dir)
				a := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: byIndex()})
				pass(2 * time.Second)
				if got := a.gives(); len(got) != tc.early {
					t.Errorf("after two seconds it gives %v to work", got)
				}
				pass(time.Minute)
				if got := a.gives(); len(got) != 2 {
					t.Errorf("after a minute it gives %v to work", got)
				}
			})
		})
	}
}
