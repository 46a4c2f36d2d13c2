package nvidia

import (
	"errors"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The UUID and PCI address of GPU 3 of the machine h100x8.
const (
	h100ID  = gpu.DeviceID("GPU-94b996fc-c2a1-5f89-9d90-44189fb7fcc9")
	h100PCI = gpu.PCIAddress("0000:61:00.0")
)

func h100Excluded(failure gpu.Failure, reason string) gpu.Exclusion {
	return gpu.Exclusion{Index: 3, At: gpu.WholeGPU(h100ID), PCI: h100PCI, Failure: failure, Reason: reason}
}

// h100Pending is the exclusion of GPU 3 while a call about it does not return.
func h100Pending(call string) gpu.Exclusion {
	return h100Excluded(gpu.FailurePending, "the driver does not answer ("+call+")")
}

func TestGPUThatFailsEveryCall(t *testing.T) {
	m, s := start(t, "h100x8", open)
	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	unknown := gpu.Exclusion{
		Index: 3, At: gpu.Node, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error",
	}
	expectSnapshot(t, s, "at first", 7, unknown)
	must(t, m.Heal())
	expectSnapshot(t, s, "healed", 8)
	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	expectSnapshot(t, s, "once known", 7, h100Excluded(gpu.FailureError, "nvmlDeviceGetUUID: Unknown Error"))
	obs := probe(t, s)
	for _, o := range obs {
		want := health.Observation{At: o.At, Kind: health.Checked, Sample: healthyH100}
		if o.At == gpu.WholeGPU(h100ID) {
			want = health.Observation{At: o.At, Kind: health.ProbeFailed, Detail: "nvmlDeviceGetUUID: Unknown Error"}
		}
		if o != want {
			t.Errorf("probe: %+v, want %+v", o, want)
		}
	}
	if len(obs) != 8 {
		t.Errorf("probe: %d observations", len(obs))
	}
}

func TestGPULostAndRestored(t *testing.T) {
	m, s := start(t, "h100x8", open)
	before := snapshot(t, s)
	must(t, m.Lose(3))

	lost := health.Observation{At: gpu.WholeGPU(h100ID), Kind: health.Lost, Detail: "nvmlDeviceGetUUID: GPU is lost"}
	if obs := probe(t, s); obs[h100ID] != lost || len(obs) != 8 {
		t.Errorf("probe before the reading: %+v", obs)
	}
	expectSnapshot(t, s, "lost", 7, h100Excluded(gpu.FailureLost, "nvmlDeviceGetUUID: GPU is lost"))
	if o := probe(t, s)[h100ID]; o != lost {
		t.Errorf("probe after the reading: %+v", o)
	}
	usage, err := s.Usage()
	if err != nil || len(usage) != 8 || !slices.Contains(usage, gpu.Usage{Device: h100ID}) {
		t.Errorf("usage: %+v, %v", usage, err)
	}

	must(t, m.Restore(3))
	healthy := health.Observation{At: lost.At, Kind: health.Checked, Sample: healthyH100}
	healthy.Sample.Events = health.NotReported // until it is read
	if o := probe(t, s)[h100ID]; o != healthy {
		t.Errorf("probe after the return: %+v", o)
	}
	if after := snapshot(t, s); !after.Equal(before) {
		t.Error(gocmp.Diff(before, after))
	}
}

func TestGPULostBeforeStart(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Lose(3))
	s := open(t, m)
	expectSnapshot(t, s, "lost", 7, gpu.Exclusion{Index: 3, At: gpu.Node, Failure: gpu.FailureLost, Reason: "nvmlDeviceGetHandleByIndex: GPU is lost"})
	if obs := probe(t, s); len(obs) != 7 {
		t.Errorf("probe: %+v", obs)
	}
}

// optionalCalls are the calls about a GPU without which a device can be offered.
func optionalCalls() []string {
	return slices.DeleteFunc(allCalls(), func(call string) bool {
		return !strings.HasPrefix(call, "nvmlDevice") || slices.Contains(mandatory, call)
	})
}

