package chart

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
)

// clusterOf is a cluster with these objects, for the function lookup of templates.
type clusterOf struct {
	dynamic.NamespaceableResourceInterface
	list unstructured.UnstructuredList
}

func (c clusterOf) GetClientFor(_, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	var items []unstructured.Unstructured
	for _, o := range c.list.Items {
		if o.GetKind() == kind {
			items = append(items, o)
		}
	}
	c.list.Items = items
	return c, true, nil
}

func (c clusterOf) Namespace(string) dynamic.ResourceInterface { return c }

func (c clusterOf) List(context.Context, metav1.ListOptions) (*unstructured.UnstructuredList, error) {
	return &c.list, nil
}

func (c clusterOf) Get(context.Context, string, metav1.GetOptions, ...string) (*unstructured.Unstructured, error) {
	return &unstructured.Unstructured{Object: object{}}, nil
}

// The notes warn of the DaemonSets that register nvidia.com/gpu, too, and of no other.
func TestOtherPlugins(t *testing.T) {
	for name, c := range map[string]struct {
		warns                            bool
		release, space, container, image string
	}{
		"NVIDIA's chart":           {true, "nvdp", "nvidia", "nvidia-device-plugin-ctr", "registry.example.com/plugin:1"},
		"the GPU operator's":       {true, "", "gpu-operator", "nvidia-device-plugin", "nvcr.io/nvidia/k8s-device-plugin@sha256:1"},
		"GKE's":                    {true, "", "kube-system", "nvidia-gpu-device-plugin", "gke.gcr.io/nvidia-gpu-device-plugin:1"},
		"the manifest":             {true, "", "kube-system", "k8s-gpu", "ghcr.io/tandem-gpu/k8s-gpu:2.0.0"},
		"another release":          {true, "second", "kube-system", "k8s-gpu", "ghcr.io/tandem-gpu/k8s-gpu:2.0.0"},
		"another namespace":        {true, "tandem-k8s-gpu", "gpus", "k8s-gpu", "ghcr.io/tandem-gpu/k8s-gpu:2.0.0"},
		"this release":             {false, "tandem-k8s-gpu", "kube-system", "k8s-gpu", "ghcr.io/tandem-gpu/k8s-gpu:2.0.0"},
		"MPS daemon":               {false, "nvdp", "nvidia", "mps-control-daemon-ctr", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"},
		"gpu-feature-discovery":    {false, "", "gpu-operator", "gpu-feature-discovery", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"},
		"the operator's validator": {false, "", "gpu-operator", "nvidia-operator-validator", "nvcr.io/nvidia/gpu-operator:v25.10.0"},
	} {
		annotations := object{}
		if c.release != "" {
			annotations = object{"meta.helm.sh/release-name": c.release, "meta.helm.sh/release-namespace": c.space}
		}
		d := unstructured.Unstructured{Object: object{
			"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": object{"name": "other", "namespace": c.space, "annotations": annotations},
			"spec": object{"template": object{"spec": object{"containers": []any{object{"name": c.container, "image": c.image}}}}},
		}}
		files, err := renderWith(t, nil, clusterOf{list: unstructured.UnstructuredList{Items: []unstructured.Unstructured{d}}})
		if err != nil {
			t.Fatal(err)
		}
		notes := files["tandem-k8s-gpu/templates/NOTES.txt"]
		if warned := strings.Contains(notes, "DaemonSet other in namespace "+c.space); warned != c.warns || notes == "" {
			t.Errorf("%s: warned %t:\n%s", name, warned, notes)
		}
	}
}

// others is a cluster with the objects of a text.
func others(t *testing.T, text string) clusterOf {
	t.Helper()
	var c clusterOf
	for _, o := range documents(t, text) {
		c.list.Items = append(c.list.Items, unstructured.Unstructured{Object: o})
	}
	return c
}

const (
	draDriver = `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: dra, namespace: nvidia}, spec: {template: {spec: {containers: [
		{name: compute-domains, image: "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.5.0"}, {name: %s, image: "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.5.0"}]}}}}`
	otherPlugin = `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin, namespace: nvidia}, spec: {template: {spec: {containers: [
		{name: nvidia-device-plugin-ctr, image: "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"}]}}}}`
)

// With the API dra an installation is refused in a cluster that has something else that gives out GPUs, unless the operator declares that
// its nodes are others: on one node they would give a GPU to two pods.
func TestOtherDriversAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		values, cluster string
		refused, warns  string // "" = not
	}{
		"nothing else":                {`{api: dra}`, ``, "", ""},
		"NVIDIA's DRA driver":         {`{api: dra}`, fmt.Sprintf(draDriver, "gpus"), "api: dra: DaemonSet dra in namespace nvidia offers GPUs, too", ""},
		"its compute domains only":    {`{api: dra}`, fmt.Sprintf(draDriver, "init"), "", ""},
		"NVIDIA's plugin":             {`{api: dra}`, otherPlugin, "api: dra: DaemonSet plugin in namespace nvidia offers GPUs, too", ""},
		"in a pool":                   {`{pools: [{name: a, nodeSelector: {a: b}, api: dra}]}`, otherPlugin, "DaemonSet plugin", ""},
		"on other nodes":              {`{api: dra, gpuResourcesEnabledOverride: true}`, otherPlugin, "", "A device plugin is installed: DaemonSet plugin"},
		"NVIDIA's driver elsewhere":   {`{api: dra, gpuResourcesEnabledOverride: true}`, fmt.Sprintf(draDriver, "gpus"), "", "NVIDIA's DRA driver is installed: DaemonSet dra"},
		"beside this device plugin":   {`{}`, fmt.Sprintf(draDriver, "gpus"), "", "NVIDIA's DRA driver is installed: DaemonSet dra"},
		"without looking":             {`{api: dra, lookups: false}`, otherPlugin, "", ""},
		"another plugin, as before":   {`{}`, otherPlugin, "", "Another device plugin is installed"},
		"slices that NVIDIA's leaves": {`{api: dra}`, `{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: 7ab2-gpu.nvidia.com-n1-xk2z}, spec: {driver: gpu.nvidia.com, nodeName: n1}}`, "", "1 nodes have ResourceSlices of another driver gpu.nvidia.com (n1)"},
		"slices of the agents":        {`{api: dra}`, `{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: n1-gpu.nvidia.com-0}, spec: {driver: gpu.nvidia.com, nodeName: n1}}`, "", ""},
		"two classes of a name":       {`{api: dra}`, `{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: mine}, spec: {extendedResourceName: nvidia.com/gpu}}`, "", "DeviceClass mine has the extended resource nvidia.com/gpu, too"},
		"the class of this release":   {`{api: dra}`, `{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: gpu.nvidia.com}, spec: {extendedResourceName: nvidia.com/gpu}}`, "", ""},
	} {
		files, err := renderWith(t, parse(t, c.values), others(t, c.cluster))
		if c.refused != "" {
			if err == nil || !oneLine(err, []string{c.refused, "gpuResourcesEnabledOverride"}) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		notes := files["tandem-k8s-gpu/templates/NOTES.txt"]
		if strings.Contains(notes, "WARNING") != (c.warns != "") || !strings.Contains(notes, c.warns) {
			t.Errorf("%s: want %q in\n%s", name, c.warns, notes)
		}
	}
}

// A value of NVIDIA's chart that is accepted and has no effect is named in the notes, in the place where it was given.
func TestNotesOfValuesWithoutEffect(t *testing.T) {
	for text, want := range map[string]string{
		`{gfd: {enabled: true, sleepInterval: 30s}}`:   "Note: gfd.sleepInterval has no effect",
		`{gfd: {enabled: true}, sleepInterval: 30}`:    "Note: sleepInterval has no effect",
		`{gfd: {enabled: true, sleepInterval: null}}`:  "",
		`{gfd: {enabled: false}, sleepInterval: 1h0m}`: "",
		`{failOnInitError: true}`:                      "Note: failOnInitError has no effect",
	} {
		notes := notesOn(t, "v1.37.1", text)
		if got := strings.Contains(notes, "has no effect"); got != (want != "") || !strings.Contains(notes, want) {
			t.Errorf("%s: want %q in\n%s", text, want, notes)
		}
	}
}

// The notes of the API dra have what it takes on this version of Kubernetes, and how to see what the nodes offer.
func TestNotesOfDRA(t *testing.T) {
	files, err := renderWith(t, parse(t, `{api: dra, onUnhealthy: evict, admissionPolicy: false}`), clusterOf{})
	if err != nil {
		t.Fatal(err)
	}
	notes := files["tandem-k8s-gpu/templates/NOTES.txt"]
	for _, want := range []string{"by Dynamic Resource Allocation", "kubectl get resourceslices", "onUnhealthy: evict", "admissionPolicy: false", "CDI"} {
		if !strings.Contains(notes, want) {
			t.Errorf("no %q in\n%s", want, notes)
		}
	}
	if strings.Contains(notes, "status.allocatable") {
		t.Errorf("a node has no allocatable GPUs by DRA:\n%s", notes)
	}
	for version, warns := range map[string]bool{"v1.34.2": true, "v1.35.2-eks-1": true, "v1.36.0": false, "v1.37.1": false} {
		if notes := notesOn(t, version, `{api: dra}`); strings.Contains(notes, "DRADeviceTaints") != warns {
			t.Errorf("%s:\n%s", version, notes)
		}
		if notes := notesOn(t, version, `{}`); strings.Contains(notes, "DRA") {
			t.Errorf("%s, device plugin:\n%s", version, notes)
		}
	}
}
