package nvidia

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

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
			return count(obs, func(o health.Observation) bool { return o.Kind == health.CallPending }), err
		}},
		{"usage", "nvmlDeviceGetPowerUsage", true, func(s *Session) (int, error) {
			usage, err := s.Usage()
			return count(usage, func(u gpu.Usage) bool { return u == gpu.Usage{Device: u.Device} }), err
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
			expectSnapshot(t, s, "healed", 8)
		})
	}
}

func hungInSnapshot(s *Session) (int, error) {
	snap, err := s.Snapshot()
	pending := count(snap.Excluded, func(e gpu.Exclusion) bool { return e.Failure == gpu.FailurePending })
	return pending + len(snap.Devices)*100, err
}

func count[T any](all []T, is func(T) bool) (n int) {
	for _, v := range all {
		if is(v) {
			n++
		}
	}
	return n
}

// A driver may serve one GPU after the other: the deadline starts again with every GPU that answers.
func TestDriverServesOneGPUAtATime(t *testing.T) {
	const deadline = time.Second // the last one answers after 1.28 s
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: deadline})
	for slot := range 8 {
		must(t, m.Slow(simdriver.GPU(slot), "nvmlDeviceGetHandleByIndex", time.Duration(slot+1)*deadline*4/25))
	}
	expectSnapshot(t, s, "one after the other", 8)
}

// excludedCalls are the calls that can't be made to hang here, or that these machines don't need.
var excludedCalls = map[string]string{
	"nvmlErrorString": "makes no driver call",
	libraryVersion:    "made if versions differ: TestVersionMismatch",
	handleByPCI:       "made if a GPU was lost",
}

// Every call can hang, and is reported then. Afterwards the session can be closed.
func TestEachCallHangs(t *testing.T) {
	text, err := simdriver.Text("a100-mig")
	must(t, err)
	gb200, err := simdriver.Text("gb200")
	must(t, err)
	with615, err := simdriver.With615("gb200")
	must(t, err)
	direct := strings.Replace(text, "\nswitches = ", "\n# ", 1)
	direct = strings.Replace(direct, "\n[defaults]\n", "\n[defaults]\nunsupported = nvmlDeviceGetPowerManagementLimit\n", 1)
	made := map[string]bool{}
	for _, text := range []string{text, gb200, direct, with615, withLimits(t, "t4", simdriver.Misc, t.TempDir())} {
		m := simdriver.StartText(t, text)
		must(t, useOnce(m, make(chan *Session, 1)))
		all := calls(t, m)
		for _, call := range allCalls() {
			_, excused := excludedCalls[call]
			if made[call] || excused || !slices.ContainsFunc(functionsOf(call), func(f string) bool { return all[f] > 0 }) {
				continue
			}
			made[call] = true
			t.Run(call, func(t *testing.T) { testHang(t, m, call) })
		}
	}
	for _, call := range allCalls() {
		if _, excused := excludedCalls[call]; !made[call] && !excused {
			t.Errorf("%s was not made", call)
		}
	}
}

// useOnce makes every call about a machine. It sends the session when it is open, so that the test can close it again.
func useOnce(m *simdriver.Machine, opened chan<- *Session) error {
	s, err := Open(Options{Roots: roots(m), Deadline: testDeadline, Processes: true})
	if err != nil {
		return err
	}
	opened <- s
	snap, err := s.Snapshot()
	eventErr := m.Operational(0, "level=40", "xid=31")
	_, probeErr := s.Probe()
	if s.LimitsUnsupported() == "" && len(snap.Devices) > 0 {
		q := gpu.LimitQuery{GPU: snap.Devices[0].ID, Group: "/none"}
		if _, err := s.ReadGPU(q.GPU); err != nil {
			if _, hung := errors.AsType[*hungError](err); !hung {
				probeErr = errors.Join(probeErr, err)
			}
		}
		_, limitsErr := s.MemoryLimits([]gpu.LimitQuery{q})
		setErr := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: q})
		expected := []error{gpu.ErrLimitNoGroup, gpu.ErrLimitUnknown, gpu.ErrLimitsUnsupported} // the last one: a driver from 615 on, and a kernel without a controller for it
		if !slices.ContainsFunc(expected, func(e error) bool { return errors.Is(setErr, e) }) {
			probeErr = errors.Join(probeErr, limitsErr, fmt.Errorf("Set: %w", setErr))
		}
	}
	_, usageErr := s.Usage()
	_, first := s.Wait(0)
	_, second := s.Wait(0)
	if closeErr := s.Close(); !errors.Is(closeErr, errAbandoned) {
		err = errors.Join(err, closeErr)
	}
	return errors.Join(err, eventErr, probeErr, usageErr, first, second)
}

func testHang(t *testing.T, m *simdriver.Machine, call string) {
	before := calls(t, m)["nvmlInit_v2"]
	must(t, m.Hang(simdriver.All, call))
	opened, over := make(chan *Session, 1), make(chan error, 1)
	go func() { over <- useOnce(m, opened) }()
	var s *Session
	if call == "nvmlInit" {
		eventually(t, func() (uint64, bool) { n := calls(t, m)["nvmlInit_v2"]; return n, n > before })
		select {
		case <-opened:
			t.Error("there is a session though nvmlInit hangs")
		case <-time.After(testDeadline):
		}
	} else {
		s = <-opened
		eventually(t, func() ([]gpu.Call, bool) {
			busy := s.Busy()
			if c, hung := s.hungWait(); hung {
				busy = append(busy, c)
			}
			return busy, slices.ContainsFunc(busy, func(c gpu.Call) bool { return c.Name == call })
		})
	}
	must(t, m.Heal())
	select {
	case err := <-over:
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Fatal("not returned")
	}
	if s == nil {
		s = <-opened
	}
	waitUntilIdle(t, s)
	must(t, s.Close())
	if nodes := openNodes(t, m); len(nodes) > 0 {
		t.Errorf("%q are open", nodes)
	}
}
