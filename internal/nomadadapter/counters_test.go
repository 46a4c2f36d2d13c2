package nomadadapter

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// durations are those that a plugin reports.
type durations map[string][]time.Duration

func observe(s *fixture) durations {
	d, mu := durations{}, &sync.Mutex{}
	s.ObserveDurations(func(method string, took time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		d[method] = append(d[method], took)
	})
	return d
}

// The counters follow what Nomad takes. A fingerprint's duration begins with the first change that it has, a response's with the read
// of its usage; a response between two reads has none.
func TestCounters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nodeInventory(coretest.GPUs(2)))
		took := observe(s)
		if c := s.Counters(); c.FingerprintResponses != 0 || c.Groups != nil {
			t.Errorf("before the first call: %+v", c)
		}
		ch := fingerprints(t.Context(), t, s)
		<-ch
		s.Source.Set(nodeInventory(coretest.GPUs(3)))
		synctest.Wait()
		time.Sleep(300 * time.Millisecond)
		s.Source.Set(nodeInventory(coretest.GPUs(4)))
		<-ch // at the end of fingerprintInterval
		synctest.Wait()
		c := s.Counters()
		checkEqual(t, "fingerprints", uint64(2), c.FingerprintResponses)
		checkEqual(t, "their durations", []time.Duration{0, fingerprintInterval}, took["Fingerprint"])
		checkEqual(t, "groups", []string{"nvidia/gpu/NVIDIA H100 80GB HBM3 (4)"}, c.Groups)
		s.Source.Set(nodeInventory(coretest.GPUs(0)))
		<-ch
		synctest.Wait()
		checkEqual(t, "groups without a device", 0, len(s.Counters().Groups))

		statistics := openStats(t.Context(), t, s, time.Second)
		time.Sleep(250 * time.Millisecond) // Nomad takes it later
		<-statistics
		<-statistics
		synctest.Wait()
		checkEqual(t, "responses", uint64(2), s.Counters().StatsResponses)
		checkEqual(t, "their durations", []time.Duration{250 * time.Millisecond, 0}, took["Stats"])
	})
}

// Each Reserve is counted once, with its duration; one without devices is none.
func TestReservationsAreCounted(t *testing.T) {
	s := newFixture(t, nodeInventory(coretest.GPUs(2)))
	took := observe(s)
	for _, ids := range [][]string{{string(coretest.GPU(0))}, {string(coretest.GPU(0)), string(coretest.GPU(1))}, nil, {"GPU-unknown"}} {
		_, _ = s.Reserve(ids)
	}
	if c := s.Counters(); c.Reservations != 2 || c.ReservationErrors != 1 || len(took["Reserve"]) != 3 || slices.Min(took["Reserve"]) <= 0 {
		t.Errorf("%+v, %v", c, took)
	}
}

// observedReloads records what a plugin reports.
type observedReloads struct{ loaded, refused int }

func (o *observedReloads) Loaded(time.Time)         { o.loaded++ }
func (o *observedReloads) Refused(time.Time, error) { o.refused++ }

// Each read of the configuration is reported: blocks, and the policy file at a reload.
func TestReloadsAreReported(t *testing.T) {
	s, path := newFixture(t, nodeInventory(coretest.GPUs(1))), policyFile(t, "version: v1\n")
	var seen observedReloads
	s.ObserveReloads(&seen)
	s.mustConfigure(t, map[string]any{"policy_file": path})
	write(t, path, invalidPolicy)
	s.Reload(t.Context())
	write(t, path, validPolicy)
	s.Reload(t.Context())
	if seen != (observedReloads{loaded: 2, refused: 1}) {
		t.Errorf("%+v", seen)
	}
}
