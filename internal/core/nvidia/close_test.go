package nvidia

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// heldNodes are the machine's device nodes that this process has open.
func heldNodes(t testing.TB, m *simdriver.Machine) []string {
	t.Helper()
	nodes, err := m.HeldBy(os.Getpid())
	must(t, err)
	return nodes
}

// descriptors counts all that this process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(open)
}

// A closed session keeps no device node, and nothing else, whatever was done with it: else nobody could
// unload the kernel module.
func TestCloseLeavesNothingOpen(t *testing.T) {
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
				if n := len(heldNodes(t, m)); n < 1 || len(snap.Devices) > 0 && n < 2 {
					t.Fatalf("%d nodes are open in a session", n)
				}
				must(t, s.Close())
			}
			round()
			before := descriptors(t)
			for range 50 {
				round()
			}
			if nodes, after := heldNodes(t, m), descriptors(t); len(nodes) > 0 || after > before {
				t.Errorf("open after 50 sessions: %d descriptors, before %d; nodes %q", after, before, nodes)
			}
			must(t, m.TryUnload(), m.Load())
			round()
		})
	}
}

// So it is when a session comes to nothing: at init, at the first call after it, at the first reading, or
// because the driver goes.
func TestFailureLeavesNothingOpen(t *testing.T) {
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
					must(t, m.Unload()) // and goes altogether, from under the session
				}
				must(t, s.Close())
			}
			if nodes, after := heldNodes(t, m), descriptors(t); len(nodes) > 0 || after > before {
				t.Errorf("open: %d descriptors, before %d; nodes %q", after, before, nodes)
			}
			must(t, m.Heal(), m.SetModule("535.230.02"), m.Load())
		})
	}
	if snap := snapshot(t, open(t, m)); len(snap.Devices) != 20 {
		t.Errorf("healed: %d devices", len(snap.Devices))
	}
}

// A shutdown that fails is made up for: by another Close, or by the next session.
func TestShutdownFails(t *testing.T) {
	m := simdriver.Start(t, "t4")
	closeFails := func() *Session {
		s, err := Open(Options{Roots: roots(m)})
		must(t, err)
		snapshot(t, s)
		must(t, m.Fail(simdriver.All, "nvmlShutdown", "UNKNOWN", simdriver.Always))
		if err := s.Close(); returned(err) != nvml.ERROR_UNKNOWN {
			t.Errorf("close: %v", err)
		}
		if len(heldNodes(t, m)) != 2 {
			t.Error("nothing is held: what failed?")
		}
		must(t, m.Heal())
		return s
	}
	s := closeFails()
	must(t, s.Close())
	if nodes := heldNodes(t, m); len(nodes) > 0 {
		t.Errorf("closed again: %q", nodes)
	}
	closeFails()
	next := open(t, m)
	snapshot(t, next)
	must(t, next.Close())
	if nodes := heldNodes(t, m); len(nodes) > 0 {
		t.Errorf("after the next session: %q", nodes)
	}
	if n := calls(t, m); n["nvmlShutdown"] != 5 || n["nvmlInit_v2"] != 3 {
		t.Errorf("%d shutdowns, two of which failed, of %d sessions", n["nvmlShutdown"], n["nvmlInit_v2"])
	}
}

// A session that was closed around a call in the driver lets go once the call is back, if it is asked again.
func TestCloseAgain(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: brief}, ErrAbandoned)
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceRegisterEvents"))
	s.heard = nil
	snapshot(t, s) // strands an event set
	for range 2 {
		if err := s.Close(); !errors.Is(err, ErrAbandoned) || len(heldNodes(t, m)) != 9 {
			t.Fatal(err)
		}
	}
	if err := m.TryUnload(); !slices.Equal(inUse(err), []int{os.Getpid()}) {
		t.Error(err)
	}
	must(t, m.Heal())
	free(t, s)
	must(t, s.Close(), s.Close())
	if nodes := heldNodes(t, m); len(nodes) > 0 || calls(t, m)["nvmlShutdown"] != 1 {
		t.Errorf("%q are open, %d shutdowns", nodes, calls(t, m)["nvmlShutdown"])
	}
	must(t, m.TryUnload())
	if _, err := Open(Options{Roots: roots(m)}); !errors.Is(err, core.ErrNoDriver) {
		t.Error(err)
	}
}

// A session that closes well says so only if no earlier one of the process holds the driver, be it in a call
// about a GPU or about none, in the event wait or in its own end.
func TestCloseKnowsTheOthers(t *testing.T) {
	for call, enter := range map[string]func(*Session){
		"nvmlDeviceGetUUID":  func(s *Session) { _, _ = s.Probe() },
		"nvmlDeviceGetCount": func(s *Session) { _, _ = s.Snapshot() },
		"nvmlEventSetWait":   func(s *Session) { _, _ = s.Wait(0) },
		"nvmlEventSetFree":   func(*Session) {},
	} {
		t.Run(call, func(t *testing.T) {
			m := simdriver.Start(t, "t4")
			first := openWith(t, m, Options{Deadline: brief}, ErrAbandoned)
			snapshot(t, first)
			must(t, m.Hang(simdriver.All, call))
			over := make(chan struct{})
			go func() {
				defer close(over)
				enter(first)
				_ = first.Close()
			}()
			eventually(t, first.hanging)
			next := openBriefly(t, m)
			for range 2 {
				if err := next.Close(); !errors.Is(err, ErrAbandoned) || !strings.Contains(err.Error(), call) {
					t.Errorf("close: %v", err)
				}
			}
			must(t, m.Heal())
			<-over
			eventually(t, func() (string, bool) { err := next.Close(); return fmt.Sprint(err), err == nil })
			if nodes := heldNodes(t, m); len(nodes) > 0 {
				t.Errorf("%q are open", nodes)
			}
		})
	}
}

// Who takes the place of a session does not keep it from ending.
func TestCloseOfAnEarlierSession(t *testing.T) {
	m := simdriver.Start(t, "t4")
	first, next := open(t, m), openWith(t, m, Options{Deadline: brief}, ErrAbandoned)
	snapshot(t, next)
	must(t, m.Hang(simdriver.GPU(0), "nvmlDeviceGetUUID"))
	probe(t, next)
	must(t, first.Close())
	if err := next.Close(); !errors.Is(err, ErrAbandoned) {
		t.Error(err)
	}
	must(t, m.Heal())
	free(t, next)
	must(t, next.Close())
}

func inUse(err error) []int {
	if e, ok := errors.AsType[*simdriver.InUseError](err); ok {
		return e.PIDs
	}
	return nil
}
