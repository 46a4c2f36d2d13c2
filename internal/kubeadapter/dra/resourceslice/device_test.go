package resourceslice_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// machine is a node of these tests: a GPU, one with an unknown brand, one of two MIG instances, two shared ones.
func machine() (gpu.Snapshot, core.Config) {
	s := coretest.WithMIG(coretest.GPUs(5), 2, "1g.10gb", "3g.40gb+me")
	for i := range s.Devices {
		d := &s.Devices[i]
		d.PCIeRoot = "pci0000:00"
		switch d.ID {
		case coretest.GPU(0):
			d.Brand, d.Architecture = "Tesla", "Hopper"
		case coretest.GPU(1):
			d.PCIeRoot, d.NUMANode, d.Compute = "", -1, gpu.Compute{}
		case coretest.Instance(2, 1):
			d.Slices = gpu.Slices{GPU: 3, Compute: 3, Multiprocessors: 60, CopyEngines: 3, Decoders: 4, JPEGDecoders: 1}
			d.MemorySlices = gpu.SliceRange{First: 4, Count: 4}
		}
	}
	return s, config(rules(
		gpuRule(3, inventory.Rule{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}),
		gpuRule(4, inventory.Rule{Pool: "small", Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, Memory: 8 << 30}}),
	))
}

// Devices in their form for clusters with consumable capacity, and for those without.
func TestDevices(t *testing.T) {
	s, c := machine()
	in := resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, c).WithHost(inventory.Host{MPS: []string{"small"}}, inventory.OverlapWarn), BootID: boot}
	text := format(resourceslice.Devices(in))
	in.SharesAsDevices = true
	text += "\nwithout consumable capacity:\n\n" + format(resourceslice.Devices(in))
	goldenfile.Compare(t, "testdata/devices.golden", text)
}

// Every device of the driver has the same attributes, or a selector that reads one would be an error: brand, architecture, versions and
// MIG attributes are present with an empty value. Only numaNode may be missing.
func TestSameAttributes(t *testing.T) {
	s, c := machine()
	s.Driver.CUDA = ""
	var want []string
	for _, separate := range []bool{false, true} {
		for _, d := range resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, c).WithoutHost(), SharesAsDevices: separate}) {
			delete(d.Attributes, "resource.kubernetes.io/numaNode")
			keys := slices.Sorted(maps.Keys(d.Attributes))
			if want == nil {
				want = keys
			}
			if diff := gocmp.Diff(want, keys); diff != "" {
				t.Error(d.Name, diff)
			}
		}
	}
}

// The API server takes at most 32 attributes and capacities of a device. One that has all is within that, and a driver's nonsense does not
// lead beyond.
func TestAttributesAtMost(t *testing.T) {
	for slices, want := range map[gpu.SliceRange]int{{First: 0, Count: 8}: 32, {First: 0, Count: 9}: 24, {First: 1 << 30, Count: 1}: 24} {
		s := coretest.WithMIG(coretest.GPUs(1), 0, "7g.80gb")
		s.Devices[1].MemorySlices = slices
		share := rules(inventory.Rule{Select: inventory.Selector{Profiles: []string{"*"}}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}})
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, config(share)).WithoutHost()})[0]
		if n := len(d.Attributes) + len(d.Capacity); n != want {
			t.Errorf("%+v: %d attributes and capacities, want %d", slices, n, want)
		}
	}
}

