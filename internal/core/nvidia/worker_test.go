package nvidia

import (
	"errors"
	"maps"
	"runtime"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// In whichever call a GPU hangs, the others are read and checked, and their events reported.
func TestHangAnywhere(t *testing.T) {
	for _, c := range []struct {
		where, call string
		do          func(t *testing.T, s *Session)
	}{
		{"check", "nvmlDeviceGetFieldValues", func(t *testing.T, s *Session) { probe(t, s) }},
		{"slow part of a check", "nvmlDeviceGetRepairStatus", func(t *testing.T, s *Session) { probe(t, s) }},
		{"usage", "nvmlDeviceGetPowerUsage", func(t *testing.T, s *Session) {
			usage, err := s.Usage()
			unset := slices.Index(usage, gpu.Usage{Device: h100ID})
			if err != nil || len(usage) != 8 || unset != 3 {
				t.Errorf("%+v, %v", usage, err)
			}
		}},
		{"identity", "nvmlDeviceGetUUID", func(t *testing.T, s *Session) { snapshot(t, s) }},
		{"snapshot", "nvmlDeviceGetMemoryInfo", func(t *testing.T, s *Session) { snapshot(t, s) }},
		{"links", "nvmlDeviceGetNvLinkState", func(t *testing.T, s *Session) {
			s.topology = topology{}
			for _, l := range snapshot(t, s).Links { // no second call about it
				if (l.A == h100ID || l.B == h100ID) && l.Path != gpu.PathUnknown {
					t.Errorf("%+v", l)
				}
			}
		}},
		{"paths", "nvmlDeviceGetTopologyCommonAncestor", func(t *testing.T, s *Session) { s.topology = topology{}; snapshot(t, s) }},
		{"registration", "nvmlDeviceRegisterEvents", func(t *testing.T, s *Session) { s.registeredGPUs = nil; snapshot(t, s) }},
	} {
		t.Run(c.where, func(t *testing.T) {
			m, s := start(t, "h100x8", openShortDeadline)
			before := snapshot(t, s)
			must(t, m.Hang(simdriver.GPU(3), c.call))
			c.do(t, s)

			waiting := health.Observation{At: gpu.WholeGPU(h100ID), Kind: health.CallPending, Detail: c.call}
			obs := probe(t, s)
			if got := obs[h100ID]; got != waiting || len(obs) != 8 {
				t.Errorf("%+v", got)
			}
			delete(obs, h100ID)
			for _, o := range obs {
				if o.Kind != health.Checked || o.Sample.RecoveryAction != health.RecoveryNone || o.Sample.Events != health.Yes {
					t.Errorf("%+v", o)
				}
			}
			expectSnapshot(t, s, "hangs", 7, h100Pending(c.call))
			if busy := s.Busy(); len(busy) != 1 || busy[0].At != waiting.At || busy[0].Index != 3 {
				t.Errorf("busy: %+v", busy)
			}
			must(t, m.XID(4, 62))
			awaitEvent(t, s, xid(m, 4, 62))

			must(t, m.Heal())
			waitUntilIdle(t, s)
			if after := snapshot(t, s); !after.Equal(before) {
				t.Error(gocmp.Diff(before, after))
			}
			if got := probe(t, s)[h100ID]; got.Kind != health.Checked || got.Sample.Events != health.Yes {
				t.Errorf("healed: %+v", got)
			}
			must(t, m.XID(3, 62))
			awaitEvent(t, s, xid(m, 3, 62))
		})
	}
}

// A hang costs one call and one goroutine, however long it lasts, and the query makes no further call.
func TestHangCostsOneCall(t *testing.T) {
	m, s := start(t, "h100x8", openShortDeadline)
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
	if took := time.Since(began); took > 100*testDeadline/2 {
		t.Errorf("100 checks took %v", took)
	}
	eventually(t, func() (int, bool) { // the last query may be ending
		n := runtime.NumGoroutine()
		return n, n <= goroutines
	})
	all := calls(t, m)
	if n := all["nvmlDeviceGetUUID"] - hung["nvmlDeviceGetUUID"]; n != 700 {
		t.Errorf("%d calls for 100 checks of seven GPUs", n)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
	if after := calls(t, m); !maps.Equal(after, all) {
		t.Errorf("the query continued: %s", gocmp.Diff(all, after))
	}
}

// A slow GPU is waited for while its calls return, up to maxQueryDeadlines.
func TestSlowGPU(t *testing.T) {
	m, s := start(t, "h100x8", openShortDeadline)
	must(t, m.Slow(simdriver.GPU(3), "nvmlDeviceGetM*", testDeadline/4))
	expectSnapshot(t, s, "slow", 8)
	must(t, m.Heal(), m.Slow(simdriver.GPU(3), "*", 3*testDeadline/4)) // of eight calls
	began := time.Now()
	snap := snapshot(t, s)
	if took := time.Since(began); took > 3*maxQueryDeadlines*testDeadline {
		t.Errorf("took %v", took)
	}
	if len(snap.Devices) != 7 || len(snap.Excluded) != 1 || snap.Excluded[0].Failure != gpu.FailurePending {
		t.Errorf("slower: %d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
}

// A session with a call in progress can't be shut down; the next session takes over the call, and makes the shutdown.
func TestAbandonedSession(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: testDeadline}, errAbandoned)
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetUUID"))
	probe(t, s)
	if err := s.Close(); !errors.Is(err, errAbandoned) || calls(t, m)["nvmlShutdown"] != 0 {
		t.Fatal(err)
	}
	next := openShortDeadline(t, m)
	expectSnapshot(t, next, "still hangs", 7, h100Pending("nvmlDeviceGetUUID"))
	if busy := next.Busy(); len(busy) != 1 || busy[0].Index != 3 {
		t.Errorf("busy: %+v", busy)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
	expectSnapshot(t, next, "healed", 8)
	must(t, next.Close(), openShortDeadline(t, m).Close())
	if n := calls(t, m); n["nvmlShutdown"] != 3 || n["nvmlInit_v2"] != 3 {
		t.Errorf("%d of %d sessions shut down", n["nvmlShutdown"], n["nvmlInit_v2"])
	}
}

// A goroutine that queryAll starts while another one takes the last query has nothing to do, and ends.
func TestLastQueryIsTakenMeanwhile(t *testing.T) {
	queue := make(chan *pendingQuery[int])
	close(queue)
	runQueries(queue)
}
