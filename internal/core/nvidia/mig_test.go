package nvidia

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestUnreadableInstance(t *testing.T) {
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
	m := simdriver.Start(t, "a100-mig")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.SetMIG(5, "7g.80gb"), m.SetMIG(0, "1g.20gb"), m.MIGOff(4))
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

func TestComputeInstances(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	must(t, m.SetMIG(0, "1c.3g.40gb"))
	s := open(t, m)
	d := snapshot(t, s).Devices[1]
	if d.Profile != "1c.3g.40gb" || d.Model != "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb" {
		t.Errorf("%+v", d)
	}
}

// Without names, attributes and the profile number of the GPU instance give the same profile.
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

func TestParseMIGMinors(t *testing.T) {
	got := parseMIGMinors(strings.Join([]string{
		"config 1", "monitor 2",
		"gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu12/gi14/ci7/access 1758",
		"", "gpu0/gi0/ci0/access", "gpu0/gi0/ci0/access x", "gpu0/gi0/ci0/access -1", "gpu0/gi0/ci0/config 9",
		"gpu0/gi0/ci0/dec0/access 9", "gpu0/gi/access 9", "gpu0/gi99999/access 9", "access 9", "gpu1/gi2/access 5 6",
	}, "\n"))
	want := migCapabilities{{0, 0, gpu.Whole}: 3, {0, 0, 0}: 4, {12, 14, 7}: 1758}
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(migCapability{})); diff != "" {
		t.Error(diff)
	}
	gi, ci := got.of(12, gpu.Placement{GI: 14, CI: 7})
	if gi != 0 || ci != 1758 {
		t.Errorf("gi %d, ci %d", gi, ci)
	}
	if gi, ci := migCapabilities(nil).of(0, gpu.Placement{}); gi != 0 || ci != 0 {
		t.Errorf("without a list: gi %d, ci %d", gi, ci)
	}
}

// The list of capabilities (/proc/driver/nvidia-caps) may be missing in a container, with a driver before R450, or with
// capabilities in procfs only (module parameter nv_cap_enable_devfs=0): instances then have no device nodes. The list is
// read when it appears.
func TestNoCapabilities(t *testing.T) {
	m := simdriver.Start(t, "a30")
	list := filepath.Join(m.Root, "proc/driver/nvidia-caps")
	must(t, os.Rename(list, list+".gone"))
	s := open(t, m)
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Profile == "" {
			t.Errorf("%+v", d)
		}
	}
	must(t, os.Rename(list+".gone", list))
	found := instances(snapshot(t, s), 1)
	if len(found) != 3 || found[0].GICap != 147 || found[0].CICap != 148 {
		t.Errorf("%+v", found)
	}
	// The list is by minor number: without it, the instances of a GPU have no device nodes.
	must(t, m.Set(1, "unsupported", "nvmlDeviceGetMinorNumber"))
	for _, d := range instances(snapshot(t, s), 1) {
		if d.GICap != 0 || d.CICap != 0 || d.Minor != -1 {
			t.Errorf("%+v", d)
		}
	}
}
