//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// access has the agent of a node call the API server with the account of deploy/dra, and with that of the chart in another namespace: what it needs
// is allowed, and the slices of other nodes and drivers are not its own. test/conformance/dra has the whole table of the policy, and cmd/k8s-gpu
// that "k8s-gpu classes" prints it.
func (c *chartCluster) access(t *testing.T) {
	must(t, "kubectl", "create", "-f", write(t, "node.yaml", []byte("{apiVersion: v1, kind: Node, metadata: {name: a}}")))
	must(t, "kubectl", "create", "-f", write(t, "claim.yaml", []byte(`{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: work, namespace: default},
		spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}`)))
	for _, file := range []string{"access", "admission", "classes"} {
		must(t, "kubectl", "apply", "-f", "../../deploy/dra/"+file+".yaml")
	}
	t.Run("manifest", func(t *testing.T) { (account{"kube-system", "tandem-k8s-gpu"}).check(t) })
	must(t, "kubectl", "delete", "-f", "../../deploy/dra/access.yaml", "-f", "../../deploy/dra/admission.yaml", "-f", "../../deploy/dra/classes.yaml")
	must(t, "kubectl", "create", "namespace", "gpus")
	must(t, "helm", "install", "gpus", chartFolder, "-n", "gpus", "--set", "api=dra,serviceAccount.create=true,serviceAccount.name=gpu-agent")
	t.Run("chart", func(t *testing.T) { (account{"gpus", "gpu-agent"}).check(t) })
	must(t, "helm", "uninstall", "gpus", "-n", "gpus", "--wait")
	must(t, "kubectl", "delete", "node", "a")
	must(t, "kubectl", "delete", "resourceclaim", "work")
}

// account is that of the agents: the tests have tokens of it.
type account struct{ namespace, name string }

// client is that of an agent whose pod is on this node; "" = a token that is bound to nothing.
func (a account) client(t *testing.T, node string) *kubeapi.Client {
	t.Helper()
	argv := []string{"kubectl", "create", "token", a.name, "-n", a.namespace}
	if node != "" {
		argv = append(argv, "--bound-object-kind=Node", "--bound-object-name="+node)
	}
	return a.clientWith(t, must(t, argv...))
}

// oldClient has the token of a Secret, of the kind that service accounts had before tokens were bound.
func (a account) oldClient(t *testing.T) *kubeapi.Client {
	t.Helper()
	must(t, "kubectl", "create", "-f", write(t, "secret.yaml", fmt.Appendf(nil, `{apiVersion: v1, kind: Secret, type: kubernetes.io/service-account-token,
		metadata: {name: old-token, namespace: %s, annotations: {kubernetes.io/service-account.name: %s}}}`, a.namespace, a.name)))
	var token string
	await(t, "the token of a Secret", 60*time.Second, func() error {
		text, err := command("kubectl", "get", "secret", "old-token", "-n", a.namespace, "-o", "go-template={{.data.token | base64decode}}")
		if token = text; err == nil && len(token) < 100 {
			err = errors.New("it is empty")
		}
		return err
	})
	return a.clientWith(t, token)
}

