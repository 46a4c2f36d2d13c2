package nvidia

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// openNodes are the machine's device nodes that this process has open.
func openNodes(t testing.TB, m *simdriver.Machine) []string {
	t.Helper()
	nodes, err := m.HeldBy(os.Getpid())
	must(t, err)
	return nodes
}

// descriptors is the number of open file descriptors of this process.
func descriptors(t testing.TB) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(open)
}

// A closed session has no device node and no other descriptor open, whatever was called in it. Otherwise the kernel module
// could not be unloaded.
func TestCloseReleasesDescriptors(t *testing.T) {
	for _, name := range []string{"h100x8", "a100-mig", "t4", "none"} {
		t.Run(name, func(t *testing.T) {
			m := simdriver.Start(t, name)
			round := func() {
				s := open(t, m)
				snap := snapshot(t, s)
				probe(t, s)
				_, usageErr := s.Usage()
				_, waitErr := s.Wait(0)
				must(t, usageErr, waitErr)
				if n := len(openNodes(t, m)); n < 1 || len(snap.Devices) > 0 && n < 2 {
					t.Fatalf("%d nodes are open in a session", n)
				}
				must(t, s.Close())
			}
			round()
			before := descriptors(t)
			const rounds = 5
			for range rounds {
				round()
			}
			if nodes, after := openNodes(t, m), descriptors(t); len(nodes) > 0 || after > before {
				t.Errorf("open after %d sessions: %d descriptors, before %d; nodes %q", rounds, after, before, nodes)
			}
			must(t, m.TryUnload(), m.Load())
			round()
		})
	}
}

// The same after a failure: of nvmlInit, of the first call after it, of the first Snapshot, or of the driver.
func TestFailureReleasesDescriptors(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	fails := func(call, code string) func() {
		return func() { must(t, m.Fail(simdriver.All, call, code, simdriver.Always)) }
	}
	for what, prepare := range map[string]func(){
		"no module":        func() { must(t, m.Unload()) },
		"another module":   func() { must(t, m.SetModule("600.1.2")) },
		"init":             fails("nvmlInit", "UNKNOWN"),
		"count":            fails("nvmlDeviceGetCount", "UNKNOWN"),
		"lookup":           fails("nvmlDeviceGetHandleByIndex", "DRIVER_NOT_LOADED"),
		"MIG":              fails("nvmlDeviceGetMigDeviceHandleByIndex", "UNINITIALIZED"),
		"events":           fails("nvmlEventSet*", "UNKNOWN"),
		"registration":     fails("nvmlDeviceRegisterEvents", "UNKNOWN"),
		"system events":    fails("nvmlSystemRegisterEvents", "UNKNOWN"),
		"everything fails": fails("nvmlDevice*", "GPU_IS_LOST"),
	} {
		t.Run(what, func(t *testing.T) {
			before := descriptors(t)
			prepare()
			if s, err := Open(Options{Roots: roots(m)}); err == nil {
				_, _ = s.Snapshot()
				_, _ = s.Probe()
				_, _ = s.Wait(0)
				if what == "lookup" {
					must(t, m.Unload()) // the driver is lost during the session
				}
				must(t, s.Close())
			}
			if nodes, after := openNodes(t, m), descriptors(t); len(nodes) > 0 || after > before {
				t.Errorf("open: %d descriptors, before %d; nodes %q", after, before, nodes)
			}
			must(t, m.Heal(), m.SetModule("535.230.02"), m.Load())
		})
	}
	expectSnapshot(t, open(t, m), "healed", 20)
}

