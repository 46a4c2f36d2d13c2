package nvidia

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	testcheck "github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var _ monitor.Session = (*Session)(nil)

// roots are those of a simulated machine.
func roots(m *simdriver.Machine) core.Roots {
	return core.Roots{
		Driver: m.Root, Dev: m.Root, Sys: filepath.Join(m.Root, "sys"), Proc: filepath.Join(m.Root, "proc"),
	}
}

// start starts a simulated machine and opens a session on it.
func start(t *testing.T, machine string, open func(testing.TB, *simdriver.Machine) *Session) (*simdriver.Machine, *Session) {
	t.Helper()
	m := simdriver.Start(t, machine)
	return m, open(t, m)
}

// open opens a session on a simulated machine and closes it when the test ends.
func open(t testing.TB, m *simdriver.Machine) *Session {
	t.Helper()
	// A hung call of an earlier test returns soon after its machine was removed.
	eventually(t, func() (any, bool) { return nil, !anyHung() })
	return openWith(t, m, Options{})
}

// anyHung reports whether a closed session has a call that has not returned.
func anyHung() bool {
	initialized.Lock()
	defer initialized.Unlock()
	return slices.ContainsFunc(initialized.sessions, func(s *Session) bool {
		return s.closed.Load() && len(s.hungWorkers()) > 0
	})
}

// openWith is open with options, and errors that Close may return.
func openWith(t testing.TB, m *simdriver.Machine, o Options, expected ...error) *Session {
	t.Helper()
	o.Roots = roots(m)
	s, err := Open(o)
	must(t, err)
	t.Cleanup(func() {
		err := s.Close()
		if err != nil && !slices.ContainsFunc(expected, func(e error) bool { return errors.Is(err, e) }) {
			t.Error("close:", err)
		}
	})
	return s
}

// calls are the NVML calls to a machine so far, by function.
func calls(t testing.TB, m *simdriver.Machine) map[string]uint64 {
	t.Helper()
	n, err := m.Calls()
	must(t, err)
	return n
}

func snapshot(t testing.TB, s *Session) gpu.Snapshot {
	t.Helper()
	snap, err := s.Snapshot()
	must(t, err)
	return snap
}

// expectSnapshot makes a Snapshot, which must have so many devices, and these exclusions.
func expectSnapshot(t testing.TB, s *Session, when string, devices int, excluded ...gpu.Exclusion) gpu.Snapshot {
	t.Helper()
	snap := snapshot(t, s)
	if len(snap.Devices) != devices || !slices.Equal(snap.Excluded, excluded) {
		t.Errorf("%s: %d devices, want %d; excluded %+v, want %+v", when, len(snap.Devices), devices, snap.Excluded, excluded)
	}
	return snap
}

// expectEvents makes a Wait, which must return these observations.
func expectEvents(t testing.TB, s *Session, when string, max time.Duration, want ...health.Observation) {
	t.Helper()
	if obs, err := s.Wait(max); err != nil || !slices.Equal(obs, want) {
		t.Errorf("%s: %+v, %v, want %+v", when, obs, err, want)
	}
}

// xid is the observation of an XID of a whole GPU.
func xid(m *simdriver.Machine, slot int, code uint64) health.Observation {
	return health.Observation{At: wholeGPU(m, slot), Kind: health.XID, Code: code}
}

func wholeGPU(m *simdriver.Machine, slot int) gpu.Placement {
	return gpu.WholeGPU(gpu.DeviceID(m.UUID(slot)))
}

var must = testcheck.NoError

// testDeadline is a short session deadline.
const testDeadline = 100 * time.Millisecond

func openShortDeadline(t testing.TB, m *simdriver.Machine) *Session {
	t.Helper()
	return openWith(t, m, Options{Deadline: testDeadline})
}

// waitUntilIdle waits until no call of the session is in progress.
func waitUntilIdle(t testing.TB, s *Session) {
	t.Helper()
	eventually(t, func() ([]gpu.Call, bool) {
		return s.Busy(), len(s.hungWorkers()) == 0
	})
}

func probe(t testing.TB, s *Session) map[gpu.DeviceID]health.Observation {
	t.Helper()
	obs, err := s.Probe()
	must(t, err)
	of := map[gpu.DeviceID]health.Observation{}
	for _, o := range obs {
		of[o.At.GPU] = o
	}
	if len(of) != len(obs) {
		t.Errorf("%d observations of %d GPUs", len(obs), len(of))
	}
	return of
}

// awaitEvent waits until Wait returns an observation.
func awaitEvent(t testing.TB, s *Session, want health.Observation) {
	t.Helper()
	eventually(t, func() ([]health.Observation, bool) {
		obs, err := s.Wait(10 * time.Millisecond)
		must(t, err)
		return obs, slices.Contains(obs, want)
	})
}

// openWithEvents opens a session whose waiter has a set with the events of every GPU. Only later events are reported.
func openWithEvents(t testing.TB, m *simdriver.Machine) *Session {
	t.Helper()
	s := open(t, m)
	snapshot(t, s)
	expectEvents(t, s, "at first", 0)
	return s
}

// openWithClock opens a session with a clock. at sets the clock, checks all GPUs and returns the observation per slot.
func openWithClock(t *testing.T, m *simdriver.Machine) (s *Session, at func(time.Duration) func(slot int) health.Observation) {
	t.Helper()
	var now time.Duration
	start := time.Unix(0, 0)
	s = openWith(t, m, Options{Now: func() time.Time { return start.Add(now) }})
	snapshot(t, s)
	return s, func(since time.Duration) func(int) health.Observation {
		now = since
		obs := probe(t, s)
		return func(slot int) health.Observation { return obs[gpu.DeviceID(m.UUID(slot))] }
	}
}

// counted are the calls that f makes, by function.
func counted(t *testing.T, m *simdriver.Machine, f func()) map[string]uint64 {
	t.Helper()
	before := calls(t, m)
	f()
	after := calls(t, m)
	maps.DeleteFunc(after, func(name string, n uint64) bool { return n == before[name] })
	for name := range after {
		after[name] -= before[name]
	}
	return after
}

func total(calls map[string]uint64) (n uint64) {
	for _, c := range calls {
		n += c
	}
	return n
}

// eventually calls f until it reports true.
func eventually[T any](t testing.TB, f func() (T, bool)) T {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for {
		v, ok := f()
		if ok {
			return v
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not in time; last: %+v", v)
		}
	}
}

// allCalls are the calls that a session can make: the names of functions in the code of this package, except those that are
// only a version of another one.
func allCalls() (calls []string) {
	files, _ := filepath.Glob("*.go") // fails only for a malformed pattern
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, literal := range functionName.FindAllStringSubmatch(string(text), -1) {
			calls = append(calls, literal[1])
		}
	}
	others := slices.Concat(slices.Collect(maps.Values(versions))...)
	calls = slices.DeleteFunc(calls, func(name string) bool {
		_, isCall := versions[name]
		return !isCall && slices.Contains(others, name)
	})
	slices.Sort(calls)
	return slices.Compact(calls)
}

var functionName = regexp.MustCompile(`"(nvml[A-Z]\w+)"`)
