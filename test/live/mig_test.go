package live

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The GPUs of the machine a100-mig that these tests change.
const (
	sevenths = 4 // seven times 1g.10gb
	mixed    = 5
	busy     = 6 // one 7g.80gb
)

const (
	mig1g       = "nvidia.com/mig-1g.10gb"
	mig2g       = "nvidia.com/mig-2g.20gb"
	mig7g       = "nvidia.com/mig-7g.80gb"
	gpuResource = "nvidia.com/gpu"
)

func seven(profile string) []string { return slices.Repeat([]string{profile}, 7) }

func three(profile string) []string { return slices.Repeat([]string{profile}, 3) }

// relaid is a machine under load whose GPU 4 is laid out anew again and again, with the default configuration.
type relaid struct {
	*scene
	t    *testing.T
	load *load
	rest []string // the devices of all other GPUs
}

// change makes a change of the layout and checks what came of it. untouched are resources of which nothing
// may be said meanwhile.
func (r *relaid) change(what string, do func() error, untouched ...string) {
	r.t.Helper()
	old, since, attributes := r.unitsOf(sevenths), r.mark(), r.groupsOf(r.rest)
	began := time.Now()
	must(r.t, do())
	r.offers(what+": offered", began, r.unitsOf(sevenths))
	d := r.settles(what, began, r.units())
	promised(r.t, what, d.most(), 5*time.Second)
	r.undisturbed(what, since, r.rest)
	r.silent(what, since, untouched...)
	if now := r.groupsOf(r.rest); !reflect.DeepEqual(now, attributes) {
		r.t.Errorf("%s: the groups of other GPUs were %v and are %v", what, attributes, now)
	}
	now := r.unitsOf(sevenths)
	r.granted(what, now...)
	r.load.learn(now)
	for _, id := range without(old, now...) {
		if _, err := r.nomad.reserve(id); err == nil || !strings.Contains(err.Error(), "unknown device IDs: "+id) {
			r.t.Errorf("%s: Reserve(%s): %v", what, id, err)
		}
	}
}

// A GPU is cut up in another way while work starts all around, and one of its old instances is on the books of
// both orchestrators. Everything else goes on as if nothing happened; with the default configuration it takes
// less than 5 s until both have the new layout, and nothing is dropped that was healthy a moment ago.
func TestMIGLayouts(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.MIGOff(mixed)) // else its instances are of the resources that shall come and go
	s := stage(t, m)
	r := &relaid{scene: s, t: t}
	s.settles("start", time.Now(), s.units())
	r.rest = without(s.units(), s.unitsOf(sevenths)...)
	booked := s.unitsOf(sevenths)[2]
	s.granted("before", booked)
	var stop func()
	r.load, stop = s.press(t, r.rest, s.unitsOf(sevenths))
	defer stop()

	r.change("7 x 1g.10gb to 3 x 2g.20gb", func() error { return m.SetMIG(sevenths, three("2g.20gb")...) }, gpuResource, mig7g)
	r.capacity("cut in 3", mig1g, 0)
	r.capacity("cut in 3", mig2g, 3)
	r.change("and back", func() error { return m.SetMIG(sevenths, seven("1g.10gb")...) }, gpuResource, mig7g)
	r.capacity("cut in 7", mig1g, 7)
	r.capacity("cut in 7", mig2g, 0)
	r.change("MIG mode off", func() error { return m.MIGOff(sevenths) }, mig2g, mig7g)
	r.capacity("whole", mig1g, 0)
	r.capacity("whole", gpuResource, 6)
	r.change("MIG mode on", func() error { return m.SetMIG(sevenths, seven("1g.10gb")...) }, mig2g, mig7g)
	r.capacity("cut in 7 again", mig1g, 7)
	r.capacity("cut in 7 again", gpuResource, 5)

	for _, said := range r.load.texts() {
		if !strings.Contains(said, "ID") {
			t.Errorf("refusal without the ID: %s", said)
		}
	}
	if len(r.load.texts()) == 0 {
		t.Error("no request for a withdrawn device was refused")
	}
}
