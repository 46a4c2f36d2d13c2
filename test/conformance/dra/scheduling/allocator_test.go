//go:build !before1.37

package scheduling

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// machine is a node of two GPUs, a GPU of three MIG instances, two GPUs of two and four shares, a GPU of MIG instances with shares, and
// one with a fault, in this order.
func machine() (gpu.Snapshot, core.Config, health.Ledger) {
	s := coretest.WithMIG(coretest.WithMIG(coretest.GPUs(7), 2, "1g.10gb", "1g.10gb", "3g.40gb"), 5, "1g.10gb")
	for i := range s.Devices {
		s.Devices[i].NUMANode, s.Devices[i].PCIeRoot = s.Devices[i].Index/4, fmt.Sprintf("pci0000:%02d", s.Devices[i].Index/2)
	}
	c := config(
		rule(inventory.Rule{Sharing: timeSlicing(2)}, 3), rule(inventory.Rule{Sharing: timeSlicing(4), Pool: "notebooks"}, 4),
		rule(inventory.Rule{Sharing: timeSlicing(3)}, 5), rule(inventory.Rule{Pool: "training"}, 1),
	)
	l := health.Ledger{}.Apply(health.DefaultPolicy(), testStart, health.Observation{At: gpu.WholeGPU(coretest.GPU(6)), Kind: health.XID, Code: 95})
	return s, c, l
}

// one is a claim for a device of a class, with what else its request has.
func one(class string, more ...string) string {
	return "devices: {requests: [{name: r, exactly: {deviceClassName: " + strings.Join(append([]string{class}, more...), ", ") + "}}]}"
}

// found are the types of the allocated devices; "error" and "none" if there are none.
func found(c *cluster, results []resourceapi.DeviceRequestAllocationResult, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	if results == nil {
		return "none"
	}
	var types []string
	for _, r := range results {
		types = append(types, c.text(r.Device, "type"))
	}
	return strings.Join(types, " ")
}

