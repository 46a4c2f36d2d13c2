//go:build e2e

package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	nodeName    = "node1"
	nodeAddress = "10.99.0.1" // the sandbox script puts it on the loopback interface
	gpuResource = "nvidia.com/gpu"
	kubeAPI     = "https://127.0.0.1:6443"
)

// cluster is a whole one-node Kubernetes on loopback.
type cluster struct {
	owner      *testing.T // the test that the programs live as long as; its steps are shorter
	runtime    runtime
	containerd *process
	kubelet    *process
}

// runtime is a version of containerd.
type runtime struct {
	folder string // of its programs, with a slash at the end; "" = they are found in PATH
	config string

	podGroups bool // the kubelet gives each pod a control group
}

var (
	containerd2 = runtime{config: "containerd.toml"}
	containerd1 = runtime{folder: "/usr/bin/", config: "containerd-1.6.toml"} // Debian's, without CDI

	containerd2WithPodGroups = runtime{config: "containerd.toml", podGroups: true}
)

// startCluster brings the control plane and the node up, with the given images (archives) in containerd.
func startCluster(t *testing.T, images ...string) *cluster {
	t.Helper()
	return startClusterOn(t, containerd2, images...)
}

func startClusterOn(t *testing.T, r runtime, images ...string) *cluster {
	t.Helper()
	c := &cluster{owner: t, runtime: r}
	c.startControlPlane(t)
	values := map[string]string{"STATE": stateDir(), "LOGS": logDir(), "PODGROUPS": strconv.FormatBool(r.podGroups)}
	render(t, "cni/10-e2e.conflist", nil)
	render(t, "kubelet.yaml", values)
	render(t, r.config, values)
	c.startContainerd(t)
	pause := saveImage(t, "localhost/pause:1", []string{"/bin/sleep", "1000000"})
	busybox := saveImage(t, "localhost/busybox:1", []string{"/bin/sh"})
	for _, image := range append(images, pause, busybox) {
		if err := c.try("ctr", "images", "import", image); err != nil {
			t.Fatal(err)
		}
	}
	c.startKubelet()
	await(t, "the node to be ready", 60*time.Second, func() error {
		ready, err := command("kubectl", "get", "node", nodeName, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")]}`)
		if err == nil && !strings.Contains(ready, `"status":"True"`) {
			err = errors.New(ready)
		}
		return errors.Join(err, c.kubelet.alive())
	})
	await(t, "the default service account, before which pods are refused", 60*time.Second, func() error {
		return c.try("kubectl", "get", "serviceaccount", "default")
	})
	return c
}

func (c *cluster) startContainerd(t *testing.T) {
	t.Helper()
	path := "PATH=" + c.runtime.folder + ":" + os.Getenv("PATH") // where it finds its shim
	c.containerd = start(c.owner, "containerd", []string{path}, c.runtime.folder+"containerd", "-c", c.runtime.config)
	await(t, "containerd", 20*time.Second, func() error { return c.try("ctr", "version") })
}

// restartContainerd ends containerd by the signal and starts it anew; containers go on meanwhile.
func (c *cluster) restartContainerd(t *testing.T, signal syscall.Signal) {
	t.Helper()
	c.containerd.stop(t, signal)
	c.startContainerd(t)
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
	api := start(t, "kube-apiserver", nil, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=6443", "--cert-dir=pki",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+signing,
		"--service-account-signing-key-file="+signing, "--service-cluster-ip-range=10.96.0.0/16",
		"--token-auth-file="+render(t, "tokens.csv", nil), "--authorization-mode=RBAC",
		"--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP", "--endpoint-reconciler-type=none")
	await(t, "the API server", 60*time.Second, func() error {
		return errors.Join(c.try("kubectl", "get", "--raw", "/readyz"), api.alive())
	})
	start(t, "kube-controller-manager", nil, "kube-controller-manager", "--kubeconfig="+kubeconfig,
		"--service-account-private-key-file="+signing, "--bind-address=127.0.0.1", "--leader-elect=false")
	start(t, "kube-scheduler", nil, "kube-scheduler", "--kubeconfig="+kubeconfig,
		"--bind-address=127.0.0.1", "--leader-elect=false")
}

// deployPlugin deploys k8s-gpu as a user would, on the machine at root, with this state directory and more parts of the
// DaemonSet, and waits until it is ready.
func (c *cluster) deployPlugin(t *testing.T, root, history string, parts ...string) {
	t.Helper()
	manifest, err := os.ReadFile("../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	write(t, "daemonset.yaml", manifest)
	render(t, "kustomization.yaml", map[string]string{
		"MACHINE": root, "HISTORY": filepath.Join(stateDir(), history), "PARTS": strings.Join(parts, ", "),
	})
	must(t, "kubectl", "apply", "-k", stateDir())
	must(t, "kubectl", "rollout", "status", "daemonset/tandem-k8s-gpu", "--namespace=kube-system", "--timeout=25s")
	t.Log(must(t, "kubectl", "get", "pods", "--namespace=kube-system"))
}

// offer returns how many GPUs the node has and how many of them are allocatable; "" is a resource that it does not
// know.
func (c *cluster) offer() (capacity, allocatable string, err error) {
	var node struct {
		Status struct{ Capacity, Allocatable map[string]string }
	}
	err = c.get("/api/v1/nodes/"+nodeName, &node)
	return node.Status.Capacity[gpuResource], node.Status.Allocatable[gpuResource], err
}

// awaitGPUs waits until the node shows this capacity and this many allocatable GPUs.
func (c *cluster) awaitGPUs(t *testing.T, capacity, allocatable int) {
	t.Helper()
	want := fmt.Sprintf("%d %d", capacity, allocatable)
	await(t, "capacity and allocatable "+want, 60*time.Second, func() error {
		all, free, err := c.offer()
		if got := all + " " + free; err == nil && got != want {
			err = fmt.Errorf("the node shows %q", got)
		}
		return err
	})
	t.Logf("node %s: capacity %d, allocatable %d", nodeName, capacity, allocatable)
}

func (c *cluster) get(path string, into any) error { return fetchJSON(kubeAPI+path, into) }

// try runs one of the cluster's programs and reports only its failure.
func (c *cluster) try(argv ...string) error {
	if argv[0] == "ctr" {
		_, err := c.ctr(argv[1:]...)
		return err
	}
	_, err := command(argv...)
	return err
}

// ctr runs containerd's client on kubelet's containers and images.
func (c *cluster) ctr(argv ...string) (string, error) {
	return command(slices.Concat([]string{c.runtime.folder + "ctr", "--address", stateDir() + "/containerd.sock", "--namespace", "k8s.io"}, argv)...)
}

// pluginImage returns an image archive of k8s-gpu.
func pluginImage(t *testing.T) string {
	t.Helper()
	return saveImage(t, "localhost/k8s-gpu:e2e", []string{"/usr/bin/k8s-gpu"}, binary("k8s-gpu"))
}

// saveImage writes a container image as an archive that "ctr images import" reads: Debian's static busybox
// and the given programs, each with the libraries it links. There is no registry to pull one from.
func saveImage(t *testing.T, name string, entrypoint []string, programs ...string) string {
	t.Helper()
	layer := buildLayer(t, programs)
	layerID := fmt.Sprintf("%x", sha256.Sum256(layer))
	config := encode(t, map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": entrypoint, "Env": []string{"PATH=/usr/bin:/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerID}},
	})
	configFile := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest := encode(t, []map[string]any{{
		"Config": configFile, "RepoTags": []string{name}, "Layers": []string{layerID + ".tar"},
	}})
	var image bytes.Buffer
	w := tar.NewWriter(&image)
	addFile(t, w, configFile, config)
	addFile(t, w, layerID+".tar", layer)
	addFile(t, w, "manifest.json", manifest)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return write(t, "images/"+strings.NewReplacer("/", "_", ":", "_").Replace(name)+".tar", image.Bytes())
}