// A shutdown that fails is made by another Close, or by the next session.
func TestShutdownFails(t *testing.T) {
	m := simdriver.Start(t, "t4")
	closeFails := func() *Session {
		s, err := Open(Options{Roots: roots(m)})
		must(t, err)
		snapshot(t, s)
		must(t, m.Fail(simdriver.All, "nvmlShutdown", "UNKNOWN", simdriver.Always))
		if err := s.Close(); returnCode(err) != nvml.ERROR_UNKNOWN {
			t.Errorf("close: %v", err)
		}
		if len(openNodes(t, m)) != 2 {
			t.Error("no node is open: the failure had no effect")
		}
		must(t, m.Heal())
		return s
	}
	s := closeFails()
	must(t, s.Close())
	if nodes := openNodes(t, m); len(nodes) > 0 {
		t.Errorf("closed again: %q", nodes)
	}
	closeFails()
	next := open(t, m)
	snapshot(t, next)
	must(t, next.Close())
	if nodes := openNodes(t, m); len(nodes) > 0 {
		t.Errorf("after the next session: %q", nodes)
	}
	if n := calls(t, m); n["nvmlShutdown"] != 5 || n["nvmlInit_v2"] != 3 {
		t.Errorf("%d shutdowns, two of which failed, of %d sessions", n["nvmlShutdown"], n["nvmlInit_v2"])
	}
}

// A session that was closed during a hung call is shut down by another Close, when the call has returned.
func TestCloseAgain(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: testDeadline}, errAbandoned)
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceRegisterEvents"))
	s.registeredGPUs = nil
	snapshot(t, s) // the event set can't be freed
	for range 2 {
		if err := s.Close(); !errors.Is(err, errAbandoned) || len(openNodes(t, m)) != 9 {
			t.Fatal(err)
		}
	}
	if err := m.TryUnload(); !slices.Equal(inUse(err), []int{os.Getpid()}) {
		t.Error(err)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
	must(t, s.Close(), s.Close())
	if nodes := openNodes(t, m); len(nodes) > 0 || calls(t, m)["nvmlShutdown"] != 1 {
		t.Errorf("%q are open, %d shutdowns", nodes, calls(t, m)["nvmlShutdown"])
	}
	must(t, m.TryUnload())
	if _, err := Open(Options{Roots: roots(m)}); !errors.Is(err, gpu.ErrNoDriver) {
		t.Error(err)
	}
}

// Close reports a hung call of an earlier session: about a GPU, about none, in the event wait or in Close itself.
func TestCloseReportsHungCallsOfEarlierSessions(t *testing.T) {
	for call, enter := range map[string]func(*Session){
		"nvmlDeviceGetUUID":  func(s *Session) { _, _ = s.Probe() },
		"nvmlDeviceGetCount": func(s *Session) { _, _ = s.Snapshot() },
		"nvmlEventSetWait":   func(s *Session) { _, _ = s.Wait(0) },
		"nvmlEventSetFree":   func(*Session) {},
	} {
		t.Run(call, func(t *testing.T) {
			m := simdriver.Start(t, "t4")
			first := openWith(t, m, Options{Deadline: testDeadline}, errAbandoned)
			snapshot(t, first)
			must(t, m.Hang(simdriver.All, call))
			over := make(chan struct{})
			go func() {
				defer close(over)
				enter(first)
				_ = first.Close()
			}()
			eventually(t, first.abandonedCall)
			if call == "nvmlDeviceGetUUID" {
				<-over // only a call about a GPU is abandoned; two Closes at once may each make the shutdown of the other session
			}
			next := openShortDeadline(t, m)
			for range 2 {
				if err := next.Close(); !errors.Is(err, errAbandoned) || !strings.Contains(err.Error(), call) {
					t.Errorf("close: %v", err)
				}
			}
			must(t, m.Heal())
			<-over
			eventually(t, func() (string, bool) { err := next.Close(); return fmt.Sprint(err), err == nil })
			if nodes := openNodes(t, m); len(nodes) > 0 {
				t.Errorf("%q are open", nodes)
			}
		})
	}
}

// A hung call of a later session does not prevent the Close of an earlier one.
func TestCloseOfAnEarlierSession(t *testing.T) {
	m := simdriver.Start(t, "t4")
	first, next := open(t, m), openWith(t, m, Options{Deadline: testDeadline}, errAbandoned)
	snapshot(t, next)
	must(t, m.Hang(simdriver.GPU(0), "nvmlDeviceGetUUID"))
	probe(t, next)
	must(t, first.Close())
	if err := next.Close(); !errors.Is(err, errAbandoned) {
		t.Error(err)
	}
	must(t, m.Heal())
	waitUntilIdle(t, next)
	must(t, next.Close())
}

func inUse(err error) []int {
	if e, ok := errors.AsType[*simdriver.InUseError](err); ok {
		return e.PIDs
	}
	return nil
}