// Case 35 and the table of types: the classes for GPUs and MIG instances yield every exclusive one, and never a share, however many
// claims there are. The class of a pool yields what the pool has. A device with a fault is not given out.
func TestClassesYieldTheirPools(t *testing.T) {
	s, c, l := machine()
	classes := printedClasses(t, c)
	for class, want := range map[string][]string{
		"gpu.nvidia.com":                {"gpu"}, // one is of the pool training, one has a fault
		"training.nvidia.com":           {"gpu"},
		"mig.nvidia.com":                {"mig", "mig", "mig"},
		"mig-1g-10gb.nvidia.com":        {"mig", "mig"},
		"mig-3g-40gb.nvidia.com":        {"mig"},
		"gpu-shared.nvidia.com":         {"shared-gpu", "shared-gpu"},
		"notebooks.nvidia.com":          {"shared-gpu", "shared-gpu", "shared-gpu", "shared-gpu"},
		"mig-1g-10gb-shared.nvidia.com": {"shared-mig", "shared-mig", "shared-mig"},
	} {
		one := one(class)
		cl := newCluster(t, classes, publish(t, build(s, c, l)))
		var got []string
		for i := range 10 {
			results, err := cl.allocate(fmt.Sprint(i), one)
			if kind := found(cl, results, err); kind != "none" {
				got = append(got, kind)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s yields %v, want %v", class, got, want)
		}
	}
	if len(classes) != 9 { // the ninth is for shares of a profile that this node has not shared
		t.Errorf("classes %v", slices.Sorted(maps.Keys(classes)))
	}
}

// What claims can ask for, as docs/dra.md has it. Each case begins with an empty node; the claims are allocated one after the other.
func TestRequests(t *testing.T) {
	const (
		shares   = "capacity: {requests: {shares: %q}}"
		memory   = "capacity: {requests: {memory: %q}}"
		tolerate = "tolerations: [{key: gpu.nvidia.com/xid, operator: Equal, value: %q}]"
	)
	s, c, l := machine()
	classes := printedClasses(t, c)
	all := publish(t, build(s, c, l))
	for about, tc := range map[string][][2]string{
		"a count of GPUs":                        {{one("mig.nvidia.com", "count: 3"), "mig mig mig"}, {one("mig.nvidia.com"), "none"}},
		"more than there are":                    {{one("mig.nvidia.com", "count: 4"), "none"}, {one("mig.nvidia.com", "count: 3"), "mig mig mig"}},
		"several shares of a device":             {{one("notebooks.nvidia.com", fmt.Sprintf(shares, "3")), "shared-gpu"}, {one("notebooks.nvidia.com", fmt.Sprintf(shares, "2")), "none"}, {one("notebooks.nvidia.com"), "shared-gpu"}},
		"more shares than a device has":          {{one("notebooks.nvidia.com", fmt.Sprintf(shares, "5")), "none"}},
		"a count of shares":                      {{one("notebooks.nvidia.com", "count: 2"), "none"}}, // a request gets no two shares of a device
		"two requests for shares":                {{"devices: {requests: [{name: a, exactly: {deviceClassName: notebooks.nvidia.com}}, {name: b, exactly: {deviceClassName: notebooks.nvidia.com}}]}", "shared-gpu shared-gpu"}},
		"memory of a share":                      {{one("notebooks.nvidia.com", fmt.Sprintf(memory, "60Gi")), "shared-gpu"}, {one("notebooks.nvidia.com", fmt.Sprintf(memory, "30Gi")), "none"}, {one("notebooks.nvidia.com"), "shared-gpu"}},
		"memory of a GPU":                        {{one("gpu.nvidia.com", fmt.Sprintf(memory, "40Gi")), "gpu"}, {one("gpu.nvidia.com"), "none"}},
		"more memory than a GPU has":             {{one("gpu.nvidia.com", fmt.Sprintf(memory, "90Gi")), "none"}},
		"all of a class":                         {{one("mig-1g-10gb.nvidia.com", "allocationMode: All"), "mig mig"}, {one("mig-1g-10gb.nvidia.com"), "none"}},
		"all of a class with a taint":            {{one("gpu.nvidia.com", "allocationMode: All"), "none"}},
		"all of a class, tolerated":              {{one("gpu.nvidia.com", "allocationMode: All", fmt.Sprintf(tolerate, "95")), "gpu gpu"}},
		"a tolerated fault":                      {{one("gpu.nvidia.com", "count: 2", fmt.Sprintf(tolerate, "95")), "gpu gpu"}},
		"another fault is tolerated":             {{one("gpu.nvidia.com", "count: 2", fmt.Sprintf(tolerate, "79")), "none"}},
		"the first available":                    {{"devices: {requests: [{name: r, firstAvailable: [{name: big, deviceClassName: mig.nvidia.com, count: 4}, {name: small, deviceClassName: notebooks.nvidia.com}]}]}", "shared-gpu"}},
		"the first available is there":           {{"devices: {requests: [{name: r, firstAvailable: [{name: big, deviceClassName: gpu.nvidia.com}, {name: small, deviceClassName: notebooks.nvidia.com}]}]}", "gpu"}},
		"instances of one GPU":                   {{"devices: {requests: [{name: a, exactly: {deviceClassName: mig.nvidia.com, count: 2}}], constraints: [{matchAttribute: gpu.nvidia.com/parentUUID}]}", "mig mig"}},
		"GPUs of one NUMA node":                  {{"devices: {requests: [{name: a, exactly: {deviceClassName: gpu.nvidia.com}}, {name: b, exactly: {deviceClassName: training.nvidia.com}}], constraints: [{matchAttribute: resource.kubernetes.io/numaNode}]}", "gpu gpu"}},
		"GPUs of one root":                       {{"devices: {requests: [{name: a, exactly: {deviceClassName: gpu.nvidia.com}}, {name: b, exactly: {deviceClassName: notebooks.nvidia.com}}], constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]}", "none"}},
		"distinct GPUs":                          {{"devices: {requests: [{name: a, exactly: {deviceClassName: mig.nvidia.com, count: 2}}], constraints: [{distinctAttribute: gpu.nvidia.com/parentUUID}]}", "none"}},
		"admin access beside a holder, any mode": {{one("gpu.nvidia.com"), "gpu"}, {one("gpu.nvidia.com", "adminAccess: true"), "gpu"}, {one("gpu.nvidia.com", "allocationMode: All", "adminAccess: true", fmt.Sprintf(tolerate, "95")), "gpu gpu"}, {one("gpu.nvidia.com"), "none"}},
	} {
		cl := newCluster(t, classes, all)
		for i, step := range tc {
			results, err := cl.allocate(fmt.Sprint(i), step[0])
			if got := found(cl, results, err); got != step[1] {
				t.Errorf("%s, claim %d: %s, want %s", about, i, got, step[1])
			}
			seen := map[string]bool{}
			for _, r := range results {
				shared := strings.HasPrefix(cl.text(r.Device, "type"), "shared-")
				if id := fmt.Sprint(r.ShareID); (r.ShareID != nil) != shared || shared && seen[id] {
					t.Errorf("%s, claim %d: share IDs of %v", about, i, results)
				} else {
					seen[id] = true
				}
			}
		}
	}
}

// Case 52: claims as NVIDIA's quick start has them are allocated without a change.
func TestClaimsOfNVIDIA(t *testing.T) {
	s := coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb")
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Architecture, d.Brand = "Hopper", "NVIDIA"
		if d.Profile == "1g.10gb" {
			d.MemorySlices = gpu.SliceRange{First: d.Instance, Count: 1}
		}
	}
	c := config()
	cl := newCluster(t, printedClasses(t, c), publish(t, build(s, c, health.Ledger{})))
	const ofProfile = `exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '%s'"}}]}`
	mig := "devices:\n  requests:\n"
	for i, profile := range []string{"1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"} {
		mig += fmt.Sprintf("  - {name: mig-%d, %s}\n", i, fmt.Sprintf(ofProfile, profile))
	}
	mig += "  constraints:\n  - {requests: [], matchAttribute: gpu.nvidia.com/parentUUID}\n"
	for _, tc := range []struct{ about, spec, want string }{
		{"four instances of one GPU", mig, "mig mig mig mig"},
		{"a GPU by its properties", `devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, selectors: [{cel: {expression: "` +
			`device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*h100.*$') && device.attributes['gpu.nvidia.com'].architecture == 'Hopper'` +
			` && device.attributes['gpu.nvidia.com'].brand == 'Nvidia'` +
			` && device.attributes['gpu.nvidia.com'].cudaComputeCapability.isGreaterThan(semver('8.0.0'))` +
			` && device.attributes['gpu.nvidia.com'].driverVersion.compareTo(semver('550.0.0')) > 0` +
			` && device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('40Gi')) >= 0"}}]}}]}`, "gpu"},
		{"a GPU with a configuration", "devices: {requests: [{name: ts-gpu, exactly: {deviceClassName: gpu.nvidia.com}}], config: [{requests: [ts-gpu], opaque: {driver: gpu.nvidia.com, " +
			"parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Default}}}}}]}", "gpu"},
		{"a GPU, when none is left", one("gpu.nvidia.com"), "none"},
		{"an instance by its place", `devices: {requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "` +
			`'memorySlice2' in device.capacity['gpu.nvidia.com']"}}]}}]}`, "mig"},
	} {
		results, err := cl.allocate(tc.about, tc.spec)
		if got := found(cl, results, err); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.about, got, tc.want)
		}
	}
}

