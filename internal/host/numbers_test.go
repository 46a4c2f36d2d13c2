package host

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
)

// numbered is a round of an agent that has a number for a GPU.
func numbered(t *testing.T, r *register, gpu core.DeviceID, number int) view {
	t.Helper()
	o := want()
	o.numbering = core.NewNumbering(0, []core.Number{{ID: gpu, At: core.DeviceIndex{GPU: number, Instance: -1}}})
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
