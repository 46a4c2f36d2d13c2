package kubelet

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/test/check"
)

const classesPath = "/apis/resource.k8s.io/v1/deviceclasses"

// cluster is an API server with a Node, and with the class of NVIDIA's driver.
type cluster struct {
	*kubeapitest.Server
	node    kubeapi.Node
	classes []kubeapi.DeviceClass // nil = they must not be read
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{Server: kubeapitest.Start(t)}
	c.classes = []kubeapi.DeviceClass{{Metadata: kubeapi.ObjectMeta{Name: "gpu.nvidia.com"}, Spec: kubeapi.DeviceClassSpec{ExtendedResourceName: "nvidia.com/gpu"}}}
	c.node.Metadata.Name = "node-1"
	c.node.Status.NodeInfo = kubeapi.NodeSystemInfo{ContainerRuntimeVersion: "containerd://2.4.2", KubeletVersion: "v1.37.1"}
	c.node.Status.Allocatable = map[string]string{"nvidia.com/gpu": "0"}
	return c
}

// check is what doctor finds.
func (c *cluster) check(t *testing.T, name string) []doctor.Finding {
	t.Helper()
	c.PutNode(c.node)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != classesPath:
			c.ServeHTTP(w, r)
		case c.classes == nil:
			w.WriteHeader(http.StatusForbidden)
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"items": c.classes})
		}
	}))
	defer api.Close()
	o := DRA{Node: name, Driver: "gpu.nvidia.com", Slices: "node-1-gpu.nvidia.com-", CDIDir: "/var/run/cdi", API: kubeapi.Options{Address: api.URL}, Names: []string{"nvidia.com/gpu"}}
	return o.api(t.Context(), new(doctor.Facts))
}

// Each reason for which no pod gets a GPU by DRA is found at Kubernetes' API, with a remedy.
func TestDRAAtTheAPI(t *testing.T) {
	leftover := kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{Name: "00d4-gpu.nvidia.com-node-1-x7f2p"},
		Spec:     kubeapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", NodeName: "node-1", Pool: kubeapi.ResourcePool{Name: "node-1", ResourceSliceCount: 1}},
	}
	for name, c := range map[string]struct {
		change   func(*cluster)
		severity doctor.Severity
		text     string
	}{
		"all is well":         {func(*cluster) {}, doctor.OK, "Node node-1, slices can be written"},
		"agent's own token":   {func(c *cluster) { c.classes = nil }, doctor.OK, "slices can be written"},
		"no answer":           {func(c *cluster) { c.Fail("get", -1, kubeapitest.Failure{}) }, doctor.Problem, "no answer: get nodes node-1"},
		"Node not readable":   {func(c *cluster) { c.Deny("get", "nodes") }, doctor.Problem, `the agent's ClusterRole needs the rule {apiGroups: [""], resources: ["nodes"], verbs: ["get"]}`},
		"slices not writable": {func(c *cluster) { c.Deny("create", "resourceslices") }, doctor.Problem, "can't write ResourceSlices"},
		"slices not readable": {func(c *cluster) { c.Deny("list", "resourceslices") }, doctor.Problem, `verbs: ["list"]`},
		"old kubelet":         {func(c *cluster) { c.node.Status.NodeInfo.KubeletVersion = "v1.33.4+k3s1" }, doctor.Problem, "the kubelet is v1.33.4+k3s1: resource.k8s.io/v1 needs Kubernetes 1.34"},
		"runtime without CDI": {func(c *cluster) { c.node.Status.NodeInfo.ContainerRuntimeVersion = "containerd://1.6.20" }, doctor.Problem, "containers would get no GPU: containerd 1.6.20 has no CDI"},
		"no class":            {func(c *cluster) { c.classes = []kubeapi.DeviceClass{} }, doctor.Problem, "the DeviceClass does not exist"},
		"a name of both APIs": {func(c *cluster) { c.node.Status.Allocatable["nvidia.com/gpu"] = "2" }, doctor.Problem, "a device plugin offers 2 of nvidia.com/gpu, which DeviceClass gpu.nvidia.com maps, too"},
		"the same, own token": {func(c *cluster) { c.classes, c.node.Status.Allocatable["nvidia.com/gpu"] = nil, "2" }, doctor.Problem, "a device plugin offers 2 of nvidia.com/gpu"},
		"leftover slices": {func(c *cluster) {
			client, _ := kubeapi.New(kubeapi.Options{Address: c.URL})
			_, _ = client.CreateSlice(t.Context(), leftover, kubeapi.Store)
		}, doctor.Warning, "another DRA driver of this name has published devices"},
	} {
		cluster := newCluster(t)
		c.change(cluster)
		expect(t, name, cluster.check(t, "node-1"), c.severity, c.text)
	}
	expect(t, "wrong name of the Node", newCluster(t).check(t, "node-2"), doctor.Problem, `there is no Node "node-2"`)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	expect(t, "not in a pod", DRA{}.api(t.Context(), new(doctor.Facts)), doctor.Problem, "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
}

