//go:build e2e

package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
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
)

// cluster is a whole one-node Kubernetes on loopback.
type cluster struct {
	owner   *testing.T // the test that the programs live as long as; its steps are shorter
	kubelet *process
}

// startCluster brings the control plane and the node up, with the given images (archives) in containerd.
func startCluster(t *testing.T, images ...string) *cluster {
	t.Helper()
	c := &cluster{owner: t}
	c.startControlPlane(t)
	values := map[string]string{"STATE": stateDir(), "LOGS": logDir()}
	render(t, "cni/10-e2e.conflist", nil)
	render(t, "kubelet.yaml", values)
	start(t, "containerd", nil, "containerd", "-c", render(t, "containerd.toml", values))
	await(t, "containerd", 20*time.Second, func() error { return c.try("ctr", "version") })
	pause := saveImage(t, "localhost/pause:1", []string{"/bin/sleep", "1000000"})
	busybox := saveImage(t, "localhost/busybox:1", []string{"/bin/sh"})
	for _, image := range append(images, pause, busybox) {
		if err := c.try("ctr", "--namespace", "k8s.io", "images", "import", image); err != nil {
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

func (c *cluster) startKubelet() {
	c.kubelet = start(c.owner, "kubelet", nil, "kubelet", "--config=kubelet.yaml", "--kubeconfig=kubeconfig.yaml",
		"--hostname-override="+nodeName, "--node-ip="+nodeAddress, "--v=2")
}

// deployPlugin deploys k8s-gpu as a user would, on the machine that lies at root, and waits until it is ready.
func (c *cluster) deployPlugin(t *testing.T, root string) {
	t.Helper()
	manifest, err := os.ReadFile("../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	write(t, "daemonset.yaml", manifest)
	render(t, "kustomization.yaml", map[string]string{"MACHINE": root, "HISTORY": stateDir() + "/k8s-history"})
	must(t, "kubectl", "apply", "-k", stateDir())
	must(t, "kubectl", "rollout", "status", "daemonset/tandem-k8s-gpu", "--namespace=kube-system", "--timeout=25s")
	t.Log(must(t, "kubectl", "get", "pods", "--namespace=kube-system"))
}

// restartKubelet ends kubelet by the signal, starts it anew and waits until the plugin has registered with
// the new one and the node offers all eight GPUs.
func (c *cluster) restartKubelet(t *testing.T, signal syscall.Signal) {
	t.Helper()
	c.kubelet.stop(t, signal)
	c.startKubelet()
	c.awaitRegistration(t, 0, 8)
}

// killPlugin kills k8s-gpu and waits until kubelet has started another one, and that has registered.
func (c *cluster) killPlugin(t *testing.T) { c.killPluginWith(t, 8) }

// killPluginWith is killPlugin where this many GPUs are allocatable afterwards.
func (c *cluster) killPluginWith(t *testing.T, allocatable int) {
	t.Helper()
	before, err := c.registrations()
	if err != nil {
		t.Fatal(err)
	}
	for pid := range running("k8s-gpu") {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	c.awaitRegistration(t, before, allocatable)
}

// awaitRegistration waits until kubelet counts more registrations than before, and of the eight GPUs this
// many are allocatable.
func (c *cluster) awaitRegistration(t *testing.T, before, allocatable int) {
	t.Helper()
	await(t, "the plugin to register", 60*time.Second, func() error {
		count, err := c.registrations()
		if err == nil && count <= before {
			err = fmt.Errorf("kubelet counts %d registrations, as before", count)
		}
		return errors.Join(err, c.kubelet.alive())
	})
	c.awaitGPUs(t, 8, allocatable)
}

// registrations gives kubelet's own count, which starts at nothing in every kubelet process.
func (c *cluster) registrations() (int, error) {
	metrics, err := fetch("http://" + nodeAddress + ":10255/metrics")
	if err != nil {
		return 0, err
	}
	counter := `kubelet_device_plugin_registration_total{resource_name="` + gpuResource + `"}`
	line, found := lineWith(metrics, counter)
	if !found {
		return 0, nil
	}
	return strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, counter)))
}

// awaitGPUs waits until the node shows this capacity and this many allocatable GPUs.
func (c *cluster) awaitGPUs(t *testing.T, capacity, allocatable int) {
	t.Helper()
	want := fmt.Sprintf("%d %d", capacity, allocatable)
	await(t, "capacity and allocatable "+want, 60*time.Second, func() error {
		name := strings.ReplaceAll(gpuResource, ".", `\.`)
		got, err := command("kubectl", "get", "node", nodeName, "-o",
			fmt.Sprintf("jsonpath={.status.capacity.%s} {.status.allocatable.%s}", name, name))
		if err == nil && got != want {
			err = fmt.Errorf("the node shows %q", got)
		}
		return err
	})
	t.Logf("node %s: capacity %d, allocatable %d", nodeName, capacity, allocatable)
}

// try runs one of the cluster's programs and reports only its failure.
func (c *cluster) try(argv ...string) error {
	if argv[0] == "ctr" {
		argv = slices.Insert(argv, 1, "--address", stateDir()+"/containerd.sock")
	}
	_, err := command(argv...)
	return err
}

// pod is what of a pod's status the test looks at.
type pod struct {
	Status struct {
		Phase, Reason, Message string
		ContainerStatuses      []struct {
			ContainerID              string
			RestartCount             int
			AllocatedResourcesStatus []struct {
				Name      string
				Resources []struct{ ResourceID, Health string }
			}
		}
	}
}

// health gives the pod's GPUs and their health as kubelet reports them.
func (p pod) health() map[string]string {
	health := map[string]string{}
	for _, container := range p.Status.ContainerStatuses {
		for _, resource := range container.AllocatedResourcesStatus {
			for _, r := range resource.Resources {
				health[r.ResourceID] = r.Health
			}
		}
	}
	return health
}

// ids gives the pod's GPUs in order.
func (p pod) ids() []string { return slices.Sorted(maps.Keys(p.health())) }

// identity gives what stays while the pod's container runs.
func (p pod) identity() string {
	text := p.Status.Phase
	for _, container := range p.Status.ContainerStatuses {
		text += fmt.Sprintf(", container %s, restarted %d times", container.ContainerID, container.RestartCount)
	}
	return fmt.Sprintf("%s, devices %s", text, p.ids())
}

func (c *cluster) pod(name string) (pod, error) {
	var p pod
	text, err := command("kubectl", "get", "pod", name, "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(text), &p)
	}
	return p, err
}

// runPod starts a pod that asks for count GPUs, waits until it has said which it got, and gives it.
func (c *cluster) runPod(t *testing.T, name string, count int) pod {
	t.Helper()
	must(t, "kubectl", "apply", "-f", render(t, "pod.yaml", map[string]string{
		"NAME": name, "COUNT": fmt.Sprint(count)}))
	var p pod
	await(t, "pod "+name+" to run", 60*time.Second, func() (err error) {
		if p, err = c.pod(name); err == nil && p.Status.Phase != "Running" {
			err = fmt.Errorf("it is %s: %s %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		return err
	})
	await(t, "the devices in the status of pod "+name, 30*time.Second, func() (err error) {
		if p, err = c.pod(name); err == nil && len(p.health()) != count {
			err = fmt.Errorf("its status shows %q", p.health())
		}
		return err
	})
	var said string
	await(t, "the log of pod "+name, 30*time.Second, func() (err error) {
		if said, err = command("kubectl", "logs", name); err == nil && said == "" {
			err = errors.New("it is empty")
		}
		return err
	})
	t.Logf("pod %s says: %s; kubelet says: %v", name, said, p.health())
	for id, health := range p.health() {
		if health != "Healthy" || !strings.Contains(said, id) {
			t.Errorf("kubelet gave %s, %s, the pod says %q", id, health, said)
		}
	}
	return p
}

// awaitHealth waits until the pod's status shows this health of a GPU that it holds.
func (c *cluster) awaitHealth(t *testing.T, name, id, health string) {
	t.Helper()
	await(t, id+" to be "+health+" in the status of pod "+name, 60*time.Second, func() error {
		p, err := c.pod(name)
		if err == nil && p.health()[id] != health {
			err = fmt.Errorf("its status shows %q", p.health())
		}
		return err
	})
	t.Logf("pod %s: %s is %s", name, id, health)
}

// awaitUnchanged waits until the pod is seen running in the container and with the devices that it had. One that
// was restarted never is.
func (c *cluster) awaitUnchanged(t *testing.T, name string, was pod) {
	t.Helper()
	await(t, "pod "+name+" to be as it was", 30*time.Second, func() error {
		p, err := c.pod(name)
		if err == nil && p.identity() != was.identity() {
			err = fmt.Errorf("it was %s, it is %s", was.identity(), p.identity())
		}
		return err
	})
	t.Logf("pod %s still is %s", name, was.identity())
}
