package core_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// The memory for codes that a driver invents is bounded, and codes with a name are still counted.
func TestBoundedUnderRandomCodes(t *testing.T) {
	const gpus, total, batch = 4, 1_000_000, 1000
	random := rand.New(rand.NewPCG(1, 2))
	p, l, now := core.DefaultHealthPolicy(), core.Ledger{}, testStart
	obs := make([]core.Observation, batch)
	for range total / batch {
		for i := range obs {
			obs[i] = xidEvent(core.WholeGPU(core.DeviceID(fmt.Sprint("GPU-", random.IntN(gpus)))), random.Uint64())
		}
		now = now.Add(10 * time.Millisecond)
		l = l.Apply(p, now, obs...)
	}
	if n := len(l.Conditions()); n > gpus*70 {
		t.Errorf("%d conditions", n)
	}
	var counted uint64
	for i := range gpus {
		history, _ := l.History(core.DeviceID(fmt.Sprint("GPU-", i)))
		if n := len(history.FaultCounts); n > 70 {
			t.Errorf("%d tallies", n)
		}
		for _, tally := range history.FaultCounts {
			counted += tally.Count
		}
	}
	if counted != total {
		t.Errorf("%d of %d XIDs were counted", counted, total)
	}
	lost := core.WholeGPU("GPU-0")
	if h := l.Apply(p, now, xidEvent(lost, 79)).Health(lost); h.Code != 79 {
		t.Errorf("a known XID afterwards: %s", h)
	}
}

// A year of faults takes no more memory than a day.
func TestBoundedOverUptime(t *testing.T) {
	s := newLedgerFixture(t)
	size := func() int {
		record := core.State{Ledger: s.ledger}.Checkpoint("boot")
		text, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		return len(text)
	}
	day := func() {
		for hour := range 24 {
			s.allocate(a)
			s.reportXIDs(13, 31, 80, 94, 95, 109, 500+uint64(hour))
			s.setSample(func(v *core.HealthSample) { v.Uncorrectable.Value++ })
			s.check(3)
			s.reset()
			s.failing[a.GPU] = core.Lost
			s.check(2)
			delete(s.failing, a.GPU)
			s.check(10)
			s.now = s.now.Add(time.Hour)
			_, _ = s.clear(core.Command{})
		}
	}
	for range 2 {
		day()
	}
	first := size()
	for range 30 {
		day()
	}
	if last := size(); last > first+first/10 {
		t.Errorf("%d bytes after two days, %d after a month", first, last)
	}
}