// On the node it finds the kubelet's folder, the agent's sockets and another driver of the same name.
func TestDRAOnTheNode(t *testing.T) {
	dir := t.TempDir()
	o := DRA{KubeletDir: dir, Driver: "gpu.nvidia.com", Sockets: "gpu.nvidia.com-tandem-"}
	running := &doctor.Facts{Agent: doctor.Agent{Running: true}}
	expect(t, "no folder", o.registration(t.Context(), running), doctor.Problem, "folder for the registration of drivers does not exist")
	folder := filepath.Join(dir, "plugins_registry")
	check.NoError(t, os.Mkdir(folder, 0o750))
	expect(t, "no socket, no agent", o.registration(t.Context(), new(doctor.Facts)), doctor.OK, "0 sockets")
	expect(t, "no socket", o.registration(t.Context(), running), doctor.Warning, "has no socket of the driver gpu.nvidia.com")
	serve := func(name string) {
		t.Chdir(folder) // a path of a socket is short
		l, err := net.Listen("unix", name)
		check.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
	}
	serve("gpu.nvidia.com-tandem-00000001-reg.sock")
	serve("other.example.com-reg.sock")
	o.KubeletDir = ".."
	expect(t, "the agent's", o.registration(t.Context(), running), doctor.OK, "1 socket of this agent")
	serve("gpu.nvidia.com-reg.sock")
	findings := o.registration(t.Context(), running)
	expect(t, "another driver", findings, doctor.Problem, "another DRA driver gpu.nvidia.com is registered on this node")
	if !strings.HasSuffix(findings[0].Place, "gpu.nvidia.com-reg.sock") {
		t.Errorf("%+v", findings)
	}
}

// What the labels of the Node need: without it a change of the configuration by a label has no effect.
func TestRightsForNodeLabels(t *testing.T) {
	for name, c := range map[string]struct {
		node     string
		change   func(*cluster)
		severity doctor.Severity
		text     string
	}{
		"all is well":   {"node-1", func(*cluster) {}, doctor.OK, "Node node-1 can be read and watched"},
		"no get":        {"node-1", func(c *cluster) { c.Deny("get", "nodes") }, doctor.Problem, `a change of the label a/b or c/d has no effect: `},
		"no watch":      {"node-1", func(c *cluster) { c.Deny("watch", "nodes") }, doctor.Problem, `needs the rule {apiGroups: [""], resources: ["nodes"], verbs: ["watch"]}`},
		"another name":  {"node-2", func(*cluster) {}, doctor.Problem, `there is no Node "node-2"`},
		"no API server": {"node-1", func(c *cluster) { c.Fail("get", -1, kubeapitest.Failure{}) }, doctor.Problem, "no answer: get nodes node-1"},
	} {
		cluster := newCluster(t)
		cluster.PutNode(cluster.node)
		c.change(cluster)
		o := NodeLabels{Node: c.node, Labels: []string{"a/b", "c/d"}, API: kubeapi.Options{Address: cluster.URL}}
		expect(t, name, o.look(t.Context(), new(doctor.Facts)), c.severity, c.text)
	}
}
