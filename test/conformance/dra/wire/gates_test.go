package wire

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourcev1 "k8s.io/api/resource/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
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

// published has a publisher publish devices to an API server whose slices the server's own code admits, with its gates as they are, and
// returns when it is done. drops gets that shares have to be devices.
func published(t *testing.T, s *kubeapitest.Server, devices *watch.Value[[]kubeapi.Device], drops func()) *publisher.Publisher {
	t.Helper()
	s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1"}})
	client, err := kubeapi.New(kubeapi.Options{Address: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	p := publisher.New(publisher.Options{API: client, Node: "n1", Driver: "gpu.nvidia.com", Devices: devices})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	go func() { // as the adapter does
		for shares := range p.WatchDropsShares(ctx) {
			if shares {
				drops()
			}
		}
	}()
	return p
}

// await waits for a state of the publisher.
func await(t *testing.T, p *publisher.Publisher, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: %+v", what, p.Published())
		}
	}
}

func upToDate(p *publisher.Publisher) func() bool {
	return func() bool { return p.Published().Problem == "" }
}

func gpu(i int, effects ...kubeapi.TaintEffect) kubeapi.Device {
	d := kubeapi.Device{Name: fmt.Sprintf("gpu-%d", i)}
	for _, e := range effects {
		d.Taints = append(d.Taints, kubeapi.DeviceTaint{Key: "gpu.nvidia.com/xid", Value: strings.ToLower(string(e)), Effect: e, TimeAdded: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)})
	}
	return d
}

// A degraded GPU keeps no taint and no device of the node from being published, on no version: 1.34 refuses the effect None.
func TestDegradedGPU(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRAConsumableCapacity, true)
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRADeviceTaints, true)
	s := kubeapitest.Start(t)
	s.Admit(admit)
	devices := watch.NewValue([]kubeapi.Device{gpu(0, kubeapi.NoEffect), gpu(1, kubeapi.NoSchedule, kubeapi.NoEffect), gpu(2)})
	p := published(t, s, devices, func() {})
	await(t, p, "at first", upToDate(p))
	want := func(devices ...kubeapi.Device) {
		t.Helper()
		if !hasEffectNone {
			for i, d := range devices {
				devices[i].Taints = slices.DeleteFunc(d.Taints, func(t kubeapi.DeviceTaint) bool { return t.Effect == kubeapi.NoEffect })
			}
		}
		if diff := cmp.Diff(devices, s.Slices()[0].Spec.Devices, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("stored (-want +got):\n%s", diff)
		}
	}
	want(gpu(0, kubeapi.NoEffect), gpu(1, kubeapi.NoSchedule, kubeapi.NoEffect), gpu(2))
	devices.Store([]kubeapi.Device{gpu(0, kubeapi.NoEffect), gpu(1), gpu(2, kubeapi.NoEffect, kubeapi.NoExecute), gpu(3, kubeapi.NoEffect)})
	await(t, p, "with another one", func() bool { return p.Published().Devices == 4 && p.Published().Problem == "" })
	want(gpu(0, kubeapi.NoEffect), gpu(1), gpu(2, kubeapi.NoEffect, kubeapi.NoExecute), gpu(3, kubeapi.NoEffect))
}

// A device that the API server's own code refuses keeps no other from being published, nor does a webhook that answers with 400 or 413.
func TestRefusedDevice(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRAConsumableCapacity, true)
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRADeviceTaints, true)
	s := kubeapitest.Start(t)
	s.Admit(admit)
	devices := watch.NewValue([]kubeapi.Device{gpu(0), gpu(1)})
	p := published(t, s, devices, func() {})
	await(t, p, "at first", upToDate(p))
	bad, version := gpu(9), "580.65.06"
	bad.Name = "GPU_9"
	old := gpu(1, kubeapi.NoSchedule)
	old.Attributes = map[string]kubeapi.DeviceAttribute{"driverVersion": {Version: &version}}
	devices.Store([]kubeapi.Device{old, bad, gpu(2), gpu(3)})
	await(t, p, "with devices that are refused", func() bool { return strings.Contains(p.Published().Problem, "and 1 more refused as invalid") })
	if diff := cmp.Diff([]kubeapi.Device{gpu(1, kubeapi.NoSchedule), gpu(2), gpu(3)}, s.Slices()[0].Spec.Devices); diff != "" {
		t.Errorf("stored (-want +got):\n%s", diff)
	}
	for _, code := range []int{400, 413, 422} {
		s.Fail("update", 2, kubeapitest.Failure{Code: code, Message: "webhook"})
		devices.Store([]kubeapi.Device{gpu(0), gpu(code)})
		await(t, p, "after two refusals", func() bool {
			all := s.Slices()[0].Spec.Devices
			return len(all) == 2 && all[1].Name == gpu(code).Name && p.Published().Problem == ""
		})
	}
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
	held := kubeapi.Device{Name: "gpu-0-s1", Taints: []kubeapi.DeviceTaint{taint}, Held: true}
	healthy := kubeapi.Device{Name: "gpu-0-s2"}
	bare := func(d kubeapi.Device) kubeapi.Device { d.Taints, d.Held = nil, false; return d }
	kept := held
	kept.Held = false
	for name, c := range map[string]struct {
		shares, taints bool // gates
		want           []kubeapi.Device
	}{
		"1.37":           {true, true, []kubeapi.Device{shared}},
		"without shares": {false, true, []kubeapi.Device{share, kept, healthy}},
		"without both":   {false, false, []kubeapi.Device{bare(held), healthy}}, // new work must not get one that is unhealthy
	} {
		t.Run(name, func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRAConsumableCapacity, c.shares)
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRADeviceTaints, c.taints)
			s := kubeapitest.Start(t)
			s.Admit(admit)
			devices := watch.NewValue([]kubeapi.Device{shared})
			p := published(t, s, devices, func() { devices.Store([]kubeapi.Device{share, held, healthy}) })
			await(t, p, "at first", upToDate(p))
			if status := p.Published(); status.DropsShares == c.shares || status.DropsTaints == c.taints {
				t.Errorf("status %+v", status)
			}
			if diff := cmp.Diff(c.want, s.Slices()[0].Spec.Devices); diff != "" {
				t.Errorf("stored (-want +got):\n%s", diff)
			}
			if n := len(s.Writes()); n != 1 {
				t.Errorf("%d writes, want one: %+v", n, s.Writes())
			}
		})
	}
}
