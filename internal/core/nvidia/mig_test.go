package nvidia

import (
	"bytes"
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// instances are the MIG devices of a GPU in a snapshot.
func instances(snap gpu.Snapshot, index int) (all []gpu.Device) {
	for _, d := range snap.Devices {
		if d.Index == index && d.At.GI != gpu.Whole {
			all = append(all, d)
		}
	}
	return all
}

func profiles(devices []gpu.Device) (all []string) {
	for _, d := range devices {
		all = append(all, d.Profile)
	}
	return all
}

// A profile and its pool have NVIDIA's spelling, whether it comes from the name of the instance, from the attributes and the
// profile number of the GPU instance, or from a name without the suffix and that number.
func TestProfileSpelling(t *testing.T) {
	for machine, spelled := range map[string]map[string]string{ // pools by profile
		"a100x16-mig": {"1g.5gb": "mig-1g.5gb", "1g.5gb+me": "mig-1g.5gb.me", "1g.10gb": "mig-1g.10gb", "7g.40gb": "mig-7g.40gb"},
		"a100-mig":    {"1c.3g.40gb": "mig-1c.3g.40gb", "1g.20gb": "mig-1g.20gb"},
		"h100x8":      {"1g.20gb": "mig-1g.20gb", "1g.10gb+me": "mig-1g.10gb.me"},
		"h200":        {"1g.35gb": "mig-1g.35gb", "4g.71gb": "mig-4g.71gb"},
		"b200":        {"1g.23gb": "mig-1g.23gb", "1g.23gb+me": "mig-1g.23gb.me", "2g.45gb": "mig-2g.45gb", "7g.180gb": "mig-7g.180gb"},
		"a30":         {"1g.6gb": "mig-1g.6gb", "2g.12gb+me": "mig-2g.12gb.me", "4g.24gb": "mig-4g.24gb"},
		"rtxpro6000": {
			"1g.24gb": "mig-1g.24gb", "1g.24gb+me": "mig-1g.24gb.me", "1g.24gb+gfx": "mig-1g.24gb.gfx",
			"1g.24gb+me.all": "mig-1g.24gb.me.all", "1g.24gb-me": "mig-1g.24gb-me", "2g.48gb-me": "mig-2g.48gb-me",
			"2g.48gb+me.all": "mig-2g.48gb.me.all", "4g.96gb+gfx": "mig-4g.96gb.gfx",
		},
	} {
		text, err := simdriver.Text(machine)
		must(t, err)
		text = withoutInstances(text)
		t.Run(machine, func(t *testing.T) {
			m := simdriver.StartText(t, text)
			for profile, pool := range spelled {
				must(t, m.Heal(), m.SetMIG(0, profile))
				expectProfile(t, m, "from the name", profile, pool)
				must(t, m.Fail(simdriver.All, "nvmlDeviceGetName", "NOT_SUPPORTED", simdriver.Always))
				expectProfile(t, m, "from the attributes", profile, pool)
			}
		})
		for profile, pool := range spelled {
			name := suffix.ReplaceAllString(profile, "")
			if name == profile {
				continue
			}
			t.Run(machine+" "+profile, func(t *testing.T) {
				m := simdriver.StartText(t, shortNamed(text, profile, name))
				must(t, m.SetMIG(0, name))
				expectProfile(t, m, fromShortName, profile, pool)
			})
		}
	}
}

const fromShortName = "from a name without suffix"

// expectProfile reads the only instance of the first GPU in a new session.
func expectProfile(t *testing.T, m *simdriver.Machine, how, profile, pool string) {
	t.Helper()
	s := open(t, m)
	found := instances(snapshot(t, s), 0)
	if len(found) != 1 || found[0].Profile != profile || inventory.MIGPool(found[0].Profile) != pool || len(pool) > 63 {
		t.Errorf("%s: %q, want %s in %s", how, profiles(found), profile, pool)
	}
	_, inModel, _ := strings.Cut(found[0].Model, " MIG ")
	if suffix.ReplaceAllString(inModel, "") != suffix.ReplaceAllString(profile, "") || how != fromShortName && inModel != profile {
		t.Errorf("%s: the model is %q, want the profile %s in it", how, found[0].Model, profile)
	}
	must(t, s.Close())
}

var suffix = regexp.MustCompile(`[+-].*`)

// shortNamed is a machine whose instances of a profile have a name without suffix. The library names them by their section.
func shortNamed(text, profile, name string) string {
	text = strings.Replace(text, "[profile "+name+"]", "[profile other]", 1)
	return strings.Replace(text, "[profile "+profile+"]", "[profile "+name+"]", 1)
}

// withoutInstances is a machine without MIG instances.
func withoutInstances(text string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool {
		return strings.HasPrefix(line, "instance = ")
	}), "\n")
}