func (a account) clientWith(t *testing.T, token string) *kubeapi.Client {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := kubeapi.New(kubeapi.Options{Address: kubeAPI, TokenFile: file, CAFile: filepath.Join(stateDir(), "pki/apiserver.crt"), Agent: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// slice is one that the agent of the node makes.
func slice(node string) kubeapi.ResourceSlice {
	return kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{Name: node + "-gpu.nvidia.com-0"},
		Spec: kubeapi.ResourceSliceSpec{
			Driver: resourceslice.Driver, NodeName: node, Pool: kubeapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
			Devices: []kubeapi.Device{{Name: "gpu-0"}},
		},
	}
}

func (a account) check(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // what is waited for below takes 90 s at most, and what follows some
	defer cancel()
	mine, unbound, old := a.client(t, "a"), a.client(t, ""), a.oldClient(t)
	foreign := slice("a")
	foreign.Metadata.Name, foreign.Spec.Driver = "foreign", "gpu.example.com"
	everywhere := slice("a")
	everywhere.Spec.NodeName = ""

	// A policy that was just made is not in force at once, nor are the rights of the account, without which any slice is forbidden.
	const ownNodeOnly = "the agent of node a writes slices of its own node only"
	await(t, "the policy", 30*time.Second, func() error {
		if _, err := mine.CreateSlice(ctx, slice("b"), kubeapi.DryRun); !errors.Is(err, kubeapi.ErrForbidden) || !strings.Contains(err.Error(), ownNodeOnly) {
			return fmt.Errorf("a slice of another node: %w", err)
		}
		return nil
	})
	stored := a.needed(t, ctx, mine)
	must(t, "kubectl", "create", "-f", write(t, "foreign.yaml", []byte(`{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: foreign},
		spec: {driver: gpu.example.com, nodeName: a, pool: {name: a, generation: 1, resourceSliceCount: 1}}}`)))
	for what, call := range map[string]struct {
		does func() error
		text string
	}{
		"create for another node":       {func() error { _, err := mine.CreateSlice(ctx, slice("b"), kubeapi.DryRun); return err }, ownNodeOnly},
		"create for another driver":     {func() error { _, err := mine.CreateSlice(ctx, foreign, kubeapi.DryRun); return err }, "the driver gpu.nvidia.com only"},
		"create for no node":            {func() error { _, err := mine.CreateSlice(ctx, everywhere, kubeapi.DryRun); return err }, ""},
		"delete of another driver's":    {func() error { return mine.DeleteSlice(ctx, "foreign", "") }, "the driver gpu.nvidia.com only"},
		"create by a token of no node":  {func() error { _, err := unbound.CreateSlice(ctx, slice("a"), kubeapi.DryRun); return err }, "not bound to a node"},
		"create by a token of a Secret": {func() error { _, err := old.CreateSlice(ctx, slice("a"), kubeapi.DryRun); return err }, "not bound to a node"},
	} {
		err := call.does()
		refused := errors.Is(err, kubeapi.ErrForbidden) || call.text == "" && errors.Is(err, kubeapi.ErrInvalid)
		if !refused || !strings.Contains(err.Error(), call.text) {
			t.Errorf("%s: %v; want %q", what, err, call.text)
		}
	}
	a.notAllowed(t)
	if err := mine.DeleteSlice(ctx, stored.Metadata.Name, stored.Metadata.UID); err != nil {
		t.Errorf("delete of its own: %v", err)
	}
	must(t, "kubectl", "delete", "resourceslices", "--all")
}

// needed does all that the agent of node a does, and returns its slice.
func (a account) needed(t *testing.T, ctx context.Context, mine *kubeapi.Client) kubeapi.ResourceSlice {
	t.Helper()
	node, err := mine.Node(ctx, "a")
	if err != nil || node.Metadata.UID == "" {
		t.Fatal(node, err)
	}
	if claim, err := mine.Claim(ctx, "default", "work"); err != nil || claim.Metadata.Name != "work" {
		t.Fatal(claim, err)
	}
	selector := kubeapi.SliceSelector{Node: "a", Driver: resourceslice.Driver}
	list, err := mine.Slices(ctx, selector)
	if err != nil || len(list.Items) > 0 {
		t.Fatal(list, err)
	}
	stored, err := mine.CreateSlice(ctx, slice("a"), kubeapi.Store)
	if err != nil {
		t.Fatal(err)
	}
	for event, err := range mine.WatchSlices(ctx, selector, list.Metadata.ResourceVersion) {
		if event.Type == kubeapi.Opened {
			continue
		}
		if err != nil || event.Type != kubeapi.Added || event.Slice.Metadata.UID != stored.Metadata.UID {
			t.Fatal(event, err)
		}
		break
	}
	stored.Spec.Devices = append(stored.Spec.Devices, kubeapi.Device{Name: "gpu-1"})
	if stored, err = mine.UpdateSlice(ctx, stored, kubeapi.Store); err != nil || len(stored.Spec.Devices) != 2 {
		t.Fatal(stored, err)
	}
	if again, err := mine.Slice(ctx, stored.Metadata.Name); err != nil || again.Metadata.UID != stored.Metadata.UID {
		t.Fatal(again, err)
	}
	return stored
}

// notAllowed are rights that drivers often have, and this one does not need.
func (a account) notAllowed(t *testing.T) {
	t.Helper()
	as := "--as=system:serviceaccount:" + a.namespace + ":" + a.name
	for _, right := range []string{
		"deletecollection resourceslices", "patch resourceslices", "list resourceclaims", "update resourceclaims", "patch resourceclaims/status",
		"list nodes", "patch nodes", "list pods", "get secrets", "create deployments", "create events", "get configmaps", "create deviceclasses",
	} {
		verb, resource, _ := strings.Cut(right, " ")
		if out, err := command("kubectl", "auth", "can-i", verb, resource, as, "-A"); err == nil || strings.Contains(out, "yes") {
			t.Errorf("the account may %s: %s", right, out)
		}
	}
}

// claims has the API server take the examples of deploy/dra, and claims as NVIDIA's examples have them, unchanged.
func (c *chartCluster) claims(t *testing.T) {
	await(t, "the default service account, before which pods are refused", 60*time.Second, func() error {
		return try("kubectl", "get", "serviceaccount", "default")
	})
	nvidia := write(t, "nvidia-claims.yaml", []byte(nvidiaClaims))
	for _, files := range []string{"../../deploy/dra/examples", nvidia} {
		applied := must(t, "kubectl", "apply", "--server-side", "--validate=strict", "-f", files)
		t.Logf("%s: %d objects", files, strings.Count(applied, "serverside-applied"))
		must(t, "kubectl", "delete", "-f", files, "--wait=false")
	}
}

// nvidiaClaims are the requests of the examples of NVIDIA's DRA driver (demo/specs/quickstart, consumable-shares, extended-resources of
// kubernetes-sigs/dra-driver-nvidia-gpu): single GPU, one GPU for two containers, a claim for two pods, MIG instances of one GPU, parameters
// for time-slicing and MPS, several GPUs, shares, and a class of a MIG profile.
const nvidiaClaims = `
{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: nvidia-single}, spec: {spec: {devices: {
  requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: nvidia-two-containers}, spec: {
  containers: [{name: ctr0, image: "ubuntu:22.04", resources: {claims: [{name: shared-gpu}]}}, {name: ctr1, image: "ubuntu:22.04", resources: {claims: [{name: shared-gpu}]}}],
  resourceClaims: [{name: shared-gpu, resourceClaimTemplateName: nvidia-single}],
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: nvidia-global}, spec: {devices: {
  requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: nvidia-one-of-two}, spec: {
  containers: [{name: ctr, image: "ubuntu:22.04", resources: {claims: [{name: shared-gpu}]}}],
  resourceClaims: [{name: shared-gpu, resourceClaimName: nvidia-global}]}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: nvidia-mig}, spec: {spec: {devices: {
  requests: [
    {name: mig-1g-5gb-0, exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.5gb'"}}]}},
    {name: mig-3g-20gb, exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '3g.20gb'"}}]}}],
  constraints: [{requests: [], matchAttribute: gpu.nvidia.com/parentUUID}]}}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: nvidia-parameters}, spec: {spec: {devices: {
  requests: [{name: ts-gpu, exactly: {deviceClassName: gpu.nvidia.com}}, {name: mps-gpu, exactly: {deviceClassName: gpu.nvidia.com}}],
  config: [
    {requests: [ts-gpu], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
      sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}}},
    {requests: [mps-gpu], opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
      sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50, defaultPinnedDeviceMemoryLimit: 10Gi}}}}}]}}}}
---
{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: nvidia-count-and-memory}, spec: {spec: {devices: {
  requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: 2}},
    {name: share, exactly: {deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 10Gi}}}}]}}}}
---
{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: mig-1g-12gb.gpu.nvidia.com}, spec: {extendedResourceName: nvidia.com/gpu, selectors: [{cel: {expression:
  "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig' && device.attributes['gpu.nvidia.com'].profile == '1g.12gb'"}}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: nvidia-extended}, spec: {containers: [{name: cuda, image: "ubuntu:22.04", resources: {limits: {nvidia.com/gpu: "1"}}}]}}
`
