package nvidia

import (
	"errors"
	"maps"
	"runtime"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// brief is a patience that a test can afford.
const brief = 100 * time.Millisecond

func openBriefly(t testing.TB, m *simdriver.Machine) *Session {
	t.Helper()
	return openWith(t, m, Options{Deadline: brief})
}

// free waits until nothing is in the driver any more.
func free(t testing.TB, s *Session) {
	t.Helper()
	eventually(t, func() ([]core.Call, bool) {
		return s.Busy(), len(s.stuck()) == 0
	})
}

func probe(t testing.TB, s *Session) map[core.DeviceID]core.Observation {
	t.Helper()
	obs, err := s.Probe()
	must(t, err)
	of := map[core.DeviceID]core.Observation{}
	for _, o := range obs {
		of[o.At.GPU] = o
	}
	if len(of) != len(obs) {
		t.Errorf("%d observations of %d GPUs", len(obs), len(of))
	}
	return of
}

func TestHangAtTheFirstReading(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openBriefly(t, m)
	must(t, m.Hang(simdriver.GPU(3), "*"))
	want := []core.Exclusion{{
		Index: 3, At: core.Node, Failure: core.FailurePending, Reason: "the driver does not answer (nvmlDeviceGetHandleByIndex)",
	}}
	for _, upTo := range []time.Duration{10 * brief, brief} { // the second reading does not wait at all
		began := time.Now()
		snap := snapshot(t, s)
		if took := time.Since(began); took > upTo {
			t.Errorf("took %v", took)
		}
		if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, want) || len(snap.Links) != 21 {
			t.Errorf("%d devices, %d links, excluded %+v", len(snap.Devices), len(snap.Links), snap.Excluded)
		}
	}
	if busy := s.Busy(); len(busy) != 1 || busy[0].Index != 3 || busy[0].At != core.Node ||
		busy[0].Name != "nvmlDeviceGetHandleByIndex" || time.Since(busy[0].Since) < brief {
		t.Errorf("busy: %+v", busy)
	}
	if obs := probe(t, s); len(obs) != 7 {
		t.Errorf("%+v", obs)
	}
	must(t, m.Heal())
	free(t, s)
	if snap := snapshot(t, s); len(snap.Devices) != 8 || len(snap.Excluded) != 0 || len(snap.Links) != 28 {
		t.Errorf("healed: %d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
}

// Wherever a GPU hangs, the others are read, checked and heard.
func TestHangAnywhere(t *testing.T) {
	for _, c := range []struct {
		where, call string
		do          func(t *testing.T, s *Session)
	}{
		{"check", "nvmlDeviceGetFieldValues", func(t *testing.T, s *Session) { probe(t, s) }},
		{"slow part of a check", "nvmlDeviceGetRepairStatus", func(t *testing.T, s *Session) { probe(t, s) }},
		{"numbers", "nvmlDeviceGetPowerUsage", func(t *testing.T, s *Session) {
			usage, err := s.Usage()
			unset := slices.Index(usage, core.Usage{Device: h100ID})
			if err != nil || len(usage) != 8 || unset != 3 {
				t.Errorf("%+v, %v", usage, err)
			}
		}},
		{"identity", "nvmlDeviceGetUUID", func(t *testing.T, s *Session) { snapshot(t, s) }},
		{"reading", "nvmlDeviceGetMemoryInfo", func(t *testing.T, s *Session) { snapshot(t, s) }},
		{"links", "nvmlDeviceGetNvLinkState", func(t *testing.T, s *Session) { s.network = network{}; snapshot(t, s) }},
		{"paths", "nvmlDeviceGetTopologyCommonAncestor", func(t *testing.T, s *Session) { s.network = network{}; snapshot(t, s) }},
		{"registration", "nvmlDeviceRegisterEvents", func(t *testing.T, s *Session) { s.heard = nil; snapshot(t, s) }},
	} {
		t.Run(c.where, func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			s := openBriefly(t, m)
			before := snapshot(t, s)
			must(t, m.Hang(simdriver.GPU(3), c.call))
			c.do(t, s)

			waiting := core.Observation{At: core.WholeGPU(h100ID), Kind: core.CallPending, Detail: c.call}
			obs := probe(t, s)
			if got := obs[h100ID]; got != waiting || len(obs) != 8 {
				t.Errorf("%+v", got)
			}
			delete(obs, h100ID)
			for o := range maps.Values(obs) {
				if o.Kind != core.Checked || o.Sample.RecoveryAction != core.RecoveryNone || o.Sample.Events != core.Yes {
					t.Errorf("%+v", o)
				}
			}
			snap := snapshot(t, s)
			e := core.Exclusion{
				Index: 3, At: waiting.At, PCI: h100PCI, Failure: core.FailurePending, Reason: "the driver does not answer (" + c.call + ")",
			}
			if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, []core.Exclusion{e}) {
				t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
			}
			if busy := s.Busy(); len(busy) != 1 || busy[0].At != waiting.At || busy[0].Index != 3 {
				t.Errorf("busy: %+v", busy)
			}
			must(t, m.XID(4, 62))
			heard(t, s, core.Observation{At: core.WholeGPU(core.DeviceID(m.UUID(4))), Kind: core.XID, Code: 62})

			must(t, m.Heal())
			free(t, s)
			if after := snapshot(t, s); !after.Equal(before) {
				t.Error(gocmp.Diff(before, after))
			}
			if got := probe(t, s)[h100ID]; got.Kind != core.Checked || got.Sample.Events != core.Yes {
				t.Errorf("healed: %+v", got)
			}
			must(t, m.XID(3, 62))
			heard(t, s, core.Observation{At: waiting.At, Kind: core.XID, Code: 62})
		})
	}
}

