//go:build !before1.37

package scheduling

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
)

// shippedPolicy is the API server's own admission plugin with the policy and the binding of deploy/dra.
func shippedPolicy(t *testing.T) *validating.Plugin {
	t.Helper()
	text, err := os.ReadFile("../../../../deploy/dra/admission.yaml")
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(string(text), "\n---\n")
	policy, binding := &v1.ValidatingAdmissionPolicy{}, &v1.ValidatingAdmissionPolicyBinding{}
	if err := errors.Join(yaml.UnmarshalStrict([]byte(documents[0]), policy), yaml.UnmarshalStrict([]byte(documents[1]), binding)); err != nil {
		t.Fatal(err)
	}
	all, everything := v1.Equivalent, &metav1.LabelSelector{} // the API server's defaults
	policy.Spec.MatchConstraints.MatchPolicy = &all
	policy.Spec.MatchConstraints.NamespaceSelector, policy.Spec.MatchConstraints.ObjectSelector = everything, everything
	client := fake.NewClientset(policy, binding)
	factory := informers.NewSharedInformerFactory(client, time.Hour)
	p, err := validating.NewPlugin(nil)
	if err != nil {
		t.Fatal(err)
	}
	p.SetExternalKubeInformerFactory(factory)
	p.SetExternalKubeClientSet(client)
	p.SetDynamicClient(dynamicfake.NewSimpleDynamicClient(scheme.Scheme))
	p.SetRESTMapper(meta.NewDefaultRESTMapper(nil))
	p.SetUnconditionalAuthorizer(authorizerfactory.NewAlwaysAllowAuthorizer())
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	p.SetDrainedNotification(stop)
	if err := p.ValidateInitialization(); err != nil {
		t.Fatal(err)
	}
	factory.Start(stop)
	factory.WaitForCacheSync(stop)
	return p
}

// A token writes the slices of the node that it is bound to: no other node's, no other pool's, and none under a name that another node's agent
// can want, however the names of nodes begin.
func TestAdmissionPolicy(t *testing.T) {
	p := shippedPolicy(t)
	slice := func(node, name string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{
			Driver: devices.Driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
		}}
	}
	pool := slice("a", "a-gpu.nvidia.com-0")
	pool.Spec.Pool.Name = "b"
	long := strings.Repeat("n", 240)
	none := (*resourceapi.ResourceSlice)(nil)
	for _, c := range []struct {
		node          string // of the token
		account       string
		object, old   *resourceapi.ResourceSlice
		want, message string
	}{
		{"a", "", slice("a", "a-gpu.nvidia.com-0"), none, "allowed", ""},
		{"a", "", slice("a", "a-gpu.nvidia.com-24"), none, "allowed", ""},
		{"a", "", slice("a", "a-gpu.nvidia.com-0-x7abcdef"), none, "allowed", ""},
		{"a", "", slice("a", "a-gpu.nvidia.com-0-dryrun"), none, "allowed", ""},
		{"a", "", slice("a", "a-gpu.nvidia.com-0-doctor"), none, "allowed", ""},
		{"a.b-c", "", slice("a.b-c", "a.b-c-gpu.nvidia.com-0"), none, "allowed", ""},
		{long, "", slice(long, "0123456789abcdef0123456789abcdef-gpu.nvidia.com-0"), none, "allowed", ""},
		{"a", "", slice("a", "a-gpu.nvidia.com-0"), slice("a", "a-gpu.nvidia.com-0"), "allowed", ""},
		{"a", "", none, slice("a", "a-gpu.nvidia.com-0"), "allowed", ""},
		{"a", "", none, slice("a", "0123-gpu.nvidia.com-a-abcde"), "allowed", ""}, // left by NVIDIA's driver

		{"a", "", slice("a", "b-gpu.nvidia.com-0"), none, "denied", "the names of slices of node a are a-gpu.nvidia.com-0"},
		{"a", "", slice("a", "a-gpu.nvidia.com-x-gpu.nvidia.com-0"), none, "denied", "names"}, // of node a-gpu.nvidia.com-x
		{"a-gpu.nvidia.com-0", "", slice("a-gpu.nvidia.com-0", "a-gpu.nvidia.com-0"), none, "denied", "names"},
		{"axb", "", slice("axb", "a.b-gpu.nvidia.com-0"), none, "denied", "names"},
		{"a", "", slice("a", "a-gpu.nvidia.com-"), none, "denied", "names"},
		{"a", "", slice("a", "x"), none, "denied", "names"},
		{"a", "", slice("b", "b-gpu.nvidia.com-0"), none, "denied", "its own node only"},
		{"a", "", pool, none, "denied", "the pool of node a has its name"},
		{"a", "", slice("b", "b-gpu.nvidia.com-0"), slice("b", "b-gpu.nvidia.com-0"), "denied", "its own node only"},
		{"a", "", none, slice("b", "b-gpu.nvidia.com-0"), "denied", "its own node only"},
		{"", "", slice("a", "a-gpu.nvidia.com-0"), none, "denied", "not bound to a node"},
		{"a", "gpus:prod-tandem-k8s-gpu", slice("a", "b-gpu.nvidia.com-0"), none, "denied", "names"},
		{"a", "gpus:tandem-k8s-gpu-b", slice("a", "b-gpu.nvidia.com-0"), none, "denied", "names"},

		{"a", "kube-system:another", slice("a", "b-gpu.nvidia.com-0"), none, "allowed", ""}, // not an agent
	} {
		if c.account == "" {
			c.account = "kube-system:tandem-k8s-gpu"
		}
		err := admit(p, c.node, c.account, c.object, c.old)
		if got := map[bool]string{true: "allowed", false: "denied"}[err == nil]; got != c.want || err != nil && !strings.Contains(err.Error(), c.message) {
			name := func(s *resourceapi.ResourceSlice) string {
				if s == nil {
					return "-"
				}
				return s.Name
			}
			t.Errorf("token of node %q and %s, %s after %s: %s, want %s: %v", c.node, c.account, name(c.object), name(c.old), got, c.want, err)
		}
	}
}

// admit asks the plugin about the write of an object with a token of an account on a node; without an object it is a delete.
func admit(p *validating.Plugin, node, account string, object, old *resourceapi.ResourceSlice) error {
	who := &user.DefaultInfo{Name: "system:serviceaccount:" + account}
	if node != "" {
		who.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	operation := admission.Create
	var is, was runtime.Object
	name := ""
	if old != nil {
		operation, was, name = admission.Update, old, old.Name
	}
	if object == nil {
		operation = admission.Delete
	} else {
		is, name = object, object.Name
	}
	group := schema.GroupVersion{Group: "resource.k8s.io", Version: "v1"}
	attributes := admission.NewAttributesRecord(is, was, group.WithKind("ResourceSlice"), "", name, group.WithResource("resourceslices"), "", operation, nil, false, who)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return p.Validate(ctx, attributes, admission.NewObjectInterfacesFromScheme(scheme.Scheme))
}