// Only if GPUs are proved, a device has the day on which its GPU passed: of an instance, that of its GPU. One with as many attributes as the API
// server takes has none.
func TestProvedOn(t *testing.T) {
	s := coretest.WithMIG(coretest.GPUs(3), 1, "7g.80gb")
	day := func(i int, h inventory.Host, set ...func(*core.Config)) string {
		c := config(set...)
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, c).WithHost(h, c.Overlap)})[i].Attributes["provedOn"]
		if d.String == nil {
			return "none"
		}
		return *d.String
	}
	proved := inventory.Host{CDI: &inventory.CDI{}, Proofs: &inventory.Proofs{
		Withheld: map[gpu.DeviceID]string{coretest.GPU(0): "", coretest.GPU(1): "", coretest.GPU(2): ""},
		Passed:   map[gpu.DeviceID]string{coretest.GPU(0): "2026-11-26", coretest.GPU(1): "2026-11-27"},
	}}
	for i, want := range []string{"2026-11-26", "2026-11-27", ""} {
		if off, on := day(i, inventory.Host{}), day(i, proved); off != "none" || on != want {
			t.Errorf("device %d: off %q, on %q, want %q", i, off, on, want)
		}
	}
	for i := range s.Devices {
		if s.Devices[i].Profile != "" {
			s.Devices[i].MemorySlices = gpu.SliceRange{First: 0, Count: 8}
		}
	}
	share := rules(inventory.Rule{Select: inventory.Selector{Profiles: []string{"*"}}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}})
	for i := range 3 {
		if got := day(i, proved, share); (got == "none") != (i == 1) {
			t.Errorf("shared instance, device %d: %q", i, got)
		}
	}
}

// Brands have the spelling of NVIDIA's DRA driver, by which selectors of claims choose.
func TestBrands(t *testing.T) {
	for name, want := range map[string]string{
		"NVIDIA": "Nvidia", "Tesla": "Tesla", "NVIDIA RTX": "NvidiaRTX", "GeForce RTX": "GeForceRTX", "": "", "new": "new",
	} {
		s := coretest.GPUs(1)
		s.Devices[0].Brand = name
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, config()).WithoutHost()})[0]
		if got := *d.Attributes["brand"].String; got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}

// Versions of drivers become semantic versions.
func TestVersions(t *testing.T) {
	for text, want := range map[string]string{
		"580.65.06": "580.65.6", "12.8": "12.8.0", "13": "13.0.0", "": "0.0.0", "550.163": "550.163.0", "v9.0.0": "0.0.0", "575.57.08-open": "575.57.8",
		"1.2.3.4": "1.2.3", "570.x.7": "570.0.0", "0.0.0": "0.0.0", "99999999999999999999.1": "0.0.0", "580.105.08 beta": "580.105.8", "1..3": "1.0.0",
	} {
		s := coretest.GPUs(1)
		s.Driver.Version = text
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, config()).WithoutHost()})[0]
		if got := *d.Attributes["driverVersion"].Version; got != want {
			t.Errorf("%q is published as %q, want %q", text, got, want)
		}
	}
}

// Quantities are in the form in which the API server returns them, so that what is read back is equal.
func TestQuantities(t *testing.T) {
	for bytes, want := range map[uint64]string{0: "0", 81559 << 20: "81559Mi", 80 << 30: "80Gi", 1<<40 + 1: "1099511627777", 1023: "1023", 5 << 60: "5Ei"} {
		s := coretest.GPUs(1)
		s.Devices[0].Memory = bytes
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, config()).WithoutHost()})[0]
		if got := d.Capacity["memory"].Value; got != want {
			t.Errorf("%d bytes are %q, want %q", bytes, got, want)
		}
	}
	for replicas, want := range map[int]string{2: "2", 1000: "1k", 1600: "1600"} {
		rule := shared(inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas})
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(coretest.GPUs(1), health.Ledger{}, config(rules(rule))).WithoutHost()})[0]
		if got := d.Capacity["shares"].Value; got != want {
			t.Errorf("%d shares are %q, want %q", replicas, got, want)
		}
	}
}

// Limits of MPS clients are the default of a share's memory only if all shares fit: otherwise fewer shares than configured would.
func TestMemoryOfShares(t *testing.T) {
	for limit, want := range map[uint64]string{0: "0", 20 << 30: "0", 19 << 30: "19Gi"} {
		rule := shared(inventory.Sharing{Mode: inventory.MPS, Replicas: 4, Memory: limit})
		d := resourceslice.Devices(resourceslice.Input{Allocatable: core.Build(coretest.GPUs(1), health.Ledger{}, config(rules(rule))).WithoutHost()})[0]
		if got := d.Capacity["memory"].RequestPolicy.Default; got != want {
			t.Errorf("%d GiB of 79 for each of 4: default %q, want %q", limit>>30, got, want)
		}
	}
}

