package live

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A machine without a GPU offers nothing and is in order; the first GPU is there with the next reading.
func TestFirstGPUComesLater(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "h100x8")
	slots, err := m.Slots()
	must(t, err)
	for _, slot := range slots {
		must(t, m.Remove(slot))
	}
	s := stage(t, m, hasty)
	s.settles("no GPU", time.Now(), nil)
	if d := s.monitor.Current().Driver(); d.State != gpu.DriverReady {
		t.Errorf("driver %+v", d)
	}
	if n := len(s.kubelet.Registrations()); n != 0 {
		t.Errorf("%d resources registered without a GPU", n)
	}
	began := time.Now()
	must(t, s.Add(0))
	s.settles("the first GPU", began, s.units())
	s.granted("the first GPU", s.units()...)
}

// The last device of a resource goes: the resource stays, empty, so that no capacity is left behind; and it
// is filled again without another registration.
func TestResourceRunsEmpty(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	for _, slot := range []int{0, 1, 2, 3, mixed, 7} { // what is left is one of each: 4 in sevenths, 6 in one piece
		must(t, m.Remove(slot))
	}
	must(t, m.MIGOff(sevenths))
	s := stage(t, m)
	s.settles("start", time.Now(), s.units())
	s.capacity("start", gpuResource, 1)
	s.capacity("start", mig7g, 1)
	whole, large := s.UUID(sevenths), s.unitsOf(busy)[0]

	began := time.Now()
	must(t, m.SetMIG(sevenths), m.SetMIG(busy)) // MIG mode on, no instance
	s.settles("MIG mode on, without instances", began, nil)
	s.capacity("empty", gpuResource, 0)
	s.capacity("empty", mig7g, 0)
	for _, id := range []string{whole, large} {
		if _, err := s.nomad.reserve(id); err == nil {
			t.Errorf("%s was given away after it went", id)
		}
	}

	began = time.Now()
	must(t, m.MIGOff(sevenths), m.SetMIG(busy, "7g.80gb"))
	s.settles("back", began, s.units())
	s.capacity("filled again", gpuResource, 1)
	s.capacity("filled again", mig7g, 1)
	s.granted("filled again", s.units()...)
}
