//go:build !before1.37

package scheduling

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	_ "k8s.io/kubernetes/pkg/apis/resource/install" // its types in legacyscheme
	"k8s.io/kubernetes/pkg/registry/resource/deviceclass"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaim"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	classes "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceclass"
	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const node = "node1"

// strict decodes as the API server does for a client that asks for strict validation: an unknown field is an error.
var strict = serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDecoder()

// create is what the API server does with a new object: it decodes and defaults it, drops the fields of gates that are off, and
// validates it. It returns the object as a client reads it.
func create[T runtime.Object](t testing.TB, strategy rest.RESTCreateStrategy, text []byte, read T) (T, error) {
	t.Helper()
	object, _, err := strict.Decode(text, nil, nil)
	if err != nil {
		return read, err
	}
	meta := object.(metav1.ObjectMetaAccessor).GetObjectMeta()
	meta.SetUID(types.UID("uid-of-" + meta.GetName()))
	meta.SetCreationTimestamp(metav1.Now())
	ctx := genericapirequest.WithRequestInfo(genericapirequest.WithNamespace(t.Context(), meta.GetNamespace()),
		&genericapirequest.RequestInfo{IsResourceRequest: true, Verb: "create", APIGroup: "resource.k8s.io", APIVersion: "v1"})
	if err := rest.BeforeCreate(strategy, ctx, object); err != nil {
		return read, err
	}
	return read, legacyscheme.Scheme.Convert(object, read, nil)
}

// publish returns the slices of a node as the API server has them. It fails the test if one is refused, or differs from what was sent.
func publish(t testing.TB, all []kubeapi.Device) []*resourceapi.ResourceSlice {
	t.Helper()
	chunks := devices.Chunk(devices.Stamp(all, nil, time.Now()))
	var stored []*resourceapi.ResourceSlice
	for i, chunk := range chunks {
		sent := kubeapi.ResourceSlice{
			APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice", Metadata: kubeapi.ObjectMeta{Name: fmt.Sprintf("%s-gpu.nvidia.com-%d", node, i)},
			Spec: kubeapi.ResourceSliceSpec{
				Driver: devices.Driver, NodeName: node, Devices: chunk,
				Pool: kubeapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(chunks))},
			},
		}
		text, err := json.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		one, err := create(t, resourceslice.Strategy, text, &resourceapi.ResourceSlice{})
		if err != nil {
			t.Fatal("the API server refuses a slice:", err)
		}
		if text, err = json.Marshal(one); err != nil {
			t.Fatal(err)
		}
		var back kubeapi.ResourceSlice
		if err := json.Unmarshal(text, &back); err != nil {
			t.Fatal(err)
		}
		notSent := cmpopts.IgnoreFields(kubeapi.Device{}, "Held")
		if diff := gocmp.Diff(sent.Spec, back.Spec, notSent); diff != "" {
			t.Fatal("what is read back differs, so that each comparison would result in a write:", diff)
		}
		stored = append(stored, one)
	}
	return stored
}

// printedClasses returns the classes that "k8s-gpu classes" prints for configurations, as the API server has them, by name.
func printedClasses(t testing.TB, all ...core.Config) classLister {
	t.Helper()
	var of []classes.Configuration
	for _, c := range all {
		of = append(of, classes.Configuration{MIG: c.MIG, Policy: c.Policy})
	}
	found, err := classes.Of(of, classes.Options{Profiles: []string{"1g.10gb", "3g.40gb"}, ExtendedResources: true})
	if err != nil {
		t.Fatal(err)
	}
	text, err := classes.Print(found)
	if err != nil {
		t.Fatal(err)
	}
	lister := classLister{}
	documents := yaml.NewYAMLToJSONDecoder(bytes.NewReader(text))
	for {
		var one json.RawMessage
		if err := documents.Decode(&one); errors.Is(err, io.EOF) {
			return lister
		} else if err != nil {
			t.Fatal(err)
		}
		if len(one) == 0 || string(one) == "null" { // the comment at the beginning
			continue
		}
		class, err := create(t, deviceclass.Strategy, one, &resourceapi.DeviceClass{})
		if err != nil {
			t.Fatal("the API server refuses a class:", err)
		}
		lister[class.Name] = class
	}
}

// adminNamespaces has the claims' namespace, with the label that allows admin access.
var adminNamespaces = fake.NewClientset(&v1.Namespace{
	ObjectMeta: metav1.ObjectMeta{Name: "default", Labels: map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"}},
})

// claimOf returns a claim as the API server has it. spec is the YAML of its spec.
func claimOf(t testing.TB, spec string) *resourceapi.ResourceClaim {
	t.Helper()
	text, err := yaml.ToJSON([]byte("apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: claim, namespace: default}\nspec:\n" + indent(spec)))
	if err != nil {
		t.Fatal(err)
	}
	claim, err := create(t, resourceclaim.NewStrategy(adminNamespaces.CoreV1().Namespaces(), nil), text, &resourceapi.ResourceClaim{})
	if err != nil {
		t.Fatal(err)
	}
	return claim
}

func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.Trim(text, "\n"), "\n", "\n  ") + "\n"
}

// config returns a configuration of the API dra.
func config(rules ...inventory.Rule) core.Config {
	c := core.DefaultConfig()
	c.API, c.MIG, c.Policy.Rules = inventory.DRA, inventory.MIGMixed, rules
	return c
}

// rule returns a rule for some GPUs of coretest.
func rule(r inventory.Rule, gpus ...int) inventory.Rule {
	for _, n := range gpus {
		r.Select.IDs = append(r.Select.IDs, coretest.GPU(n))
	}
	return r
}

func timeSlicing(n int) *inventory.Sharing {
	return &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}
}

// limited returns a configuration of shares of full GPUs whose memory the driver limits; memory 0 = equal parts.
func limited(replicas int, memory uint64, overcommit bool) core.Config {
	sharing := timeSlicing(replicas)
	sharing.Memory, sharing.Limit = memory, inventory.LimitRequired
	c := config(inventory.Rule{Select: inventory.Selector{Full: true}, Sharing: sharing})
	c.Policy.Limits = inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve, Overcommit: overcommit}
	return c
}

// build returns the devices of a machine.
func build(s gpu.Snapshot, c core.Config, l health.Ledger) []kubeapi.Device {
	return devices.Devices(devices.Input{Allocatable: core.Build(s, l, c).WithoutHost()})
}

// testStart is the time of the faults.
var testStart = time.Date(2026, time.November, 20, 10, 31, 0, 0, time.UTC)
