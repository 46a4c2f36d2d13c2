//go:build e2e

package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	gpuResource = "nvidia.com/gpu"
	kubeAPI     = "https://" + firstAddress + ":6443"
)

// cluster is a whole Kubernetes. Most have one node: what is done to a cluster is done to its first node.
type cluster struct {
	*kubeNode
	nodes  []*kubeNode
	images []string // archives that each node has
	api    *process
	serve  func() *process // starts the API server

	controllers func() []*process // starts the controller manager and the scheduler
	control     []*process
}

// runtime is a version of containerd.
type runtime struct {
	folder string // of its programs, with a slash at the end; "" = they are found in PATH
	config string

	podGroups bool   // the kubelet gives each pod a control group
	podRoot   string // below this group, which exists; "" = below the root, where another kubelet's are
	aligned   bool   // the kubelet aligns CPUs and devices on two NUMA nodes
	eager     bool   // the kubelet starts containers that end again after a second, each time
}

var (
	containerd2 = runtime{config: "containerd.toml"}
	containerd1 = runtime{folder: "/usr/bin/", config: "containerd-1.6.toml"} // Debian's, without CDI

	containerd2WithPodGroups = runtime{config: "containerd.toml", podGroups: true}
	containerd2Aligned       = runtime{config: "containerd.toml", aligned: true}
	containerd2Eager         = runtime{config: "containerd.toml", eager: true}
)

// startCluster brings the control plane and a node up, with the given images (archives) in containerd.
func startCluster(t *testing.T, images ...string) *cluster {
	t.Helper()
	return startClusterOn(t, containerd2, images...)
}

func startClusterOn(t *testing.T, r runtime, images ...string) *cluster {
	t.Helper()
	c := newCluster(t, r, images...)
	c.startControlPlane(t)
	c.join(t, c.kubeNode)
	await(t, "the default service account, before which pods are refused", 60*time.Second, func() error {
		return try("kubectl", "get", "serviceaccount", "default")
	})
	return c
}

// newCluster is a cluster of which nothing has been started.
func newCluster(t *testing.T, r runtime, images ...string) *cluster {
	t.Helper()
	pause := saveImage(t, "localhost/pause:1", []string{"/bin/sleep", "1000000"})
	busybox := saveImage(t, "localhost/busybox:1", []string{"/bin/sh"})
	first := &kubeNode{owner: t, name: "node1", address: firstAddress, pods: "10.88.0.0/16", dir: stateDir(), runtime: r}
	return &cluster{kubeNode: first, images: append(images, pause, busybox)}
}

// join starts the programs of a node, and waits until it is one of the cluster's.
func (c *cluster) join(t *testing.T, n *kubeNode) {
	t.Helper()
	n.configure(t)
	n.startContainerd(t)
	for _, image := range c.images {
		if _, err := n.ctr("images", "import", image); err != nil {
			t.Fatal(err)
		}
	}
	n.startKubelet()
	n.awaitReady(t)
	c.nodes = append(c.nodes, n)
}

func (c *cluster) startControlPlane(t *testing.T) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	signing := write(t, "pki/sa.key", pem.EncodeToMemory(
		&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	kubeconfig := render(t, "kubeconfig.yaml", nil)
	t.Setenv("KUBECONFIG", kubeconfig)
	t.Setenv("KUBECACHEDIR", stateDir()+"/kubectl")

	start(t, "etcd", nil, "etcd", "--data-dir=etcd", "--listen-client-urls=http://127.0.0.1:2379",
		"--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380")
	c.serve = func() *process {
		return start(t, "kube-apiserver", nil, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
			"--bind-address="+firstAddress, "--advertise-address="+firstAddress, "--secure-port=6443", "--cert-dir=pki",
			"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+signing,
			"--service-account-signing-key-file="+signing, "--service-cluster-ip-range=10.96.0.0/16",
			"--token-auth-file="+render(t, "tokens.csv", nil), "--authorization-mode=RBAC",
			"--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP", "--endpoint-reconciler-type=none",
			"--feature-gates="+os.Getenv(featureGates))
	}
	c.api = c.serve()
	await(t, "the API server", 60*time.Second, func() error {
		return errors.Join(try("kubectl", "get", "--raw", "/readyz"), c.api.alive())
	})
	serveServiceAddress(t)
	c.controllers = func() []*process {
		return []*process{
			start(t, "kube-controller-manager", nil, "kube-controller-manager", "--kubeconfig="+kubeconfig,
				"--service-account-private-key-file="+signing, "--root-ca-file=pki/apiserver.crt", "--bind-address=127.0.0.1",
				"--leader-elect=false"),
			start(t, "kube-scheduler", nil, "kube-scheduler", "--kubeconfig="+kubeconfig,
				"--bind-address=127.0.0.1", "--leader-elect=false"),
		}
	}
	c.control = c.controllers()
}

// featureGates is the variable with those that an older Kubernetes needs switched on for these tests; see run.
const featureGates = "E2E_FEATURE_GATES"

// deployPlugin deploys k8s-gpu as a user would, on the machine at root, with this state directory and more parts of the
// DaemonSet, and waits until it is ready.
func (c *cluster) deployPlugin(t *testing.T, root, history string, parts ...string) {
	t.Helper()
	render(t, "parts/quick/kustomization.yaml", nil)
	c.deployWith(t, root, history, append(parts, "parts/quick")...)
	t.Log(must(t, "kubectl", "get", "pods", "--namespace=kube-system"))
}

// deployWith is deployPlugin with the settings that the manifest has, and none for quick tests.
func (c *cluster) deployWith(t *testing.T, root, history string, parts ...string) {
	t.Helper()
	manifest, err := os.ReadFile("../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	write(t, "daemonset.yaml", manifest)
	render(t, "parts/simulated/kustomization.yaml", map[string]string{"MACHINE": root})
	render(t, "kustomization.yaml", map[string]string{
		"HISTORY": filepath.Join(stateDir(), history), "PARTS": strings.Join(append(parts, "parts/simulated"), ", "),
	})
	must(t, "kubectl", "apply", "-k", stateDir())
	awaitRollout(t)
}

// shippedPart copies a component of deploy, and returns its path beside the kustomization.
func shippedPart(t *testing.T, name string) string {
	t.Helper()
	path := "parts/deploy-" + name
	if err := os.RemoveAll(filepath.Join(stateDir(), path)); err != nil { // it may be there
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(stateDir(), path), os.DirFS("../../deploy/"+name)); err != nil {
		t.Fatal(err)
	}
	return path
}

// awaitRollout waits until every node has the agent of the DaemonSet as it is now.
func awaitRollout(t *testing.T) {
	t.Helper()
	must(t, "kubectl", "rollout", "status", daemonSet, "--namespace=kube-system", "--timeout=50s")
}

func (c *cluster) get(path string, into any) error { return fetchJSON(kubeAPI+path, into) }