// Names are DNS labels, unique, and the same after minor numbers, indices and the driver have changed.
func TestNames(t *testing.T) {
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	before, c := machine()
	before.Devices[0].ID = "MIG-GPU-11111111-2222-3333-4444-555555555555/12/1" // drivers before 470
	after := before
	after.Devices = slices.Clone(before.Devices)
	for i := range after.Devices {
		after.Devices[i].Index, after.Devices[i].Minor = 9-after.Devices[i].Index, 7
	}
	after.Driver = gpu.Driver{State: gpu.DriverReady, Version: "590.1", CUDA: "14.0"}
	var of [2][]string
	for i, s := range []gpu.Snapshot{before, gpu.NewSnapshot(after)} {
		for _, separate := range []bool{false, true} {
			in := resourceslice.Input{Allocatable: core.Build(s, health.Ledger{}, c).WithoutHost(), SharesAsDevices: separate}
			all := names(resourceslice.Devices(in))
			for _, n := range all {
				if !label.MatchString(n) {
					t.Errorf("%q is no DNS label", n)
				}
				if u, ok := resourceslice.Resolve(in.Allocatable, n); !ok || !strings.HasPrefix(n, resourceslice.DeviceName(u)) {
					t.Errorf("%s resolves to %s, %t", n, u.ID, ok)
				}
			}
			slices.Sort(all)
			if len(slices.Compact(slices.Clone(all))) != len(all) {
				t.Errorf("a name is there twice: %v", all)
			}
			of[i] = append(of[i], all...)
		}
	}
	if diff := gocmp.Diff(of[0], of[1]); diff != "" {
		t.Error("names after the driver was loaded again:", diff)
	}
}

// A name means the unit that it was published for, until that is offered through another API.
func TestResolve(t *testing.T) {
	s, c := machine()
	inv := core.Build(s, health.Ledger{}, c).WithoutHost()
	for n, want := range map[string]inventory.UnitID{
		name(0):         inventory.UnitID(coretest.GPU(0)),
		name(3):         inventory.UnitID(coretest.GPU(3)) + "::0",
		name(3) + "-s2": inventory.UnitID(coretest.GPU(3)) + "::2",
		strings.ToLower(string(coretest.Instance(2, 1))): inventory.UnitID(coretest.Instance(2, 1)),
		name(3) + "-s4": "", name(3) + "-s02": "", name(0) + "-s0": "", name(2): "", "gpu-0": "", "": "", strings.ToUpper(name(0)): "",
	} {
		if u, ok := resourceslice.Resolve(inv, n); u.ID != want || ok != (want != "") {
			t.Errorf("%q is %q, %t; want %q", n, u.ID, ok, want)
		}
	}
	c.API = inventory.DevicePlugin
	if u, ok := resourceslice.Resolve(core.Build(s, health.Ledger{}, c).WithoutHost(), name(0)); ok {
		t.Errorf("%s resolves to a unit of another API", u.ID)
	}
	if _, ok := resourceslice.Resolve(&inventory.Allocatable{}, name(0)); ok {
		t.Error("a name resolves before anything is read")
	}
}

