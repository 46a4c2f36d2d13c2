package nvidia

import (
	"cmp"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

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
			Failure: core.FailureError, Reason: call + ": Unknown Error",
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
