//go:build !before1.37

package scheduling

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// faults returns a ledger in which each GPU of a snapshot has n faults.
func faults(s gpu.Snapshot, n int) health.Ledger {
	var all []health.Observation
	for _, d := range s.Devices {
		for i := range n {
			code := []uint64{79, 95, 94, 63, 119}[i%5] + uint64(i/5)*1000 //nolint:gosec // a few
			all = append(all, health.Observation{At: gpu.WholeGPU(d.At.GPU), Kind: health.XID, Code: code, Detail: "x"})
		}
	}
	return health.Ledger{}.Apply(health.DefaultPolicy(), testStart, all...)
}

// Case 25: the API server accepts each slice of each simulated machine, as it is and with the most taints on each device, in each form of
// sharing, and returns what was sent (case 26): quantities, versions and times are in its own form.
func TestSlicesOfEveryMachine(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			m := simdriver.Start(t, name)
			s, err := nvidia.Open(nvidia.Options{Roots: core.Roots{
				Driver: m.Root, Dev: m.Root, Sys: filepath.Join(m.Root, "sys"), Proc: filepath.Join(m.Root, "proc"),
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			snapshot, err := s.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range snapshot.Devices {
				if !strings.HasPrefix(d.PCIeRoot, "pci") {
					t.Errorf("%s is on the PCIe root %q", d.ID, d.PCIeRoot)
				}
			}
			checkForms(t, snapshot)
		})
	}
}

// Case 25: the same for 0 to 200 devices, and for the largest hosts: 1,600 shares.
func TestSlicesOfManyDevices(t *testing.T) {
	for _, n := range []int{0, 1, 8, 64, 65, 200} {
		checkForms(t, coretest.GPUs(n))
	}
	for _, h := range coretest.Hosts() {
		h.Config.API = inventory.DRA
		for _, separate := range []bool{false, true} {
			in := devices.Input{Allocatable: core.Build(h.Snapshot, faults(h.Snapshot, 1), h.Config).WithoutHost(), SharesAsDevices: separate}
			publish(t, devices.Devices(in))
		}
	}
}

// Case 41: the API server accepts the taint of every code in the table of faults. Each is that of another GPU.
func TestTaintOfEveryFault(t *testing.T) {
	s := coretest.GPUs(200)
	var all []health.Observation
	add := func(kind health.ObservationKind, code uint64) {
		if len(all) < len(s.Devices) {
			all = append(all, health.Observation{At: s.Devices[len(all)].At, Kind: kind, Code: code})
		}
	}
	for r := range xid.XIDs() {
		if r.Effect > xid.None {
			add(health.XID, r.Code)
		}
	}
	for r := range xid.Events() {
		if r.Effect > xid.None {
			add(health.Event, r.Code)
		}
	}
	add(health.XID, ^uint64(0))
	tainted := 0
	for _, slice := range publish(t, build(s, config(), health.Ledger{}.Apply(health.DefaultPolicy(), testStart, all...))) {
		for _, d := range slice.Spec.Devices {
			tainted += len(d.Taints)
		}
	}
	if tainted != len(all) || len(all) < 100 || len(all) == len(s.Devices) {
		t.Errorf("%d taints for %d faults", tainted, len(all))
	}
}

// Case 31: an API server without consumable capacity drops the fields of shared devices. Each share as a device of its own is stored as
// sent, and the allocator gives them out one by one, never to a class for GPUs.
func TestWithoutConsumableCapacity(t *testing.T) {
	featuregatetesting.SetFeatureGatesDuringTest(t, utilfeature.DefaultFeatureGate, featuregatetesting.FeatureOverrides{
		features.DRAConsumableCapacity: false, features.DRAFractionalCapacityRange: false,
	})
	c := config(rule(inventory.Rule{Sharing: timeSlicing(3)}, 0))
	in := devices.Input{Allocatable: core.Build(coretest.GPUs(2), health.Ledger{}, c).WithoutHost(), SharesAsDevices: true}
	gates := feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate)
	cl := &cluster{
		TB: t, classes: printedClasses(t, c), slices: publish(t, devices.Devices(in)), allocated: map[string][]resourceapi.DeviceRequestAllocationResult{},
		cache: cel.NewCache(10, cel.Features{}), features: dynamicresources.AllocatorFeatures(gates),
	}
	for i, step := range [][2]string{
		{one("gpu-shared.nvidia.com"), "shared-gpu"}, {one("gpu.nvidia.com"), "gpu"}, {one("gpu.nvidia.com"), "none"},
		{one("gpu-shared.nvidia.com", "count: 2"), "shared-gpu shared-gpu"}, {one("gpu-shared.nvidia.com"), "none"},
	} {
		results, err := cl.allocate(fmt.Sprint(i), step[0])
		if got := found(cl, results, err); got != step[1] {
			t.Errorf("claim %d: %s, want %s", i, got, step[1])
		}
	}
}

func checkForms(t *testing.T, s gpu.Snapshot) {
	t.Helper()
	mps := inventory.Rule{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 3, Memory: 1 << 30}}
	for _, l := range []health.Ledger{{}, faults(s, 1), faults(s, 20)} {
		for _, c := range []core.Config{config(), config(inventory.Rule{Sharing: timeSlicing(7)}), config(mps), limited(5, 700<<20, true)} {
			for _, in := range []devices.Input{{}, {SharesAsDevices: true}, {Evict: true, Cordoned: "claims of another driver: gpu-0"}} {
				in.Allocatable = core.Build(s, l, c).WithoutHost()
				all := devices.Devices(in)
				stored := publish(t, all)
				n := 0
				for _, one := range stored {
					n += len(one.Spec.Devices)
				}
				if n != len(all) || len(all) > 0 && len(stored) != (len(all)+63)/64 {
					t.Fatalf("%d devices in %d slices of %d", n, len(stored), len(all))
				}
			}
		}
	}
}