// Calls about profiles that fail at first are made again, and those that succeeded are not.
func TestProfileIsReadAgain(t *testing.T) {
	m := simdriver.Start(t, "a30")
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetName", "NOT_SUPPORTED", simdriver.Always),
		m.Fail(simdriver.GPU(1), "nvmlDeviceGetGpuInstanceProfileInfo", "UNKNOWN", 12))
	s := open(t, m)
	for _, want := range []string{"2g.12gb 1g.6gb 1g.6gb", "2g.12gb 1g.6gb+me 1g.6gb", "2g.12gb 1g.6gb+me 1g.6gb"} {
		if got := strings.Join(profiles(instances(snapshot(t, s), 1)), " "); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	n := counted(t, m, func() { snapshot(t, s) })
	for _, call := range []string{"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceById", "nvmlDeviceGetBAR1MemoryInfo"} {
		if n[call] > 0 {
			t.Errorf("%d %s of a layout that is known", n[call], call)
		}
	}
	if n["nvmlDeviceGetMemoryInfo"] != 2 || n["nvmlDeviceGetAttributes_v2"] != 3 {
		t.Errorf("%v", n)
	}
}

// An instance without a known profile can't be offered. That is no fault of the GPU, which is still not offered as a whole.
func TestNoProfile(t *testing.T) {
	m := simdriver.Start(t, "a30")
	for _, call := range []string{"nvmlDeviceGetName", "nvmlDeviceGetAttributes"} {
		must(t, m.Fail(simdriver.GPU(1), call, "NOT_SUPPORTED", simdriver.Always))
	}
	snap := snapshot(t, open(t, m))
	if len(snap.Devices) != 2 || !snap.Devices[1].MIG || len(snap.Excluded) != 3 {
		t.Fatalf("%s", render(snap))
	}
	want := gpu.Exclusion{
		Index: 1, At: gpu.Placement{GPU: gpu.DeviceID(m.UUID(1)), GI: 1, CI: 0}, PCI: "0000:65:00.0",
		Failure: gpu.FailureError, Reason: errNoProfile.Error(),
	}
	if snap.Excluded[0] != want {
		t.Errorf("%+v", snap.Excluded[0])
	}
}

// Slices, number and placement of instances, and the properties that they share with their GPU.
func TestInstanceFacts(t *testing.T) {
	m := simdriver.Start(t, "b200")
	ids, err := m.Instances(2)
	must(t, err, m.SetInstance(ids[3], "index=6"))
	s := open(t, m)
	snap := snapshot(t, s)
	parent := snap.Devices[2]
	want := map[string]gpu.Slices{
		"1g.23gb":    {GPU: 1, Compute: 1, Multiprocessors: 18, CopyEngines: 2, Decoders: 1, JPEGDecoders: 1},
		"1g.23gb+me": {GPU: 1, Compute: 1, Multiprocessors: 18, CopyEngines: 2, Decoders: 1, JPEGDecoders: 1, OFAs: 1},
		"2g.45gb":    {GPU: 2, Compute: 2, Multiprocessors: 36, CopyEngines: 4, Decoders: 2, JPEGDecoders: 2},
		"3g.90gb":    {GPU: 3, Compute: 3, Multiprocessors: 70, CopyEngines: 6, Decoders: 3, JPEGDecoders: 3},
	}
	numbers := map[string]int{"1g.23gb": 0, "1g.23gb+me": 1, "2g.45gb": 2, "3g.90gb": 6}
	found := instances(snap, 2)
	if len(found) != 4 || parent.NVLinks != 18 {
		t.Fatal(render(snap))
	}
	for _, d := range found {
		if d.Slices != want[d.Profile] || d.Instance != numbers[d.Profile] {
			t.Errorf("%s: number %d, %+v", d.Profile, d.Instance, d.Slices)
		}
		shared := instanceOf(parent)
		shared.ID, shared.At, shared.Instance = d.ID, d.At, d.Instance
		shared.Model, shared.Profile, shared.Slices, shared.Memory, shared.BAR1 = d.Model, d.Profile, d.Slices, d.Memory, d.BAR1
		shared.GICap, shared.CICap, shared.MemorySlices = d.GICap, d.CICap, d.MemorySlices
		if d != shared || d.NVLinks != 0 || d.PowerLimit != 0 || d.Architecture != "Blackwell" || d.NUMANode != 1 || d.Serial == "" {
			t.Errorf("%+v", d)
		}
	}
	// The same UUID in the same place may be another instance, with other properties.
	conf := filepath.Join(m.Root, "machine.conf")
	text, err := os.ReadFile(conf)
	must(t, err)
	text = bytes.Replace(text, []byte("instance = 3g.90gb"), []byte("instance = 4g.90gb"), 1)
	must(t, os.WriteFile(conf, text, 0o644))
	if got := instances(snapshot(t, s), 2)[0]; got.ID != found[0].ID || got.Profile != "4g.90gb" || got.Slices.Multiprocessors != 72 {
		t.Errorf("%+v", got)
	}
}

