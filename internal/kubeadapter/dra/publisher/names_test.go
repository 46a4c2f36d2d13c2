package publisher_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// A name that another node's slice has is no obstacle: the slice gets another name, keeps it over a restart, and belongs to the node all the
// same.
func TestNameIsTaken(t *testing.T) {
	inBubble(t, func(a *agent) {
		taken := foreign("n1-gpu.nvidia.com-1")
		taken.Spec.NodeName, taken.Spec.Pool.Name = "n2", "n2"
		a.api.PutSlice(taken)
		a.set(gpus(130)...)
		own := func() (names []string, devices int) {
			for _, s := range a.api.Slices() {
				if s.Spec.NodeName == node {
					names, devices = append(names, s.Metadata.Name), devices+len(s.Spec.Devices)
				}
			}
			return names, devices
		}
		form := regexp.MustCompile(`^n1-gpu\.nvidia\.com-[0-9]+(-[a-z0-9]+)?$`)
		names, devices := own()
		if len(names) != 3 || devices != 130 || !form.MatchString(names[1]) || names[1] == taken.Metadata.Name {
			t.Errorf("slices %q with %d devices: %s", names, devices, a.log.String())
			return
		}
		a.wantProblem()
		a.wantLog("name", 1)
		a.api.ForgetRequests()
		a.api.DeleteSlice(taken.Metadata.Name)
		a.restart()
		a.after(time.Hour)
		a.wantWrites()
		a.set(gpus(129)...)
		if again, devices := own(); strings.Join(again, " ") != strings.Join(names, " ") || devices != 129 {
			t.Errorf("slices %q with %d devices, before %q", again, devices, names)
		}
		if status := a.Published(); status.Slices != 3 || len(status.OtherSlices) != 0 {
			t.Errorf("status %+v", status)
		}
	})
}

// The same for the name of a dry run.
func TestNameOfTheDryRunIsTaken(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.stop()
		for _, name := range []string{"n1-gpu.nvidia.com-dry-run", "n1-gpu.nvidia.com-0"} {
			taken := foreign(name)
			taken.Spec.NodeName, taken.Spec.Driver = "n2", resourceslice.Driver
			a.api.PutSlice(taken)
		}
		a.api.DropFields(true, true)
		a.start()
		shared := gpu(0)
		shared.AllowMultipleAllocations = true
		a.set(shared)
		if !a.DropsShares() {
			t.Error("the server was not asked")
		}
		a.set([]kubeapi.Device{gpu(0)}...)
		if n := len(a.api.Slices()); n != 3 {
			t.Errorf("%d slices: %s", n, a.log.String())
		}
	})
}

// A node without a device has no slice: most nodes of a cluster may have no GPU. The last device takes the slices with it.
func TestNoDevicesAreNoSlice(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set()
		a.after(24 * time.Hour)
		a.wantWrites()
		a.wantProblem()
		if err := a.Ready(); err != nil {
			t.Error(err)
		}
		a.set(gpus(100)...)
		a.want(gpus(100)...)
		a.set()
		if n := a.api.Len(); n != 0 {
			t.Errorf("%d slices", n)
		}
		a.wantProblem()
		a.set(gpu(0))
		a.want(gpu(0))
	})
}
