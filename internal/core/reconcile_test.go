package core_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// without returns a snapshot without the given devices.
func without(s gpu.Snapshot, ids ...gpu.DeviceID) gpu.Snapshot {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool { return slices.Contains(ids, d.ID) })
	return gpu.NewSnapshot(s)
}

func deviceIDs(s gpu.Snapshot) []gpu.DeviceID {
	var out []gpu.DeviceID
	for _, d := range s.Devices {
		out = append(out, d.ID)
	}
	return out
}

func kindsAt(obs []health.Observation, at gpu.Placement) []health.ObservationKind {
	var out []health.ObservationKind
	for _, o := range obs {
		if o.At == at {
			out = append(out, o.Kind)
		}
	}
	return out
}

func TestReconcileKeepsUnresponsiveDevices(t *testing.T) {
	prev := coretest.GPUs(3)
	gone, slot := gpu.WholeGPU(coretest.GPU(1)), prev.Devices[1].PCI
	const unanswered = "the driver does not answer"
	for name, tc := range map[string]struct {
		excluded []gpu.Exclusion
		kind     health.ObservationKind // of the GPU that is missing; 0 = it is removed
		left     int                    // exclusions
	}{
		"not listed": {nil, health.Lost, 0},
		"excluded with its UUID": {
			[]gpu.Exclusion{{Index: 1, At: gone, Failure: gpu.FailureError, Reason: "Unknown Error"}}, health.ProbeFailed, 0,
		},
		"excluded, only its slot is known": {[]gpu.Exclusion{{Index: 1, PCI: slot, Failure: gpu.FailureLost}}, health.Lost, 0},
		// Indices change when a GPU is removed, so an unidentified GPU may be any of the missing ones.
		"GPU without UUID": {[]gpu.Exclusion{{Index: 2, Failure: gpu.FailurePending, Reason: unanswered}}, health.CallPending, 1},
		"another GPU that does not answer is in its slot": {[]gpu.Exclusion{
			{Index: 1, At: gpu.WholeGPU("GPU-new"), PCI: slot, Failure: gpu.FailurePending, Reason: unanswered},
			{Index: 2, Failure: gpu.FailurePending, Reason: unanswered},
		}, 0, 2},
	} {
		reading := without(prev, coretest.GPU(1))
		wantDevices, wantKinds := reading.Devices, []health.ObservationKind(nil)
		if tc.kind != 0 {
			wantDevices, wantKinds = prev.Devices, []health.ObservationKind{tc.kind}
		}
		reading.Excluded = tc.excluded
		got, obs := core.Reconcile(prev, reading)
		if diff := cmp.Diff(wantDevices, got.Devices); diff != "" {
			t.Errorf("%s: devices: %s", name, diff)
		}
		if kinds := kindsAt(obs, gone); !slices.Equal(kinds, wantKinds) || len(got.Excluded) != tc.left {
			t.Errorf("%s: observations %v, excluded %v", name, kinds, got.Excluded)
		}
	}
	got, obs := core.Reconcile(prev, gpu.NoDriver(gpu.DriverFailed, "gone"))
	want := []health.Observation{{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverFailed), Detail: "gone"}}
	if diff := cmp.Diff(want, obs); diff != "" || len(got.Devices) != 3 || len(got.Links) != len(prev.Links) || len(got.Nodes) != len(prev.Nodes) {
		t.Errorf("no driver: want everything kept: %+v, %s", got, diff)
	}
}

func TestReconcileDropsRemovedDevices(t *testing.T) {
	mig := migMachine()
	t.Run("MIG instance removed, its GPU answers", func(t *testing.T) {
		got, obs := core.Reconcile(mig, without(mig, "MIG-1"))
		if slices.Contains(deviceIDs(got), "MIG-1") {
			t.Errorf("kept: %v", deviceIDs(got))
		}
		if slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind == health.Lost }) {
			t.Errorf("lost: %v", obs)
		}
	})
	t.Run("another GPU in the slot", func(t *testing.T) {
		prev := coretest.GPUs(2)
		reading := coretest.GPUs(2)
		reading.Devices[1].ID, reading.Devices[1].At = "GPU-new", gpu.WholeGPU("GPU-new")
		got, _ := core.Reconcile(prev, reading)
		if want := []gpu.DeviceID{coretest.GPU(0), "GPU-new"}; !slices.Equal(deviceIDs(got), want) {
			t.Errorf("got %v, want %v", deviceIDs(got), want)
		}
	})
	t.Run("the GPU with all its instances is lost, not removed", func(t *testing.T) {
		got, obs := core.Reconcile(mig, without(mig, "GPU-m", "MIG-1", "MIG-2"))
		if len(got.Devices) != len(mig.Devices) {
			t.Errorf("kept only %v", deviceIDs(got))
		}
		if kinds := kindsAt(obs, gpu.WholeGPU("GPU-m")); !slices.Contains(kinds, health.Lost) {
			t.Errorf("observations: %v", kinds)
		}
	})
	t.Run("one instance can't be read", func(t *testing.T) {
		reading := without(mig, "MIG-1")
		reading.Excluded = []gpu.Exclusion{{At: gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}, Failure: gpu.FailureError}}
		got, obs := core.Reconcile(mig, reading)
		if !slices.Contains(deviceIDs(got), "MIG-1") {
			t.Errorf("forgotten: %v", deviceIDs(got))
		}
		l := health.Ledger{}
		for range 3 {
			l = l.Apply(health.DefaultPolicy(), time.Unix(0, 0), obs...)
		}
		for _, d := range got.Devices {
			if want := d.ID != "MIG-1"; l.Health(d.At).Schedulable() != want {
				t.Errorf("%s is %v", d.ID, l.Health(d.At))
			}
		}
	})
}

