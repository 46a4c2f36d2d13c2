package nvidia

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A hung wait is reported; meanwhile GPUs are checked, Sample.Events is NotReported, and sets do not accumulate.
func TestWaitHangs(t *testing.T) {
	for _, call := range []string{"nvmlEventSetWait", "nvmlSystemEventSetWait", "nvmlSystemEventSetCreate"} {
		t.Run(call, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			s := openShortDeadline(t, m)
			snapshot(t, s)
			must(t, m.Hang(simdriver.All, call))
			back := make(chan error)
			go func() {
				_, err := s.Wait(10 * time.Millisecond)
				back <- err
			}()
			hung := eventually(t, func() (gpu.Call, bool) { return s.hungWait() })
			if hung.Name != call || hung.At != gpu.Node || hung.Index != -1 {
				t.Errorf("%+v", hung)
			}
			for _, o := range probe(t, s) {
				if o.Kind != health.Checked || o.Sample.Events != health.NotReported {
					t.Errorf("%+v", o)
				}
			}
			if busy := s.Busy(); len(busy) > 0 {
				t.Errorf("busy: %+v", busy)
			}
			before := descriptors(t)
			for range 20 { // each creates another event set
				must(t, m.Lose(3))
				snapshot(t, s)
				must(t, m.Restore(3))
				snapshot(t, s)
			}
			if after := descriptors(t); after > before+2*maxPendingSets {
				t.Errorf("%d descriptors, before %d", after, before)
			}
			must(t, m.Heal())
			if err := <-back; err != nil {
				t.Error(err)
			}
			if c, hung := s.hungWait(); hung {
				t.Errorf("healed: %+v", c)
			}
			must(t, m.XID(3, 62))
			awaitEvent(t, s, health.Observation{At: gpu.WholeGPU(h100ID), Kind: health.XID, Code: 62})
			if o := probe(t, s)[h100ID]; o.Sample.Events != health.Yes {
				t.Errorf("healed: %+v", o)
			}
		})
	}
}

// A wait within the time that it was given is not hung.
func TestLongWaitIsNotHung(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := openShortDeadline(t, m)
	snapshot(t, s)
	back := make(chan error)
	go func() {
		_, err := s.Wait(5 * testDeadline)
		back <- err
	}()
	late := false
	for wait := true; wait; {
		select {
		case err := <-back:
			must(t, err)
			wait = false
		case <-time.After(testDeadline / 10):
			c, hung := s.hungWait()
			late = late || hung && time.Since(c.Since) < 5*testDeadline
		}
	}
	if late {
		t.Error("reported as hung within its time")
	}
}

// Eight GPUs that hang cost the time of one: in the first Snapshot, and in the first check, Snapshot or Usage after it.
func TestAllHang(t *testing.T) {
	const deadline = 300 * time.Millisecond
	for _, c := range []struct {
		where, call string
		read        bool // they were read before they hang
		do          func(s *Session) (hung int, err error)
	}{
		{"first reading", "*", false, hungInSnapshot},
		{"identity", "nvmlDeviceGetUUID", true, hungInSnapshot},
		{"reading", "nvmlDeviceGetMemoryInfo", true, hungInSnapshot},
		{"check", "nvmlDeviceGetFieldValues", true, func(s *Session) (int, error) {
			obs, err := s.Probe()
			n := 0
			for _, o := range obs {
				if o.Kind == health.CallPending {
					n++
				}
			}
			return n, err
		}},
		{"usage", "nvmlDeviceGetPowerUsage", true, func(s *Session) (int, error) {
			usage, err := s.Usage()
			n := 0
			for _, u := range usage {
				if (u == gpu.Usage{Device: u.Device}) {
					n++
				}
			}
			return n, err
		}},
	} {
		t.Run(c.where, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			s := openWith(t, m, Options{Deadline: deadline})
			if c.read {
				snapshot(t, s)
			}
			for slot := range 8 {
				must(t, m.Hang(simdriver.GPU(slot), c.call))
			}
			began := time.Now()
			hung, err := c.do(s)
			took := time.Since(began)
			t.Logf("eight GPUs that hang cost %.1f deadlines", took.Seconds()/deadline.Seconds())
			if hung != 8 || err != nil || took > 6*deadline {
				t.Errorf("%d hang after %v, error %v", hung, took, err)
			}
			if busy := s.Busy(); len(busy) != 8 {
				t.Errorf("busy: %+v", busy)
			}
			must(t, m.Heal())
			waitUntilIdle(t, s)
			if snap := snapshot(t, s); len(snap.Devices) != 8 {
				t.Errorf("healed: excluded %+v", snap.Excluded)
			}
		})
	}
}

func hungInSnapshot(s *Session) (n int, err error) {
	snap, err := s.Snapshot()
	for _, e := range snap.Excluded {
		if e.Failure == gpu.FailurePending {
			n++
		}
	}
	return n + len(snap.Devices)*100, err
}

// A driver may serve one GPU after the other: the deadline starts again with every GPU that answers.
func TestDriverServesOneGPUAtATime(t *testing.T) {
	const deadline = 400 * time.Millisecond
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: deadline})
	for slot := range 8 {
		must(t, m.Slow(simdriver.GPU(slot), "nvmlDeviceGetHandleByIndex", time.Duration(slot+1)*deadline/3))
	}
	if snap := snapshot(t, s); len(snap.Devices) != 8 {
		t.Errorf("excluded %+v", snap.Excluded)
	}
}