// Case 28 and fact 8: no selector that reads an attribute fails the pod, whichever devices it meets: each attribute is on each device,
// also on one whose driver reports nothing. Our classes do not fail on devices of NVIDIA's driver, which lack our attributes.
func TestSelectorsNeverFail(t *testing.T) {
	s, c, l := machine()
	for _, id := range []gpu.DeviceID{coretest.GPU(1), coretest.Instance(2, 1)} {
		for i := range s.Devices {
			if d := &s.Devices[i]; d.ID == id {
				*d = gpu.Device{ID: d.ID, At: d.At, Index: d.Index, Profile: d.Profile, NUMANode: -1, Minor: -1}
			}
		}
	}
	classes := printedClasses(t, c)
	of := publish(t, build(s, c, l))
	foreign := of[0].DeepCopy() // as NVIDIA's driver publishes devices
	foreign.Name, foreign.Spec.Pool.Name = "of-nvidia", "of-nvidia"
	for i := range foreign.Spec.Devices {
		d := &foreign.Spec.Devices[i]
		d.Name, d.Taints = fmt.Sprintf("gpu-%d", i), nil
		for _, own := range []resourceapi.QualifiedName{"pool", "sharing", "parentUUID", "profile", "addressingMode"} {
			delete(d.Attributes, own)
		}
	}
	foreign.Spec.Pool.ResourceSliceCount = 1
	nothing := func(expression string) string {
		return `devices: {requests: [{name: r, exactly: {deviceClassName: every, selectors: [{cel: {expression: "` + expression + `"}}]}}]}`
	}
	every := classes["gpu.nvidia.com"].DeepCopy()
	every.Name, every.Spec.Selectors[0].CEL.Expression = "every", "device.driver == 'gpu.nvidia.com'"
	classes["every"] = every
	cl := newCluster(t, classes, of)
	tried := 0
	for key, a := range of[0].Spec.Devices[0].Attributes {
		domain, name, qualified := strings.Cut(string(key), "/")
		if !qualified {
			domain, name = "gpu.nvidia.com", string(key)
		}
		field := fmt.Sprintf("device.attributes['%s'].%s", domain, name)
		condition := field + " == 'nothing'"
		switch {
		case a.VersionValue != nil:
			condition = field + ".compareTo(semver('99999.0.0')) > 0"
		case a.IntValue != nil: // numaNode
			condition = fmt.Sprintf("device.attributes['%s'].?%s.orValue(-1) > 99", domain, name)
		}
		results, err := cl.allocate("x", nothing(condition))
		if got := found(cl, results, err); got != "none" {
			t.Errorf("%s: %s", condition, got)
		}
		tried++
	}
	if tried != 16 {
		t.Errorf("%d attributes", tried)
	}
	results, err := cl.allocate("x", nothing("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('1Ei')) > 0"))
	if got := found(cl, results, err); got != "none" {
		t.Error("memory:", got)
	}
	delete(classes, "every")
	for class := range classes {
		cl := newCluster(t, classes, []*resourceapi.ResourceSlice{foreign, of[0]})
		for i := range 20 {
			if _, err := cl.allocate(fmt.Sprint(i), one(class)); err != nil {
				t.Errorf("%s: %v", class, err)
			}
		}
	}
}

// Slices of more than 64 devices are one pool: a claim for all of them gets all.
func TestAllOfSeveralSlices(t *testing.T) {
	c := config()
	cl := newCluster(t, printedClasses(t, c), publish(t, build(coretest.GPUs(65), c, health.Ledger{})))
	n := 0
	for i := range 70 {
		if results, err := cl.allocate(fmt.Sprint(i), one("gpu.nvidia.com")); err != nil {
			t.Fatal(err)
		} else if results != nil {
			n++
		}
	}
	if len(cl.slices) != 2 || n != 65 {
		t.Errorf("%d devices of %d slices", n, len(cl.slices))
	}
}
