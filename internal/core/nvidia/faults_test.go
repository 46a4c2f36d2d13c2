package nvidia

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// h100 is the UUID and PCI address of GPU 3 of the machine h100x8.
const (
	h100ID  = core.DeviceID("GPU-94b996fc-c2a1-5f89-9d90-44189fb7fcc9")
	h100PCI = core.PCIAddress("0000:61:00.0")
)

func TestSnapshotTwiceIsEqual(t *testing.T) {
	for _, name := range simdriver.Names() {
		s := open(t, simdriver.Start(t, name))
		if first, second := snapshot(t, s), snapshot(t, s); !first.Equal(second) {
			t.Errorf("%s: %s", name, gocmp.Diff(first, second))
		}
		must(t, s.Close())
	}
}

func TestGPUThatFailsEveryCall(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	unknown := core.Exclusion{
		Index: 3, At: core.Node, Kind: core.ProbeFailed, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error",
	}
	snap := snapshot(t, s)
	if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, []core.Exclusion{unknown}) {
		t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}

	must(t, m.Heal())
	if snap := snapshot(t, s); len(snap.Devices) != 8 || len(snap.Excluded) > 0 {
		t.Errorf("healed: %d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	known := unknown
	known.At, known.PCI = core.WholeGPU(h100ID), h100PCI
	if snap := snapshot(t, s); !slices.Equal(snap.Excluded, []core.Exclusion{known}) {
		t.Errorf("once known: %+v", snap.Excluded)
	}
	obs, err := s.Probe()
	must(t, err)
	for _, o := range obs {
		want := core.Observation{At: o.At, Kind: core.Checked}
		if o.At == core.WholeGPU(h100ID) {
			want.Kind, want.Detail = core.ProbeFailed, "nvmlDeviceGetUUID: Unknown Error"
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
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	before := snapshot(t, s)
	must(t, m.Lose(3))

	obs, err := s.Probe()
	must(t, err)
	lost := core.Observation{At: core.WholeGPU(h100ID), Kind: core.Lost, Detail: "nvmlDeviceGetUUID: GPU is lost"}
	if !slices.Contains(obs, lost) || len(obs) != 8 {
		t.Errorf("probe before the reading: %+v", obs)
	}
	snap := snapshot(t, s)
	want := []core.Exclusion{{
		Index: 3, At: core.WholeGPU(h100ID), PCI: h100PCI, Kind: core.Lost,
		Reason: "nvmlDeviceGetHandleByIndex: GPU is lost",
	}}
	if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, want) {
		t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	if obs, err = s.Probe(); err != nil || !slices.Contains(obs, lost) {
		t.Errorf("probe after the reading: %+v, %v", obs, err)
	}
	usage, err := s.Usage()
	if err != nil || len(usage) != 8 || !slices.Contains(usage, core.Usage{Device: h100ID}) {
		t.Errorf("usage: %+v, %v", usage, err)
	}

	must(t, m.Restore(3))
	if obs, err = s.Probe(); err != nil || !slices.Contains(obs, core.Observation{At: lost.At, Kind: core.Checked}) {
		t.Errorf("probe after the return: %+v, %v", obs, err)
	}
	if after := snapshot(t, s); !after.Equal(before) {
		t.Error(gocmp.Diff(before, after))
	}
}

func TestGPULostBeforeStart(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Lose(3))
	s := open(t, m)
	snap := snapshot(t, s)
	want := []core.Exclusion{{Index: 3, At: core.Node, Kind: core.Lost, Reason: "nvmlDeviceGetHandleByIndex: GPU is lost"}}
	if len(snap.Devices) != 7 || !slices.Equal(snap.Excluded, want) {
		t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	if obs, err := s.Probe(); err != nil || len(obs) != 7 {
		t.Errorf("probe: %+v, %v", obs, err)
	}
}

// A GPU that is gone moves those behind it up; the index that a silent one had says nothing then.
func TestIndexIsNoIdentity(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	before := snapshot(t, s)
	must(t, m.Remove(3), m.Fail(simdriver.GPU(4), "nvmlDeviceGetHandleByIndex", "UNKNOWN", simdriver.Always))
	snap := snapshot(t, s)
	if len(snap.Devices) != 6 || len(snap.Excluded) != 1 {
		t.Fatalf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	// Slot 4 is silent at index 3 now, which was slot 3's: its slot can't be read, so nothing speaks
	// against slot 3 until it is heard of again.
	must(t, m.Heal(), m.Fail(simdriver.GPU(4), "nvmlDeviceGetUUID", "UNKNOWN", simdriver.Always))
	e := snapshot(t, s).Excluded[0]
	if e.At != core.Node || e.PCI != before.Devices[4].PCI {
		t.Errorf("the slot at index 3 is another GPU's: %+v", e)
	}
}

// optionalCalls are the calls about a GPU that a device can be offered without.
func optionalCalls() []string {
	var calls []string
	for call := range functions {
		if strings.HasPrefix(call, "nvmlDevice") && !slices.Contains(mandatory, call) {
			calls = append(calls, call)
		}
	}
	slices.Sort(calls)
	return calls
}

func TestNothingSupported(t *testing.T) {
	for _, code := range []string{"NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"} {
		m := simdriver.Start(t, "h200")
		s := open(t, m)
		for _, call := range optionalCalls() {
			must(t, m.Fail(simdriver.GPU(0), call, code, simdriver.Always))
		}
		id := core.DeviceID(m.UUID(0))
		snap := snapshot(t, s)
		want := core.Device{ID: id, At: core.WholeGPU(id), PCI: "0000:04:00.0", NUMANode: 0, Minor: -1}
		if diff := gocmp.Diff([]core.Device{want}, snap.Devices); diff != "" || len(snap.Excluded) > 0 {
			t.Errorf("%s: excluded %+v\n%s", code, snap.Excluded, diff)
		}
		if obs, err := s.Probe(); err != nil || !slices.Equal(obs, []core.Observation{{At: want.At, Kind: core.Checked}}) {
			t.Errorf("%s: probe: %+v, %v", code, obs, err)
		}
		if usage, err := s.Usage(); err != nil || !slices.Equal(usage, []core.Usage{{Device: id}}) {
			t.Errorf("%s: usage: %+v, %v", code, usage, err)
		}
		if obs, err := s.Wait(0); len(obs) > 0 || err != nil {
			t.Errorf("%s: wait: %+v, %v", code, obs, err)
		}
		must(t, s.Close())
	}
}

// Any call may fail at any time: on an optional value the device stays what it was (or lacks the value
// if it was never read), and no call about one GPU ever concerns another.
func TestEachCallFails(t *testing.T) {
	identity := []string{"nvmlDeviceGetName", "nvmlDeviceGetMigMode"}
	m := simdriver.Start(t, "a100-mig")
	s := open(t, m)
	before := snapshot(t, s)
	const gpu = 5 // four instances
	others := slices.DeleteFunc(slices.Clone(before.Devices), func(d core.Device) bool { return d.Index == gpu })
	for _, code := range []string{"UNKNOWN", "TIMEOUT", "RESET_REQUIRED", "GPU_IS_LOST"} {
		for _, call := range optionalCalls() {
			must(t, m.Fail(simdriver.GPU(gpu), call, code, simdriver.Always))
			snap := snapshot(t, s)
			rest := slices.DeleteFunc(slices.Clone(snap.Devices), func(d core.Device) bool { return d.Index == gpu })
			if diff := gocmp.Diff(others, rest); diff != "" {
				t.Errorf("%s, %s: other GPUs: %s", call, code, diff)
			}
			for _, e := range snap.Excluded {
				if e.Index != gpu || e.At.GPU != core.DeviceID(m.UUID(gpu)) || !strings.HasPrefix(e.Reason, call+": ") ||
					(e.Kind == core.Lost) != (code == "GPU_IS_LOST") {
					t.Errorf("%s, %s: %+v", call, code, e)
				}
			}
			if slices.Contains(identity, call) && len(snap.Excluded) == 0 {
				t.Errorf("%s, %s: not excluded", call, code)
			}
			for _, d := range snap.Devices {
				if !slices.Contains(before.Devices, d) {
					t.Errorf("%s, %s: %+v is no longer what it was", call, code, d)
				}
			}
			if _, err := s.Probe(); err != nil {
				t.Errorf("%s, %s: probe: %v", call, code, err)
			}
			// Of the devices that were read, and of a GPU that is only remembered.
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

func TestOneBadInstance(t *testing.T) {
	for _, call := range []string{"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"} {
		m := simdriver.Start(t, "a100-mig")
		s := open(t, m)
		must(t, m.Fail(simdriver.GPU(5), call, "UNKNOWN", 1))
		snap := snapshot(t, s)
		var profiles []string
		for _, d := range snap.Devices {
			if d.Index == 5 {
				profiles = append(profiles, cmp.Or(d.Profile, "GPU"))
			}
		}
		if want := []string{"GPU", "2g.20gb", "1g.10gb", "1g.10gb+me"}; !slices.Equal(profiles, want) {
			t.Errorf("%s: %q", call, profiles)
		}
		want := core.Exclusion{
			Index: 5, At: core.WholeGPU(core.DeviceID(m.UUID(5))), PCI: "0000:90:00.0",
			Kind: core.ProbeFailed, Reason: call + ": Unknown Error",
		}
		if !slices.Equal(snap.Excluded, []core.Exclusion{want}) {
			t.Errorf("%s: %+v", call, snap.Excluded)
		}
		must(t, s.Close())
	}
}

func TestMIGLayoutChanges(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.SetMIG(5, "7g.80gb"), m.SetMIG(0, "1g.20gb"), m.MIGOff(4))
	// The handles of the old layout are asked once more before the next reading.
	if _, err := s.Usage(); err != nil {
		t.Error(err)
	}
	var got []string
	for _, d := range snapshot(t, s).Devices {
		if d.Index != 6 && (d.MIG || d.Profile != "") {
			got = append(got, cmp.Or(d.Profile, string(d.PCI)))
		}
	}
	if want := []string{"0000:07:00.0", "1g.20gb", "0000:90:00.0", "7g.80gb", "0000:bd:00.0"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestComputeInstances(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	must(t, m.SetMIG(0, "1c.3g.40gb"))
	s := open(t, m)
	d := snapshot(t, s).Devices[1]
	if d.Profile != "1c.3g.40gb" || d.Model != "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb" {
		t.Errorf("%+v", d)
	}
}

// Without names, attributes and the profile of the GPU instance say the same.
func TestProfilesWithoutNames(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	must(t, m.SetMIG(0, "1c.3g.40gb"))
	s := open(t, m)
	named := snapshot(t, s)
	must(t, s.Close())
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetName", "NOT_SUPPORTED", simdriver.Always))
	s = open(t, m)
	for i, d := range snapshot(t, s).Devices {
		want := named.Devices[i]
		if want.Model = ""; want.Profile != "" {
			want.Model = " MIG " + want.Profile
		}
		if d != want {
			t.Error(gocmp.Diff(want, d))
		}
	}
}

// Links take many calls: they are read when the set of GPUs changes.
func TestLinksAreReadOnce(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	asked := func() uint64 {
		snapshot(t, s)
		calls, err := m.Calls()
		must(t, err)
		return calls["nvmlDeviceGetTopologyCommonAncestor"]
	}
	first := asked()
	if again := asked(); first != 28 || again != first {
		t.Errorf("%d calls, then %d", first, again)
	}
	must(t, m.Lose(3))
	if less := asked(); less != first+21 {
		t.Errorf("%d calls with one GPU less", less)
	}
	if snap := snapshot(t, s); len(snap.Links) != 21 {
		t.Errorf("%d links", len(snap.Links))
	}
}

func TestDriverUnloadedAndLoaded(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.Unload())
	_, snapErr := s.Snapshot()
	_, probeErr := s.Probe()
	_, usageErr := s.Usage()
	for _, err := range []error{snapErr, probeErr, usageErr} {
		if !errors.Is(err, core.ErrDriverLost) || strings.Contains(err.Error(), "\n") {
			t.Errorf("unloaded: %v", err)
		}
	}
	must(t, s.Close(), s.Close())
	_, err := Open(Options{Roots: roots(m)})
	_, again := Open(Options{Roots: roots(m)})
	if !errors.Is(err, core.ErrNoDriver) || err.Error() != again.Error() {
		t.Errorf("open: %v, then %v", err, again)
	}
	must(t, m.Load())
	if snap := snapshot(t, open(t, m)); len(snap.Devices) != 1 {
		t.Errorf("loaded: %d devices", len(snap.Devices))
	}
}

func TestDriverReplaced(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.SetDriver("580.95.05"))
	if _, err := s.Snapshot(); !errors.Is(err, core.ErrDriverLost) && !errors.Is(err, core.ErrDriverStale) {
		t.Errorf("snapshot: %v", err)
	}
	must(t, s.Close())
	if _, err := Open(Options{Roots: roots(m)}); !errors.Is(err, core.ErrDriverStale) {
		t.Errorf("open: %v", err)
	}
}

func TestDriverWideCodes(t *testing.T) {
	for code, want := range map[string]error{
		"UNINITIALIZED": core.ErrDriverLost, "DRIVER_NOT_LOADED": core.ErrDriverLost,
		"LIB_RM_VERSION_MISMATCH": core.ErrDriverStale,
	} {
		for _, call := range []string{
			"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo",
			"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState",
		} {
			m := simdriver.Start(t, "a100-mig")
			s := open(t, m)
			must(t, m.Fail(simdriver.All, call, code, simdriver.Always))
			if _, err := s.Snapshot(); !errors.Is(err, want) {
				t.Errorf("%s, %s: %v", call, code, err)
			}
			must(t, s.Close())
		}
	}
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetCount", "UNKNOWN", simdriver.Always))
	if _, err := s.Snapshot(); !errors.Is(err, core.ErrDriverLost) {
		t.Errorf("count: %v", err)
	}
	if _, err := s.Probe(); !errors.Is(err, core.ErrDriverLost) {
		t.Errorf("probe without a reading: %v", err)
	}
}

func TestHangIsVisible(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	before := snapshot(t, s)
	if busy := s.Busy(); busy != nil {
		t.Errorf("idle: %+v", busy)
	}
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetMemoryInfo"))
	started := time.Now()
	read := make(chan core.Snapshot)
	go func() {
		snap, err := s.Snapshot()
		if err != nil {
			t.Error(err)
		}
		read <- snap
	}()
	stuck := eventually(t, func() (core.Call, bool) {
		for _, c := range s.Busy() {
			return c, c.Name == "nvmlDeviceGetMemoryInfo" && c.At == core.WholeGPU(h100ID)
		}
		return core.Call{}, false
	})
	if stuck.Since.Before(started) || stuck.Since.After(time.Now()) {
		t.Errorf("since %v", stuck.Since)
	}
	must(t, m.Heal())
	if after := <-read; !after.Equal(before) {
		t.Error(gocmp.Diff(before, after))
	}
	if busy := s.Busy(); busy != nil {
		t.Errorf("idle again: %+v", busy)
	}
}

// eventually asks until the answer is yes.
func eventually[T any](t testing.TB, ask func() (T, bool)) T {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for {
		v, ok := ask()
		if ok {
			return v
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not in time; last answer: %+v", v)
		}
	}
}

func TestUsage(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	for key, value := range map[string]string{
		"power_usage": "301500 mW", "utilization_gpu": "97", "utilization_memory": "41", "encoder": "3", "decoder": "4",
		"temperature": "63 C", "memory_used": "1024 MiB", "bar1_used": "7 MiB", "ecc_l1": "1", "ecc_l2": "2", "ecc_device": "3",
	} {
		must(t, m.Set(5, key, value))
	}
	s := open(t, m)
	snapshot(t, s)
	usage, err := s.Usage()
	must(t, err)
	const mib = 1 << 20
	want := core.Usage{
		Device: core.DeviceID(m.UUID(5)),
		Power:  core.GaugeOf(301500), PowerLimit: core.GaugeOf(400000), Temperature: core.GaugeOf(63),
		GPU: core.GaugeOf(97), Memory: core.GaugeOf(41), Encoder: core.GaugeOf(3), Decoder: core.GaugeOf(4),
		// What the driver reserves counts as used.
		MemoryUsed: core.GaugeOf((1024 + 615) * mib), MemoryTotal: core.GaugeOf(81920 * mib),
		BAR1Used: core.GaugeOf(7 * mib), BAR1Total: core.GaugeOf(131072 * mib),
		ECCL1: core.GaugeOf(1), ECCL2: core.GaugeOf(2), ECCMemory: core.GaugeOf(3),
	}
	got := map[core.DeviceID]core.Usage{}
	for _, u := range usage {
		got[u.Device] = u
	}
	if len(usage) != 20 || len(got) != 20 {
		t.Errorf("%d entries for %d devices, want 20", len(usage), len(got))
	}
	// NVIDIA's driver answers all of it for a GPU in MIG mode but the utilisation; so does this one or not.
	parent := got[want.Device]
	if !parent.GPU.OK {
		want.GPU, want.Memory, want.Encoder, want.Decoder = core.Gauge{}, core.Gauge{}, core.Gauge{}, core.Gauge{}
	}
	if diff := gocmp.Diff(want, parent); diff != "" {
		t.Error(diff)
	}
	instances, err := m.Instances(5)
	must(t, err)
	u := got[core.DeviceID(instances[0])]
	if u.MemoryTotal != core.GaugeOf(40192*mib) || u.GPU.OK || u.Encoder.OK {
		t.Errorf("instance: %+v", u)
	}
}