func buildLayer(t *testing.T, programs []string) []byte {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	add := func(h tar.Header) {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "usr", "usr/bin", "var"} {
		add(tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755})
	}
	addFrom(t, w, "/bin/busybox", "bin/busybox")
	for _, applet := range []string{"sh", "sleep", "env", "cat"} {
		add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox", Mode: 0o777})
	}
	seen := map[string]bool{}
	for _, program := range programs {
		addFrom(t, w, program, "usr/bin/"+filepath.Base(program))
		for _, library := range linked(t, program) {
			if !seen[library] {
				seen[library] = true
				addFrom(t, w, library, strings.TrimPrefix(library, "/"))
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return layer.Bytes()
}

// linked returns the libraries that a program links, and their loader.
func linked(t *testing.T, program string) []string {
	t.Helper()
	text, err := command("ldd", program)
	if err != nil && !strings.Contains(err.Error(), "not a dynamic executable") {
		t.Fatal(err)
	}
	return slices.DeleteFunc(strings.Fields(text), func(field string) bool { return !strings.HasPrefix(field, "/") })
}

func addFrom(t *testing.T, w *tar.Writer, source, target string) {
	t.Helper()
	data, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	addFile(t, w, target, data)
}

func addFile(t *testing.T, w *tar.Writer, name string, data []byte) {
	t.Helper()
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(data))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