// NVML returns the GPU instance, and with it the memory slices, only to privileged users. Nothing else depends on it, and a refused call
// is not repeated.
func TestMemorySlicesAreNotPermitted(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetGpuInstanceById", "NO_PERMISSION", simdriver.Always))
	s := open(t, m)
	found := instances(snapshot(t, s), 5)
	if len(found) == 0 {
		t.Fatal("no instances")
	}
	for _, d := range found {
		if d.MemorySlices != (gpu.SliceRange{}) || d.Profile == "" || d.Slices.GPU == 0 {
			t.Errorf("%+v", d)
		}
	}
	if n := counted(t, m, func() { snapshot(t, s) }); n["nvmlDeviceGetGpuInstanceById"] > 0 || n["nvmlDeviceGetBAR1MemoryInfo"] > 0 {
		t.Errorf("%v", n)
	}
}

// A MIG mode that is pending until a reset is not in force.
func TestPendingMIGMode(t *testing.T) {
	m := simdriver.Start(t, "a30")
	must(t, m.Set(0, "mig_pending", "yes"), m.Set(1, "mig_pending", "no"))
	s := open(t, m)
	snap := snapshot(t, s)
	if len(snap.Devices) != 5 || snap.Devices[0].MIG || !snap.Devices[1].MIG || len(instances(snap, 1)) != 3 {
		t.Error(render(snap))
	}
	must(t, m.SetMIG(0), m.MIGOff(1)) // the reset
	snap = snapshot(t, s)
	if len(snap.Devices) != 2 || !snap.Devices[0].MIG || snap.Devices[1].MIG {
		t.Error(render(snap))
	}
}

// Drivers before R470 composed the UUID of an instance from that of its GPU and its placement.
func TestOldUUIDs(t *testing.T) {
	text, err := simdriver.Text("a30")
	must(t, err)
	const old = "MIG-GPU-936e8935-bba6-5c32-a6df-22529463db2e/5/0"
	m := simdriver.StartText(t, strings.Replace(text, "MIG-176d0b3b-2f6c-5306-ad1d-74b00b939269", old, 1))
	found := instances(snapshot(t, open(t, m)), 1)
	if len(found) != 3 || found[1].ID != old || found[1].Profile != "1g.6gb+me" || found[1].At.GI != 5 {
		t.Errorf("%+v", found)
	}
}

func TestUnreadableInstance(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	for _, call := range []string{"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"} {
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
		want := gpu.Exclusion{
			Index: 5, At: gpu.WholeGPU(gpu.DeviceID(m.UUID(5))), PCI: "0000:90:00.0",
			Failure: gpu.FailureError, Reason: call + ": Unknown Error",
		}
		if !slices.Equal(snap.Excluded, []gpu.Exclusion{want}) {
			t.Errorf("%s: %+v", call, snap.Excluded)
		}
		must(t, s.Close())
	}
}

func TestMIGLayoutChanges(t *testing.T) {
	m, s := start(t, "a100-mig", openWithEvents)
	must(t, m.SetMIG(5, "7g.80gb"), m.SetMIG(0, "1g.20gb"), m.MIGOff(4))
	awaitEvent(t, s, health.Observation{At: gpu.Node, Detail: "GPUs or MIG instances were added or removed"})
	// The handles of the old layout are used once more before the next Snapshot.
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
