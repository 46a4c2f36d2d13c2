//go:build !before1.37

package scheduling

import (
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
)

// classLister is the DeviceClasses of a cluster by name.
type classLister map[string]*resourceapi.DeviceClass

func (l classLister) List() (all []*resourceapi.DeviceClass, err error) {
	for _, c := range l {
		all = append(all, c)
	}
	return all, nil
}

func (l classLister) Get(name string) (*resourceapi.DeviceClass, error) {
	if c, ok := l[name]; ok {
		return c, nil
	}
	return nil, fmt.Errorf("no class %s", name)
}

// cluster is what the scheduler has of a cluster with one node.
type cluster struct {
	testing.TB
	classes   classLister
	slices    []*resourceapi.ResourceSlice
	allocated map[string][]resourceapi.DeviceRequestAllocationResult // by claim
	cache     *cel.Cache
	features  structured.Features
}

// newCluster returns a cluster whose gates have the defaults of this version.
func newCluster(t testing.TB, classes classLister, slices []*resourceapi.ResourceSlice) *cluster {
	t.Helper()
	gates := feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate)
	if !gates.EnableDRAConsumableCapacity || !gates.EnableDRADeviceTaints {
		t.Fatal("the gates are not those of 1.37")
	}
	return &cluster{
		TB: t, classes: classes, slices: slices, allocated: map[string][]resourceapi.DeviceRequestAllocationResult{},
		cache:    cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}),
		features: dynamicresources.AllocatorFeatures(gates),
	}
}

// state returns what claims have, as the scheduler computes it from their status.
func (c *cluster) state() structured.AllocatedState {
	s := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, results := range c.allocated {
		for _, r := range results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			switch {
			case r.AdminAccess != nil && *r.AdminAccess:
			case r.ShareID != nil:
				s.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
				if r.ConsumedCapacity != nil {
					s.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
				}
			default:
				s.AllocatedDevices.Insert(id)
			}
		}
	}
	return s
}

// allocate allocates a claim whose spec is YAML; nil if the node has nothing that fits. An error fails the pod on all nodes.
func (c *cluster) allocate(name, spec string) ([]resourceapi.DeviceRequestAllocationResult, error) {
	c.Helper()
	allocator, err := structured.NewAllocator(c.Context(), c.features, c.state(), c.classes, c.slices, c.cache)
	if err != nil {
		c.Fatal(err)
	}
	found, err := allocator.Allocate(c.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claimOf(c, spec)})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	c.allocated[name] = found[0].Devices.Results
	return found[0].Devices.Results, nil
}

// device returns a device of the slices.
func (c *cluster) device(name string) resourceapi.Device {
	c.Helper()
	for _, s := range c.slices {
		if i := slices.IndexFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == name }); i >= 0 {
			return s.Spec.Devices[i]
		}
	}
	c.Fatalf("no device %s", name)
	return resourceapi.Device{}
}

// text returns a text attribute of a device.
func (c *cluster) text(device, attribute string) string {
	c.Helper()
	return *c.device(device).Attributes[resourceapi.QualifiedName(attribute)].StringValue
}