// heard waits for an observation among the events.
func heard(t testing.TB, s *Session, want core.Observation) {
	t.Helper()
	eventually(t, func() ([]core.Observation, bool) {
		obs, err := s.Wait(10 * time.Millisecond)
		must(t, err)
		return obs, slices.Contains(obs, want)
	})
}

// A hang costs one call and one goroutine, however long it lasts, and what it had still to ask is not asked.
func TestHangCostsOneCall(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openBriefly(t, m)
	snapshot(t, s)
	probe(t, s)
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetUUID"))
	probe(t, s)
	hung := calls(t, m)
	goroutines := runtime.NumGoroutine()
	began := time.Now()
	for range 100 {
		probe(t, s)
	}
	if took := time.Since(began); took > 100*brief/2 {
		t.Errorf("100 checks took %v", took)
	}
	eventually(t, func() (int, bool) { // the last visit may be on its way out
		n := runtime.NumGoroutine()
		return n, n <= goroutines
	})
	all := calls(t, m)
	if n := all["nvmlDeviceGetUUID"] - hung["nvmlDeviceGetUUID"]; n != 700 {
		t.Errorf("%d calls for 100 checks of seven GPUs", n)
	}
	must(t, m.Heal())
	free(t, s)
	if after := calls(t, m); !maps.Equal(after, all) {
		t.Errorf("the visit went on: %s", gocmp.Diff(all, after))
	}
}

// A GPU that crawls is waited for as long as its calls come back, but not for ever.
func TestCrawling(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openBriefly(t, m)
	must(t, m.Slow(simdriver.GPU(3), "nvmlDeviceGetM*", brief/4))
	if snap := snapshot(t, s); len(snap.Devices) != 8 {
		t.Errorf("slow: excluded %+v", snap.Excluded)
	}
	must(t, m.Heal(), m.Slow(simdriver.GPU(3), "*", 3*brief/4)) // of eight calls
	began := time.Now()
	snap := snapshot(t, s)
	if took := time.Since(began); took > 3*maxVisit*brief {
		t.Errorf("took %v", took)
	}
	if len(snap.Devices) != 7 || len(snap.Excluded) != 1 || snap.Excluded[0].Failure != core.FailurePending {
		t.Errorf("slower: %d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	must(t, m.Heal())
	free(t, s)
}

// A session with a call in the driver can't be shut down; the next one knows, and it makes up for it.
func TestAbandonedSession(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: brief}, ErrAbandoned)
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetUUID"))
	probe(t, s)
	if err := s.Close(); !errors.Is(err, ErrAbandoned) || calls(t, m)["nvmlShutdown"] != 0 {
		t.Fatal(err)
	}
	next := openBriefly(t, m)
	snap := snapshot(t, next)
	want := core.Exclusion{
		Index: 3, At: core.WholeGPU(h100ID), PCI: h100PCI, Failure: core.FailurePending, Reason: "the driver does not answer (nvmlDeviceGetUUID)",
	}
	if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, []core.Exclusion{want}) {
		t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	if busy := next.Busy(); len(busy) != 1 || busy[0].Index != 3 {
		t.Errorf("busy: %+v", busy)
	}
	must(t, m.Heal())
	free(t, s)
	if snap := snapshot(t, next); len(snap.Devices) != 8 {
		t.Errorf("healed: excluded %+v", snap.Excluded)
	}
	must(t, next.Close(), openBriefly(t, m).Close())
	if n := calls(t, m); n["nvmlShutdown"] != 3 || n["nvmlInit_v2"] != 3 {
		t.Errorf("%d of %d sessions shut down", n["nvmlShutdown"], n["nvmlInit_v2"])
	}
}
