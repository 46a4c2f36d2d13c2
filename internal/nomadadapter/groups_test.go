package nomadadapter

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// firstGroups returns the groups of inv in a new plugin.
func firstGroups(inv *inventory.Inventory) []*device.DeviceGroup { return groups(inv, assignment{}) }

var update = flag.Bool("update", false, "update the golden files")

// formatGroups returns groups as text, for golden files.
func formatGroups(gs []*device.DeviceGroup) string {
	var b strings.Builder
	for _, g := range gs {
		fmt.Fprintf(&b, "%s/%s/%s\n", g.Vendor, g.Type, g.Name)
		for _, k := range slices.Sorted(maps.Keys(g.Attributes)) {
			fmt.Fprintf(&b, "  %-18s %#v\n", k, g.Attributes[k])
		}
		for _, d := range g.Devices {
			fmt.Fprintf(&b, "  %s %t %q", d.ID, d.Healthy, d.HealthDesc)
			if d.HwLocality != nil {
				fmt.Fprintf(&b, " %s", d.HwLocality.PciBusID)
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// migSnapshot returns a GPU with two MIG instances of one profile and one of another, and a GPU without MIG.
func migSnapshot() gpu.Snapshot {
	s := coretest.GPUs(2)
	s.Devices[0].MIG = true
	for i, profile := range []string{"1g.10gb", "1g.10gb", "3g.40gb"} {
		d := s.Devices[0]
		d.ID, d.MIG, d.Profile = gpu.DeviceID(fmt.Sprintf("MIG-%d", i)), false, profile
		d.Model += " MIG " + profile
		d.At = gpu.Placement{GPU: s.Devices[0].ID, GI: uint32(i + 1), CI: 0}
		d.Memory = 9856 << 20
		if profile == "3g.40gb" {
			d.Memory = 40320 << 20
		}
		d.BAR1, d.PowerLimit = 0, 0
		s.Devices = append(s.Devices, d)
	}
	return gpu.NewSnapshot(s)
}

func TestGroups(t *testing.T) {
	golden(t, "testdata/h100x8.txt", formatGroups(firstGroups(nodeInventory(coretest.GPUs(8), lost(3)))))
	golden(t, "testdata/mig.txt", formatGroups(firstGroups(nodeInventory(migSnapshot()))))
}

func TestGroupsAreDeterministic(t *testing.T) {
	s := coretest.GPUs(8)
	s.Devices[5].Model, s.Devices[2].Memory = "NVIDIA A2", 1<<30
	want := formatGroups(firstGroups(nodeInventory(s)))
	for range 100 {
		if got := formatGroups(firstGroups(nodeInventory(s))); got != want {
			t.Fatal(cmp.Diff(want, got))
		}
	}
}

// An unknown property has no attribute: no value is 0 or "N/A".
func TestUnknownAttributesAreAbsent(t *testing.T) {
	d := gpu.Device{ID: "GPU-1", At: gpu.WholeGPU("GPU-1"), NUMANode: -1, Minor: -1}
	gs := firstGroups(nodeInventory(gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverReady}, Devices: []gpu.Device{d}}))
	want := []*device.DeviceGroup{{
		Vendor: "nvidia", Type: "gpu", Name: "N/A",
		Devices: []*device.Device{{ID: "GPU-1", Healthy: true}},
	}}
	if diff := cmp.Diff(formatGroups(want), formatGroups(gs)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := gs[0].Validate(); err != nil {
		t.Error(err)
	}
}

// The health of a device is in its description. The attributes, which determine the node's computed class, have only the
// number of unhealthy devices.
func TestHealthDescription(t *testing.T) {
	settings, _, err := config.NewBlock(nil).Read()
	if err != nil {
		t.Fatal(err)
	}
	plain := firstGroups(nodeInventory(coretest.GPUs(4)))[0]
	limited := checked(0)
	limited.Sample = health.Sample{Events: health.No, RecoveryAction: health.RecoveryNone}
	withdrawn := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95}
	simulated := withdrawn
	simulated.Simulated = true
	for name, tc := range map[string]struct {
		mode    health.Mode
		obs     health.Observation
		healthy bool
		begins  string // the description; "" = none
	}{
		"healthy":        {health.ModeEnforce, checked(0), true, ""},
		"limited checks": {health.ModeEnforce, limited, true, "healthy (health limited: no XID events)"},
		"lost":           {health.ModeEnforce, lost(0), false, "lost: GPU is lost (not listed by the driver) since "},
		"XID":            {health.ModeEnforce, withdrawn, false, "unhealthy: XID 95 "},
		"simulated":      {health.ModeEnforce, simulated, false, "simulated: unhealthy: XID 95 "},
		"observed":       {health.ModeObserve, withdrawn, true, "observed, not enforced: unhealthy: XID 95 "},
		"mode off":       {health.ModeOff, withdrawn, true, ""},
	} {
		settings.Core.Health.Mode = tc.mode
		g := firstGroups(inventoryWith(settings.Core, coretest.GPUs(4), tc.obs))[0]
		d := g.Devices[0]
		if d.Healthy != tc.healthy || !strings.HasPrefix(d.HealthDesc, tc.begins) || (d.HealthDesc == "") != (tc.begins == "") || len(d.HealthDesc) > 200 {
			t.Errorf("%s: healthy %t, %q", name, d.Healthy, d.HealthDesc)
		}
		if _, counted := g.Attributes[unhealthyKey]; counted == tc.healthy {
			t.Errorf("%s: healthy %t, counted as unhealthy %t", name, tc.healthy, counted)
		}
		delete(g.Attributes, unhealthyKey)
		d.Healthy, d.HealthDesc = true, ""
		if diff := cmp.Diff(plain, g); diff != "" {
			t.Errorf("%s: more than one device's health differs (-plain +got):\n%s", name, diff)
		}
	}
}

// checked returns a clean check of the n-th GPU.
func checked(n int) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Checked, Sample: health.Sample{Events: health.Yes, RecoveryAction: health.RecoveryNone}}
}

// A group has only the attributes that are the same for all its devices.
func TestSharedAttributesOnly(t *testing.T) {
	s := coretest.GPUs(3)
	s.Devices[1].PowerLimit = 500_000
	s.Devices[2].DisplayState = gpu.ToggleUnknown
	gs := firstGroups(nodeInventory(s))
	if len(gs) != 1 {
		t.Fatalf("%d groups", len(gs))
	}
	for key, shared := range map[string]bool{"power": false, "display_state": false, "memory": true, "persistence_mode": true} {
		if _, ok := gs[0].Attributes[key]; ok != shared {
			t.Errorf("%s: published %t, want %t", key, ok, shared)
		}
	}
}
