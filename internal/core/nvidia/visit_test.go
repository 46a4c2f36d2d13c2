package nvidia

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Eight GPUs that hang cost what one costs, wherever they do: at the first reading, or in the first check,
// reading or numbers after it.
func TestAllHang(t *testing.T) {
	const patience = 300 * time.Millisecond
	for _, c := range []struct {
		where, call string
		read        bool // they are known when they begin to hang
		do          func(s *Session) (silent int, err error)
	}{
		{"first reading", "*", false, silentInReading},
		{"identity", "nvmlDeviceGetUUID", true, silentInReading},
		{"reading", "nvmlDeviceGetMemoryInfo", true, silentInReading},
		{"check", "nvmlDeviceGetFieldValues", true, func(s *Session) (int, error) {
			obs, err := s.Probe()
			n := 0
			for _, o := range obs {
				if o.Kind == core.CallPending {
					n++
				}
			}
			return n, err
		}},
		{"numbers", "nvmlDeviceGetPowerUsage", true, func(s *Session) (int, error) {
			usage, err := s.Usage()
			n := 0
			for _, u := range usage {
				if (u == core.Usage{Device: u.Device}) {
					n++
				}
			}
			return n, err
		}},
	} {
		t.Run(c.where, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			s := openWith(t, m, Options{Deadline: patience})
			if c.read {
				snapshot(t, s)
			}
			for slot := range 8 {
				must(t, m.Hang(simdriver.GPU(slot), c.call))
			}
			began := time.Now()
			silent, err := c.do(s)
			took := time.Since(began)
			t.Logf("eight GPUs that hang cost %.1f times the patience", took.Seconds()/patience.Seconds())
			if silent != 8 || err != nil || took > 6*patience {
				t.Errorf("%d are silent after %v, error %v", silent, took, err)
			}
			if busy := s.Busy(); len(busy) != 8 {
				t.Errorf("busy: %+v", busy)
			}
			must(t, m.Heal())
			free(t, s)
			if snap := snapshot(t, s); len(snap.Devices) != 8 {
				t.Errorf("healed: excluded %+v", snap.Excluded)
			}
		})
	}
}

func silentInReading(s *Session) (n int, err error) {
	snap, err := s.Snapshot()
	for _, e := range snap.Excluded {
		if e.Failure == core.FailurePending {
			n++
		}
	}
	return n + len(snap.Devices)*100, err
}

// A driver that serves one GPU after the other is waited for as long as it gets on, also longer than one
// GPU alone would be.
func TestServedOneByOne(t *testing.T) {
	const patience = 400 * time.Millisecond
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: patience})
	for slot := range 8 {
		must(t, m.Slow(simdriver.GPU(slot), "nvmlDeviceGetHandleByIndex", time.Duration(slot+1)*patience/3))
	}
	if snap := snapshot(t, s); len(snap.Devices) != 8 {
		t.Errorf("excluded %+v", snap.Excluded)
	}
}
