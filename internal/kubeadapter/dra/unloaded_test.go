package dra

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// While the driver has not answered for the first time, no slice changes: the API has the devices, and the history may
// lack some.
func TestNoSliceChangesBeforeTheDriverHasAnswered(t *testing.T) {
	c := config()
	state := core.Restore(c, core.Checkpoint{BootID: boot, Devices: coretest.GPUs(1).Devices}, boot).ListPrior(c, time.Now())
	if state.Allocatable.Len() != 1 {
		t.Fatal("the history is not listed")
	}
	r := newRig(t, state.Allocatable)
	r.api.put(newClaim("a", result(coretest.GPU(1))))
	r.await("records", r.adapter.isLoaded)
	r.adapter.derive()
	if d := r.adapter.Desired().Load(); d != nil {
		t.Errorf("slices would have %v", d)
	}
	answered := make(chan error, 1)
	go func() { answered <- r.prepareQuietly(r.conn, "a") }() // it waits for the driver
	s := state.Read(c, time.Now(), coretest.GPUs(2))
	r.src.Set(withCDI(s.Allocatable, coretest.GPUs(2)))
	r.must(<-answered)
	r.await("devices", func() bool { return len(r.adapter.Desired().Load()) == 2 })
}

// While the driver is unloaded, its devices are tainted, and keep all attributes, its versions too. With another driver they have its.
func TestAttributesWhileTheDriverIsUnloaded(t *testing.T) {
	c := config()
	state := core.NewState(c).Read(c, time.Now(), coretest.GPUs(2))
	r := newRig(t, withCDI(state.Allocatable, coretest.GPUs(2)))
	attributes := func() (all []map[string]kubeapi.DeviceAttribute) {
		for _, d := range r.adapter.Desired().Load() {
			all = append(all, d.Attributes)
		}
		return all
	}
	r.await("devices", func() bool { return len(r.adapter.Desired().Load()) == 2 })
	before := attributes()
	if v := before[0]["driverVersion"].Version; v == nil || *v != "580.95.5" {
		t.Fatalf("driver %v", v)
	}

	state = state.Read(c, time.Now(), gpu.NoDriver(gpu.DriverAbsent, "the kernel module is not loaded"))
	r.src.Set(withCDI(state.Allocatable, coretest.GPUs(2)))
	r.await("the taint", func() bool {
		return slices.ContainsFunc(r.adapter.Desired().Load()[1].Taints, func(t kubeapi.DeviceTaint) bool { return t.Key == "gpu.nvidia.com/nvml-unavailable" })
	})
	if diff := cmp.Diff(before, attributes()); diff != "" {
		t.Errorf("without the driver:\n%s", diff)
	}

	next := coretest.GPUs(2)
	next.Driver.Version = "590.10.01"
	state = state.Read(c, time.Now(), next)
	r.src.Set(withCDI(state.Allocatable, next))
	r.await("the other driver", func() bool { return *attributes()[0]["driverVersion"].Version == "590.10.1" })
}
