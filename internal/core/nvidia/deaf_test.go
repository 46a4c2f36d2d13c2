package nvidia

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A wait that hangs is seen, wherever it does; meanwhile the GPUs are asked, nobody claims to hear their
// events, and sets don't pile up.
func TestWaitHangs(t *testing.T) {
	for _, call := range []string{"nvmlEventSetWait", "nvmlSystemEventSetWait", "nvmlSystemEventSetCreate"} {
		t.Run(call, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			s := openBriefly(t, m)
			snapshot(t, s)
			must(t, m.Hang(simdriver.All, call))
			back := make(chan error)
			go func() {
				_, err := s.Wait(10 * time.Millisecond)
				back <- err
			}()
			deaf := eventually(t, func() (core.Call, bool) { return s.deaf() })
			if deaf.Name != call || deaf.At != core.Node || deaf.Index != -1 {
				t.Errorf("%+v", deaf)
			}
			for _, o := range probe(t, s) {
				if o.Kind != core.Checked || o.Sample.Events != core.NotReported {
					t.Errorf("%+v", o)
				}
			}
			if busy := s.Busy(); len(busy) > 0 {
				t.Errorf("busy: %+v", busy)
			}
			before := descriptors(t)
			for range 20 { // each is another set of GPUs to listen to
				must(t, m.Lose(3))
				snapshot(t, s)
				must(t, m.Restore(3))
				snapshot(t, s)
			}
			if after := descriptors(t); after > before+2*mostMade {
				t.Errorf("%d descriptors, before %d", after, before)
			}
			must(t, m.Heal())
			if err := <-back; err != nil {
				t.Error(err)
			}
			if c, deaf := s.deaf(); deaf {
				t.Errorf("healed: %+v", c)
			}
			must(t, m.XID(3, 62))
			heard(t, s, core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 62})
			if o := probe(t, s)[h100ID]; o.Sample.Events != core.Yes {
				t.Errorf("healed: %+v", o)
			}
		})
	}
}

// A wait is as long as it was told to be before anybody calls it late.
func TestLongWaitIsNotDeaf(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := openBriefly(t, m)
	snapshot(t, s)
	back := make(chan error)
	go func() {
		_, err := s.Wait(5 * brief)
		back <- err
	}()
	late := false
	for wait := true; wait; {
		select {
		case err := <-back:
			must(t, err)
			wait = false
		case <-time.After(brief / 10):
			c, deaf := s.deaf()
			late = late || deaf && time.Since(c.Since) < 5*brief
		}
	}
	if late {
		t.Error("it was called late while it was to wait")
	}
}
