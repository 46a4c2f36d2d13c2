package nomadadapter

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/device/proto"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

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

func TestGroups(t *testing.T) {
	models := withDevice(withDevice(coretest.GPUs(4), 1, memory(97871)), 2, func(d *gpu.Device) { d.Model, d.PowerLimit = "NVIDIA L40S", 350_000 })
	small := inventory.Rule{Select: inventory.Selector{Profiles: []string{"1g.*"}}, Pool: "small", Sharing: byMPS(2)}
	pairs := linked(8, [2]int{0, 1}, [2]int{2, 3}, [2]int{4, 5}, [2]int{6, 7})
	for name, tc := range map[string]struct {
		inv *inventory.Allocatable
		by  config.GroupBy
	}{
		"h100x8":  {nodeInventory(coretest.GPUs(8), lost(3)), config.GroupByNone},
		"mig":     {nodeInventory(migSnapshot()), config.GroupByNone},
		"shared":  {inventoryUnder(mixedPolicy, withDetails(coretest.GPUs(8)), lost(3)), config.GroupByNone},
		"cut":     {nodeInventory(withDetails(migSnapshot())), config.GroupByNone},
		"cutmps":  {inventoryUnder(rules(small), withDetails(migSnapshot())), config.GroupByNone},
		"renamed": {inventoryUnder(inventory.Policy{Names: []inventory.Naming{{Select: inventory.Selector{Models: []string{"*H100*"}}, Pool: "h100"}}}, withDetails(models)), config.GroupByNone},
		"onepool": {inventoryUnder(rules(inventory.Rule{Select: selectGPUs(0, 1, 2), Pool: "any", Sharing: timeSlicing(2)}), withDetails(models)), config.GroupByNone},
		"numa":    {nodeInventory(withDetails(coretest.GPUs(4))), config.GroupByNUMA},
		"limited": {inventoryUnder(limited("even"), withDetails(coretest.GPUs(2))), config.GroupByNone},
		"nvlink":  {inventoryUnder(mixedPolicy, withDetails(pairs)), config.GroupByNVLink},
	} {
		gs := groups(tc.inv, assignment{by: tc.by})
		goldenfile.Compare(t, "testdata/"+name+".txt", formatGroups(gs))
		for _, g := range gs {
			if err := g.Validate(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
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
	checkEqual(t, "groups", formatGroups(want), formatGroups(gs))
	if err := gs[0].Validate(); err != nil {
		t.Error(err)
	}
}

// A group has only the attributes that are the same for all its devices, and unique.serial only if all are of one board.
func TestSharedAttributesOnly(t *testing.T) {
	s := coretest.GPUs(3)
	s.Devices[1].PowerLimit = 500_000
	s.Devices[2].DisplayState = gpu.ToggleUnknown
	all := firstGroups(nodeInventory(withDetails(s)))[0].Attributes
	for key, shared := range map[string]bool{"power": false, "display_state": false, "unique.serial": false, "memory": true, "persistence_mode": true} {
		if _, ok := all[key]; ok != shared {
			t.Errorf("%s: published %t, want %t", key, ok, shared)
		}
	}
	for _, g := range firstGroups(inventoryUnder(rules(inventory.Rule{Sharing: timeSlicing(3)}), withDetails(migSnapshot()))) {
		if a := g.Attributes["unique.serial"]; a == nil || a.Int == nil {
			t.Errorf("%s: serial %#v", g.Name, a)
		}
	}
	for text, want := range map[string]string{"1652922000001": "1652922000001", "0320918": "320918", "PC-7A": "PC-7A", "1e5": "1e5"} {
		if got := serial(text).wire().GoString(); got != want {
			t.Errorf("serial %s is %s, want %s", text, got, want)
		}
	}
}

// The health of a device is in its description. The attributes, which determine the node's computed class, have only the
// number of unhealthy devices.
func TestHealthDescription(t *testing.T) {
	plain := firstGroups(nodeInventory(coretest.GPUs(4)))[0]
	checked := health.Observation{
		At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked,
		Sample: health.Sample{Events: health.Yes, RecoveryAction: health.RecoveryNone},
	}
	limited := checked
	limited.Sample.Events = health.No
	withdrawn := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95}
	simulated := withdrawn
	simulated.Simulated = true
	for name, tc := range map[string]struct {
		mode    health.Mode
		obs     health.Observation
		healthy bool
		begins  string // the description; "" = none
	}{
		"healthy":        {health.ModeEnforce, checked, true, ""},
		"limited checks": {health.ModeEnforce, limited, true, "healthy (health limited: no XID events)"},
		"lost":           {health.ModeEnforce, lost(0), false, "LOST " + lostText},
		"XID":            {health.ModeEnforce, withdrawn, false, "XID_95 unhealthy: XID 95 "},
		"simulated":      {health.ModeEnforce, simulated, false, "XID_95 simulated: unhealthy: XID 95 "},
		"observed":       {health.ModeObserve, withdrawn, true, "XID_95 observed, not enforced: unhealthy: XID 95 "},
		"mode off":       {health.ModeOff, withdrawn, true, ""},
	} {
		cfg := defaultCore()
		cfg.Health.Mode = tc.mode
		g := firstGroups(inventoryWith(cfg, coretest.GPUs(4), tc.obs))[0]
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

// wireSize returns the bytes of a fingerprint as a gRPC message.
func wireSize(gs []*device.DeviceGroup) int {
	var out proto.FingerprintResponse
	for _, g := range gs {
		group := &proto.DeviceGroup{Vendor: g.Vendor, DeviceType: g.Type, DeviceName: g.Name, Attributes: structs.ConvertStructAttributeMap(g.Attributes)}
		for _, d := range g.Devices {
			one := &proto.DetectedDevice{ID: d.ID, Healthy: d.Healthy, HealthDescription: d.HealthDesc}
			if d.HwLocality != nil {
				one.HwLocality = &proto.DeviceLocality{PciBusId: d.HwLocality.PciBusID}
			}
			group.Devices = append(group.Devices, one)
		}
		out.DeviceGroup = append(out.DeviceGroup, group)
	}
	return protobuf.Size(protoadapt.MessageV2Of(&out))
}

// The limit of gRPC for a message is 4 MiB, and Nomad's servers get the whole fingerprint with each change. The log has the
// sizes for docs/performance.md.
func TestFingerprintsAreSmall(t *testing.T) {
	var faults []health.Observation
	for i := range 16 {
		faults = append(faults, health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.XID, Code: 95})
	}
	for name, tc := range map[string]struct {
		inv *inventory.Allocatable
		n   int
	}{
		"16 GPUs by 7 by 10":            {sharedInstances(10), 1120},
		"16 GPUs by 100":                {sharedGPUs(16, 100), 1600},
		"16 GPUs by 7 by 10, unhealthy": {sharedInstances(10, faults...), 1120},
		"16 GPUs by 100, unhealthy":     {sharedGPUs(16, 100, faults...), 1600},
	} {
		gs := firstGroups(tc.inv)
		all, size := 0, wireSize(gs)
		for _, n := range groupSizes(gs) {
			all += n
		}
		if all != tc.n || size > 1<<20 {
			t.Errorf("%s: %d devices in %d bytes", name, all, size)
		}
		t.Logf("%s: %d bytes, %d each", name, size, size/all)
	}
}

// With several faults the description has the one that is hardest to clear, and then the others, each with its own action.
func TestDescriptionOfTwoFaults(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(1))
	failed := health.Observation{At: at, Kind: health.Checked, Sample: health.Sample{RemapFailed: health.Yes, RecoveryAction: health.RecoveryReset}}
	inv := inventoryWith(defaultCore(), coretest.GPUs(2), health.Observation{At: at, Kind: health.XID, Code: 48}, failed, failed)
	text := firstGroups(inv)[0].Devices[1].HealthDesc
	for _, want := range []string{
		"Z; action: run field diagnostics, replace the GPU if they fail; cleared by: an operator (command clear); also ",
		"; also unhealthy: recovery action: GPU reset since ",
		"; also unhealthy: XID 48 uncorrectable memory error since ", "; action: drain and reset the GPU; cleared by: ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	if !strings.HasPrefix(text, "ROW_REMAP_FAILED unhealthy: row remapping failed since ") || len(text) > 500 {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}