// migMachine is a GPU in MIG mode with two instances, and a full GPU.
func migMachine() gpu.Snapshot {
	s := coretest.GPUs(1)
	parent := s.Devices[0]
	parent.Index, parent.ID, parent.At, parent.PCI, parent.MIG, parent.Minor = 1, "GPU-m", gpu.WholeGPU("GPU-m"), "0000:20:00.0", true, 1
	one, two := parent, parent
	one.ID, one.At, one.Profile, one.MIG = "MIG-1", gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}, "1g.10gb", false
	one.GICap, one.CICap = 12, 13
	two.ID, two.At, two.Profile, two.MIG = "MIG-2", gpu.Placement{GPU: "GPU-m", GI: 2, CI: 0}, "3g.40gb", false
	two.GICap, two.CICap = 21, 22
	s.Devices = append(s.Devices, parent, one, two)
	s.Nodes = append(s.Nodes, "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")
	return gpu.NewSnapshot(s)
}

func TestLocate(t *testing.T) {
	s := migMachine()
	for _, tc := range []struct {
		name     string
		at, want gpu.Placement
	}{
		{"known instance", gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}, gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}},
		{"known GI", gpu.Placement{GPU: "GPU-m", GI: 2, CI: gpu.Whole}, gpu.Placement{GPU: "GPU-m", GI: 2, CI: gpu.Whole}},
		{"unknown GI", gpu.Placement{GPU: "GPU-m", GI: 9, CI: 0}, gpu.WholeGPU("GPU-m")},
		{"whole GPU", gpu.WholeGPU("GPU-m"), gpu.WholeGPU("GPU-m")},
		{"node", gpu.Node, gpu.Node},
	} {
		got, ok := core.Locate(s, health.Observation{At: tc.at})
		if !ok || got.At != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got.At, tc.want)
		}
	}
}

func TestPlacementCovers(t *testing.T) {
	whole := gpu.WholeGPU("GPU-a")
	gi := gpu.Placement{GPU: "GPU-a", GI: 3, CI: gpu.Whole}
	ci := gpu.Placement{GPU: "GPU-a", GI: 3, CI: 1}
	other := gpu.Placement{GPU: "GPU-b", GI: 3, CI: 1}
	for _, tc := range []struct {
		name string
		p, q gpu.Placement
		want bool
	}{
		{"node covers GPU", gpu.Node, whole, true},
		{"node covers CI", gpu.Node, ci, true},
		{"GPU covers itself", whole, whole, true},
		{"GPU covers its GI", whole, gi, true},
		{"GPU covers its CI", whole, ci, true},
		{"GI covers its CI", gi, ci, true},
		{"GI does not cover its GPU", gi, whole, false},
		{"CI does not cover its GI", ci, gi, false},
		{"GPU does not cover another GPU's CI", whole, other, false},
		{"CI does not cover the same numbers elsewhere", ci, other, false},
		{"GPU does not cover the node", whole, gpu.Node, false},
	} {
		if got := tc.p.Covers(tc.q); got != tc.want {
			t.Errorf("%s: %v.Covers(%v) = %v", tc.name, tc.p, tc.q, got)
		}
	}
}

