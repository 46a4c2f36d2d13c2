package resourceslice_test

import (
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// The memory of a device with limits is what the shares have together, in steps of 1 MiB; a second capacity is not consumed (fence 35, C11). Where the API has no consumable
// capacity, a share's device has its limit.
func TestLimitedMemory(t *testing.T) {
	for about, tc := range map[string]struct {
		limits  inventory.LimitPolicy
		sharing inventory.Sharing
		value   string
		policy  kubeapi.CapacityRequestPolicy
		share   string
	}{
		"equal parts": {inventory.LimitPolicy{Reserve: 1 << 30}, inventory.Sharing{Replicas: 4}, "80535Mi",
			kubeapi.CapacityRequestPolicy{Default: "20133Mi", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "512Mi", Step: "1Mi"}}, "20133Mi"},
		"small shares": {inventory.LimitPolicy{Reserve: 1 << 30}, inventory.Sharing{Replicas: 4, Memory: 100 << 20}, "80535Mi",
			kubeapi.CapacityRequestPolicy{Default: "100Mi", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "100Mi", Step: "1Mi"}}, "100Mi"},
		"overcommit": {inventory.LimitPolicy{Reserve: 1 << 30, Overcommit: true}, inventory.Sharing{Replicas: 4, Memory: 40 << 30}, "160Gi",
			kubeapi.CapacityRequestPolicy{Default: "40Gi", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "512Mi", Max: "80535Mi", Step: "1Mi"}}, "40Gi"},
	} {
		tc.sharing.Mode, tc.sharing.Limit = inventory.TimeSlicing, inventory.LimitRequired
		c := config(rules(shared(tc.sharing)))
		c.Policy.Limits = tc.limits
		s := coretest.GPUs(1)
		s.Devices[0].Memory += 1<<20 - 1
		inv := core.Build(s, health.Ledger{}, c).WithoutHost()
		d := resourceslice.Devices(resourceslice.Input{Allocatable: inv})[0]
		if diff := gocmp.Diff(kubeapi.DeviceCapacity{Value: tc.value, RequestPolicy: &tc.policy}, d.Capacity["memory"]); diff != "" || !d.AllowMultipleAllocations {
			t.Errorf("%s: %s", about, diff)
		}
		for _, d := range resourceslice.Devices(resourceslice.Input{Allocatable: inv, SharesAsDevices: true}) {
			if diff := gocmp.Diff(kubeapi.DeviceCapacity{Value: tc.share}, d.Capacity["memory"]); diff != "" || d.AllowMultipleAllocations {
				t.Errorf("%s: %s: %s", about, d.Name, diff)
			}
		}
	}
}