// The name of each device is a DNS label of its own, also where the UUID is none, with the number of a share behind it: one name that is not
// would have the API server refuse the whole slice.
func TestNamesAreLabels(t *testing.T) {
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	for _, sharing := range []*inventory.Sharing{nil, {Mode: inventory.TimeSlicing, Replicas: 3}} {
		s := coretest.GPUs(8)
		for i, id := range []gpu.DeviceID{
			"GPU-1-", "GPU-1", "GPU-1--", "-", "/", gpu.DeviceID("MIG-GPU-" + strings.Repeat("0123456789", 6) + "/1/0"), gpu.DeviceID("MIG-GPU-" + strings.Repeat("0123456789", 6) + "/1/1"), "GPU_é",
		} {
			s.Devices[i].ID, s.Devices[i].At = id, gpu.WholeGPU(id)
		}
		inv := core.Build(s, health.Ledger{}, config(rules(inventory.Rule{Sharing: sharing}))).WithoutHost()
		seen := map[string]bool{}
		for _, name := range names(resourceslice.Devices(resourceslice.Input{Allocatable: inv, SharesAsDevices: true})) {
			if len(name) > 63 || !label.MatchString(name) || seen[name] {
				t.Errorf("name %q, %d bytes, twice: %t", name, len(name), seen[name])
			}
			seen[name] = true
			if _, ok := resourceslice.Resolve(inv, name); !ok {
				t.Errorf("%q is of no unit", name)
			}
		}
		if len(seen) != inv.Len() {
			t.Errorf("%d names of %d units", len(seen), inv.Len())
		}
	}
}

// Nothing is published before the first reading, an empty list for a node without GPUs; devices of other APIs are not listed.
func TestNothingKnown(t *testing.T) {
	for _, tc := range []struct {
		about string
		inv   *inventory.Allocatable
		want  []kubeapi.Device
	}{
		{"before the first inventory", &inventory.Allocatable{}, nil},
		{"before the first reading", core.Build(gpu.NoDriver(gpu.DriverPending, ""), health.Ledger{}, config()).WithoutHost(), nil},
		{"without a driver", core.Build(gpu.NoDriver(gpu.DriverAbsent, "no library"), health.Ledger{}, config()).WithoutHost(), []kubeapi.Device{}},
		{"without a GPU", core.Build(coretest.GPUs(0), health.Ledger{}, config()).WithoutHost(), []kubeapi.Device{}},
		{"with GPUs of the device plugin", core.Build(coretest.GPUs(2), health.Ledger{}, config(func(c *core.Config) { c.API = inventory.DevicePlugin })).WithoutHost(), []kubeapi.Device{}},
	} {
		in := resourceslice.Input{Allocatable: tc.inv}
		if diff := gocmp.Diff(tc.want, resourceslice.Devices(in)); diff != "" {
			t.Error(tc.about, diff)
		}
		if got := resourceslice.Messages(in); (got == nil) != (tc.want == nil) || len(got) != 0 {
			t.Error(tc.about, got)
		}
	}
}

// The same inventory results in equal devices, in the order of the inventory, at most 64 in a slice.
func TestStable(t *testing.T) {
	for _, h := range coretest.Hosts() {
		h.Config.API = inventory.DRA
		in := resourceslice.Input{Allocatable: h.Allocatable(), SharesAsDevices: true}
		first := resourceslice.Devices(in)
		for range 3 {
			if diff := gocmp.Diff(first, resourceslice.Devices(resourceslice.Input{Allocatable: h.Allocatable(), SharesAsDevices: true})); diff != "" {
				t.Fatal(diff)
			}
		}
		if len(first) != h.Units {
			t.Errorf("%d devices for %d units", len(first), h.Units)
		}
		chunks := resourceslice.Chunk(first)
		if diff := gocmp.Diff(names(first), names(slices.Concat(chunks...))); diff != "" || len(chunks) != (len(first)+63)/64 {
			t.Errorf("%d slices: %s", len(chunks), diff)
		}
	}
}

func ExampleChunk() {
	for _, n := range []int{0, 1, 64, 65, 200} {
		var sizes []int
		for _, c := range resourceslice.Chunk(make([]kubeapi.Device, n)) {
			sizes = append(sizes, len(c))
		}
		fmt.Println(n, sizes)
	}
	// Output:
	// 0 []
	// 1 [1]
	// 64 [64]
	// 65 [64 1]
	// 200 [64 64 64 8]
}