func TestParsePCIAddress(t *testing.T) {
	for in, want := range map[string]gpu.PCIAddress{
		"00000000:3B:00.0\x00\x00": "0000:3b:00.0", // NVML's busId, with trailing NULs
		"0000:3b:00.0":             "0000:3b:00.0",
		"3b:00.0":                  "0000:3b:00.0",
		"00010000:E1:1F.7":         "10000:e1:1f.7", // VMD: sysfs prints five digits
		"0009:01:00.0":             "0009:01:00.0",  // Grace systems have several domains
	} {
		if got, err := gpu.ParsePCIAddress(in); err != nil || got != want {
			t.Errorf("ParsePCIAddress(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "\x00", "3b", "3b:00", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "0000:100:00.0", "x:3b:00.0", "0:0:0:0.0", "-1:3b:00.0", "100000000:3b:00.0"} {
		if got, err := gpu.ParsePCIAddress(in); err == nil {
			t.Errorf("ParsePCIAddress(%q) = %q; want an error", in, got)
		}
	}
}

// Parsing the canonical form of an address returns it unchanged.
func FuzzParsePCIAddress(f *testing.F) {
	for _, s := range []string{"00000000:3B:00.0\x00", "3b:00.0", "10000:e1:00.0", ":::.", "0000:3b:00."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := gpu.ParsePCIAddress(s)
		if err != nil {
			return
		}
		if b, err := gpu.ParsePCIAddress(string(a)); err != nil || a != b {
			t.Errorf("ParsePCIAddress(%q) = %q, and that parses as %q, %v", s, a, b, err)
		}
	})
}

func TestPCIBandwidth(t *testing.T) {
	for _, tc := range []struct{ gen, width, want int }{
		{3, 16, 16384}, {4, 16, 32768}, {5, 16, 65536}, {6, 16, 131072}, {1, 1, 256}, {2, 8, 4096},
		{0, 16, 0}, {3, 0, 0}, {7, 16, 0},
	} {
		d := gpu.Device{PCIeGen: tc.gen, PCIeWidth: tc.width}
		if got := d.PCIBandwidth(); got != tc.want {
			t.Errorf("generation %d x%d = %d MB/s; want %d", tc.gen, tc.width, got, tc.want)
		}
	}
}

// The first reading after a restart, with the same driver since the same boot, changes nothing that it has no answer about.
// After a reboot, or with another driver, it counts as it is.
func TestUnansweredValuesStay(t *testing.T) {
	before := coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb")
	unanswered := func(d gpu.Device) gpu.Device {
		return gpu.Device{ID: d.ID, At: d.At, Index: d.Index, PCI: d.PCI, NUMANode: -1, Minor: -1}
	}
	reading := before
	reading.Devices = []gpu.Device{unanswered(before.Devices[0]), unanswered(before.Devices[1])}
	otherDriver := reading
	otherDriver.Driver.Version = "999.1"
	reload := gpu.NoDriver(gpu.DriverAbsent, "unloaded")
	reload.Unloaded = true
	for name, c := range map[string]struct {
		boot  string
		reads []gpu.Snapshot
		stays bool
	}{
		"the same driver":           {"boot 1", []gpu.Snapshot{reading}, true},
		"after a while without it":  {"boot 1", []gpu.Snapshot{gpu.NoDriver(gpu.DriverFailed, "busy"), reading}, true},
		"for ever":                  {"boot 1", []gpu.Snapshot{reading, reading, reading}, true},
		"another version":           {"boot 1", []gpu.Snapshot{otherDriver}, false},
		"the driver was loaded":     {"boot 1", []gpu.Snapshot{reload, reading}, false},
		"the driver may be another": {"boot 1", []gpu.Snapshot{gpu.NoDriver(gpu.DriverAbsent, "no library"), reading}, false},
		"a reboot":                  {"boot 2", []gpu.Snapshot{reading}, false},
	} {
		cfg, now := core.DefaultConfig(), testStart
		cfg.MIG = inventory.MIGMixed
		s := core.NewState(cfg).Read(cfg, now, before)
		for _, d := range before.Devices[:2] {
			s = s.Observe(cfg, now, health.Observation{At: d.At, Kind: health.Checked, Sample: healthySample()})
		}
		s = core.Restore(cfg, s.Checkpoint("boot 1"), c.boot)
		for _, r := range c.reads {
			now = now.Add(10 * time.Second)
			s = s.Read(cfg, now, r)
		}
		want := before.Devices
		if !c.stays {
			want = c.reads[len(c.reads)-1].Devices
		}
		if diff := cmp.Diff(want, s.Snapshot.Devices); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		for u := range s.Allocatable.Units() {
			if c.stays && (u.Device.MIG || !u.Health.Schedulable()) {
				t.Errorf("%s: unit %s: %s", name, u.ID, u.Health)
			}
		}
	}
	answered := reading
	answered.Devices = coretest.GPUs(2).Devices
	if got, _ := core.Reconcile(before, answered); len(got.Devices) != 2 || got.Devices[1].MIG {
		t.Errorf("MIG mode is answered as disabled: %+v", got.Devices)
	}
}

// Instances that can't be counted, or read, stay with the same driver. Those of an earlier one, or of an earlier boot, do
// not exist: they are not listed if their GPU answers.
func TestInstancesThatCannotBeRead(t *testing.T) {
	before := coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb")
	for version, want := range map[string]int{before.Driver.Version: 4, "": 2, "earlier": 2} {
		reading := coretest.WithMIG(coretest.GPUs(2), 1)
		parent := reading.Devices[1]
		prev := before
		prev.Driver.Version = version
		for _, failure := range []gpu.Failure{gpu.NotFailed, gpu.FailureError} {
			reading.Excluded = []gpu.Exclusion{{Index: 1, At: parent.At, PCI: parent.PCI, Failure: failure, Reason: "not supported"}}
			if got, obs := core.Reconcile(prev, reading); len(got.Devices) != want {
				t.Errorf("driver %q, %v: %d devices, want %d: %+v", version, failure, len(got.Devices), want, obs)
			}
		}
	}
}
