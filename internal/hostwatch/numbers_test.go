package hostwatch

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// numbered updates the claims of an agent that has a number for a GPU.
func numbered(t *testing.T, r *claimStore, id gpu.DeviceID, number int) view {
	t.Helper()
	o := want()
	o.numbering = inventory.NewNumbering(0, []inventory.Number{{ID: id, Index: gpu.DeviceIndex{GPU: number, Instance: -1}}})
	v, err := r.update(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (v view) number(id gpu.DeviceID) int {
	at, ok := v.numbering.Of(id)
	if !ok {
		return -1
	}
	return at.GPU
}

// Both agents have numbered GPUs before they read the other one's file: the first number in a file counts.
func TestFirstWrittenNumberCounts(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second               gpu.DeviceID
		firstNumber, secondNumber   int
		wantInFirst, wantedBySecond int
	}{
		"two numbers for one GPU": {"GPU-a", "GPU-a", 3, 4, 3, 3},
		"one number for two GPUs": {"GPU-b", "GPU-a", 3, 3, 3, -1},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			a, _ := newStore(t, folder, "nomad-gpu", true)
			b, _ := newStore(t, folder, "k8s-gpu", true)
			for range 2 {
				if v := numbered(t, b, tc.first, tc.firstNumber); v.number(tc.first) != tc.wantInFirst {
					t.Errorf("the first agent has %+v", v.numbering)
				}
				if v := numbered(t, a, tc.second, tc.secondNumber); v.number(tc.second) != tc.wantedBySecond || v.number(tc.first) != tc.wantInFirst {
					t.Errorf("the second agent has %+v", v.numbering)
				}
			}
		})
	}
}

// A later process of the agent reads the written numbers: its history may be lost.
func TestNumbersOutliveTheHistory(t *testing.T) {
	folder := t.TempDir()
	a, _ := newStore(t, folder, "nomad-gpu", true)
	numbered(t, a, "GPU-a", 3)
	a.close()
	again, _ := newStore(t, folder, "nomad-gpu", true)
	if v := update(t, again); v.number("GPU-a") != 3 {
		t.Errorf("it has %+v", v.numbering)
	}
}

// byIndex offers the first two GPUs.
func byIndex() core.Config {
	cfg := core.DefaultConfig()
	cfg.Policy.Include = []inventory.Selector{{Indices: []gpu.DeviceIndex{{GPU: 0, Instance: -1}, {GPU: 1, Instance: -1}}}}
	return cfg
}

// While another agent may be numbering GPUs no GPU is offered by its index; but only for a while, and not where numbers can't be
// shared at all.
func TestNewGPUsWaitForTheClaims(t *testing.T) {
	for name, tc := range map[string]struct {
		folder func(t *testing.T, dir string)
		early  int // GPUs that are offered after two seconds
	}{
		"free": {func(*testing.T, string) {}, 2},
		"held": {func(t *testing.T, dir string) {
			folder := filepath.Join(dir, "claims")
			must(t, os.Mkdir(folder, 0o700))
			unlock, err := lockFolder(t.Context(), folder)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(unlock)
		}, 0},
		"no folder": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, "claims"), nil, 0o600))
		}, 2},
		"read only": {func(t *testing.T, dir string) {
			must(t, os.MkdirAll(filepath.Join(dir, "claims", "nomad-gpu.json"), 0o700)) // can't be replaced by a file
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				tc.folder(t, dir)
				a := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: byIndex()})
				pass(2 * time.Second)
				if got := a.schedulable(); len(got) != tc.early {
					t.Errorf("after two seconds it has %v schedulable", got)
				}
				pass(time.Minute)
				if got := a.schedulable(); len(got) != 2 {
					t.Errorf("after a minute it has %v schedulable", got)
				}
			})
		})
	}
}