func TestNothingSupported(t *testing.T) {
	m := simdriver.Start(t, "h200")
	for _, code := range []string{"NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"} {
		s := open(t, m)
		for _, call := range optionalCalls() {
			must(t, m.Fail(simdriver.GPU(0), call, code, simdriver.Always))
		}
		id := gpu.DeviceID(m.UUID(0))
		snap := snapshot(t, s)
		want := gpu.Device{ID: id, At: gpu.WholeGPU(id), PCI: "0000:04:00.0", PCIeRoot: "pci0000:00", NUMANode: 0, Minor: -1} // sysfs has the rest
		if diff := gocmp.Diff([]gpu.Device{want}, snap.Devices); diff != "" || len(snap.Excluded) > 0 {
			t.Errorf("%s: excluded %+v\n%s", code, snap.Excluded, diff)
		}
		checked := health.Observation{At: want.At, Kind: health.Checked, Sample: health.Sample{Events: health.No}}
		if obs, err := s.Probe(); err != nil || !slices.Equal(obs, []health.Observation{checked}) {
			t.Errorf("%s: probe: %+v, %v", code, obs, err)
		}
		if usage, err := s.Usage(); err != nil || len(usage) != 1 || usage[0] != (gpu.Usage{Device: id, At: usage[0].At}) {
			t.Errorf("%s: usage: %+v, %v", code, usage, err)
		}
		expectEvents(t, s, code, 0)
		must(t, m.Heal(), s.Close())
	}
}

// Any call can fail at any time: an optional value stays the same (or is missing if it was never read), and a call about one
// GPU never affects another.
func TestEachCallFails(t *testing.T) {
	identity := []string{"nvmlDeviceGetName", "nvmlDeviceGetMigMode"}
	m, s := start(t, "a100-mig", open)
	before := snapshot(t, s)
	const index = 5 // four instances
	others := slices.DeleteFunc(slices.Clone(before.Devices), func(d gpu.Device) bool { return d.Index == index })
	for _, code := range []string{"UNKNOWN", "RESET_REQUIRED", "GPU_IS_LOST"} {
		for _, call := range optionalCalls() {
			must(t, m.Fail(simdriver.GPU(index), call, code, simdriver.Always))
			if slices.Contains(staticCalls, call) {
				must(t, m.Invalidate(index)) // so that the call is made
			}
			snap := snapshot(t, s)
			rest := slices.DeleteFunc(slices.Clone(snap.Devices), func(d gpu.Device) bool { return d.Index == index })
			if diff := gocmp.Diff(others, rest); diff != "" {
				t.Errorf("%s, %s: other GPUs: %s", call, code, diff)
			}
			for _, e := range snap.Excluded {
				if e.Index != index || e.At.GPU != gpu.DeviceID(m.UUID(index)) || !strings.HasPrefix(e.Reason, call+": ") ||
					(e.Failure == gpu.FailureLost) != (code == "GPU_IS_LOST") {
					t.Errorf("%s, %s: %+v", call, code, e)
				}
			}
			if slices.Contains(identity, call) && len(snap.Excluded) == 0 {
				t.Errorf("%s, %s: not excluded", call, code)
			}
			for _, d := range snap.Devices {
				if !slices.Contains(before.Devices, d) {
					t.Errorf("%s, %s: %+v has changed", call, code, d)
				}
			}
			if _, err := s.Probe(); err != nil {
				t.Errorf("%s, %s: probe: %v", call, code, err)
			}
			// Of the devices that were read, and of a GPU that was read before.
			if usage, err := s.Usage(); err != nil || len(usage) < len(snap.Devices) {
				t.Errorf("%s, %s: usage of %d, %v", call, code, len(usage), err)
			}
			must(t, m.Heal())
			if after := snapshot(t, s); !after.Equal(before) {
				t.Fatalf("%s, %s: healed: %s", call, code, gocmp.Diff(before, after))
			}
		}
	}
}

func TestDriverUnloaded(t *testing.T) {
	m, s := start(t, "t4", open)
	snapshot(t, s)
	must(t, m.Unload())
	_, snapErr := s.Snapshot()
	_, probeErr := s.Probe()
	_, usageErr := s.Usage()
	for _, err := range []error{snapErr, probeErr, usageErr} {
		if !errors.Is(err, gpu.ErrDriverLost) || strings.Contains(err.Error(), "\n") {
			t.Errorf("unloaded: %v", err)
		}
	}
}

func TestDriverWideCodes(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	for _, code := range []string{"UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"} { // the library on disk is the loaded one
		for _, call := range []string{
			"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo",
			"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState",
		} {
			s := open(t, m)
			must(t, m.Fail(simdriver.All, call, code, simdriver.Always))
			if _, err := s.Snapshot(); !errors.Is(err, gpu.ErrDriverLost) || errors.Is(err, gpu.ErrDriverStale) {
				t.Errorf("%s, %s: %v", call, code, err)
			}
			must(t, m.Heal(), s.Close())
		}
	}
	m, s := start(t, "t4", open)
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetCount", "UNKNOWN", simdriver.Always))
	if _, err := s.Snapshot(); !errors.Is(err, gpu.ErrDriverLost) {
		t.Errorf("count: %v", err)
	}
	if _, err := s.Probe(); !errors.Is(err, gpu.ErrDriverLost) {
		t.Errorf("probe without a reading: %v", err)
	}
}
