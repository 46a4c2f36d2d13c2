package wire

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourcev1 "k8s.io/api/resource/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"

	"github.com/tandem-gpu/tandem/internal/draadapter/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// admit is what the API server's own code makes of a slice: defaults, fields without their gates dropped, validation.
func admit(content, stored []byte) ([]byte, error) {
	object, err := internal(content)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	if stored == nil {
		resourceslice.Strategy.PrepareForCreate(ctx, object)
		if problems := resourceslice.Strategy.Validate(ctx, object); len(problems) > 0 {
			return nil, problems.ToAggregate()
		}
	} else {
		old, err := internal(stored)
		if err != nil {
			return nil, err
		}
		resourceslice.Strategy.PrepareForUpdate(ctx, object, old)
		if problems := resourceslice.Strategy.ValidateUpdate(ctx, object, old); len(problems) > 0 {
			return nil, problems.ToAggregate()
		}
	}
	var out resourcev1.ResourceSlice
	if err := legacyscheme.Scheme.Convert(object, &out, nil); err != nil {
		return nil, err
	}
	return json.Marshal(out)
}

func internal(content []byte) (*resource.ResourceSlice, error) {
	var in resourcev1.ResourceSlice
	if err := json.Unmarshal(content, &in); err != nil {
		return nil, err
	}
	legacyscheme.Scheme.Default(&in)
	var object resource.ResourceSlice
	return &object, legacyscheme.Scheme.Convert(&in, &object, nil)
}

// The publisher finds out which fields an API server drops, by the server's own code with its gates on and off, and publishes what is then
// stored as it was sent: case 31.
func TestPublisherFindsDisabledGates(t *testing.T) {
	shared := kubeapi.Device{
		Name: "gpu-0", AllowMultipleAllocations: true,
		Capacity: map[string]kubeapi.DeviceCapacity{"shares": {
			Value: "4", RequestPolicy: &kubeapi.CapacityRequestPolicy{Default: "1", ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: "1", Step: "1"}},
		}},
	}
	taint := kubeapi.DeviceTaint{Key: "gpu.nvidia.com/xid", Value: "79", Effect: kubeapi.NoSchedule, TimeAdded: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)}
	share := kubeapi.Device{Name: "gpu-0-s0", Taints: []kubeapi.DeviceTaint{taint}}
	for name, c := range map[string]struct {
		shares, taints bool // gates
		want           kubeapi.Device
	}{
		"1.37":           {true, true, shared},
		"without shares": {false, true, share},
		"without both":   {false, false, kubeapi.Device{Name: "gpu-0-s0"}},
	} {
		t.Run(name, func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRAConsumableCapacity, c.shares)
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRADeviceTaints, c.taints)
			s := kubeapitest.Start(t)
			s.Admit(admit)
			s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1"}})
			client, err := kubeapi.New(kubeapi.Options{Address: s.URL})
			if err != nil {
				t.Fatal(err)
			}
			devices := watch.NewValue([]kubeapi.Device{shared})
			p := publisher.New(publisher.Options{API: client, Node: "n1", Driver: "gpu.nvidia.com", Devices: devices})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- p.Run(ctx) }()
			defer func() { cancel(); <-done }()
			go func() { // as the adapter does
				for drops := range p.WatchDropsShares(ctx) {
					if drops {
						devices.Store([]kubeapi.Device{share})
					}
				}
			}()
			for deadline := time.Now().Add(time.Minute); p.Published().Problem != ""; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("%+v", p.Published())
				}
			}
			if status := p.Published(); status.DropsShares == c.shares || status.DropsTaints == c.taints {
				t.Errorf("status %+v", status)
			}
			if diff := cmp.Diff([]kubeapi.Device{c.want}, s.Slices()[0].Spec.Devices); diff != "" {
				t.Errorf("stored (-want +got):\n%s", diff)
			}
			if n := len(s.Writes()); n != 1 {
				t.Errorf("%d writes, want one: %+v", n, s.Writes())
			}
		})
	}
}
