//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// simulatedValues show the agent the simulated machine. They and the component of testdata/parts/simulated are all that is added to what
// docs/install.md has.
const simulatedValues = `nvidiaDriverRoot: "@MACHINE@"
extraEnv:
  - {name: SYSFS_ROOT, value: /driver-root/sys}
  - {name: PROCFS_ROOT, value: /driver-root/proc}
`

// kubeInstall is a cluster on which docs/install.md is done.
type kubeInstall struct {
	*cluster
	doc     installDocument
	sh      shell
	machine *simdriver.Machine
	folder  string // with the files of a release
}

// TestInstallKubernetes does what docs/install.md describes for Kubernetes: the image is imported or copied to a registry; the agent is
// installed, upgraded under a running pod, rolled back and removed, with Helm, with kubectl, and as a service of a fresh Debian.
func TestInstallKubernetes(t *testing.T) {
	privateVarLib(t)
	k := &kubeInstall{doc: readInstallDocument(t), machine: install(t, "h100x8"), folder: filepath.Join(stateDir(), "release")}
	must(t, "cp", "-r", os.Getenv("E2E_SHIPPED"), k.folder)
	k.cluster = startCluster(t)
	k.sh = typed(k.folder, []string{"HOME=" + stateDir(), "CONTAINERD_ADDRESS=" + stateDir() + "/containerd.sock"}, "env")

	step(t, "the image is imported", func(t *testing.T) {
		k.sh.must(t, k.doc.block(t, "without-a-network", "sh", 0))
		next, _ := nextImage(t)
		must(t, "cp", next, k.folder)
		k.sh.must(t, strings.ReplaceAll(k.doc.block(t, "without-a-network", "sh", 0), version, nextVersion))
	})
	step(t, "Helm", k.withHelm)
	step(t, "kubectl", k.withKubectl)
	// From now on kubelet 1.37 does not take the imported image, which is the same by another name, without asking its registry.
	step(t, "a registry", k.withRegistry)
	step(t, "a service", k.withService)
	k.doc.checkUsed(t, "kubernetes", "a-kubelet", "without-a-network")
}

// privateVarLib gives the sandbox a /var/lib of its own, in which the agent's folder can be removed.
func privateVarLib(t *testing.T) {
	t.Helper()
	over := filepath.Join(stateDir(), "var-lib")
	must(t, "mkdir", "-p", over+"/upper", over+"/work")
	must(t, "mount", "-t", "overlay", "overlay", "/var/lib", "-o", "lowerdir=/var/lib,upperdir="+over+"/upper,workdir="+over+"/work")
	for _, folder := range []string{"/var/lib/kubelet", "/var/lib/cni"} {
		must(t, "mount", "-t", "tmpfs", "tmpfs", folder)
	}
	must(t, "rm", "-rf", "/var/lib/tandem")
}

func (k *kubeInstall) withHelm(t *testing.T) {
	values := strings.ReplaceAll(simulatedValues, "@MACHINE@", k.machine.Root)
	write(t, "values.yaml", []byte(values))
	k.sh.follow(t, simulated(t, k.doc.block(t, "kubernetes", "sh", 0)), "8")
	k.awaitGPUs(t, 8, 8)
	was := k.train(t)
	k.sh.follow(t, k.doc.block(t, "kubernetes-upgrade", "sh", 0), "")
	k.awaitVersion(t, nextVersion)
	k.awaitUnchanged(t, "train", was)
	k.sh.follow(t, k.doc.block(t, "kubernetes-roll-back", "sh", 0), "")
	k.awaitVersion(t, version)
	k.awaitUnchanged(t, "train", was)
	k.remove(t, "train")
	k.sh.must(t, k.doc.block(t, "kubernetes-remove", "sh", 0))
	k.checkRemoved(t)
}

// simulated adds the values of the simulated machine to the installation with Helm.
func simulated(t *testing.T, script string) string {
	t.Helper()
	changed := strings.Replace(script, " --namespace kube-system", " --namespace kube-system --values "+stateDir()+"/values.yaml", 1)
	if changed == script {
		t.Fatalf("no line installs the chart in the namespace kube-system:\n%s", script)
	}
	return changed
}

// train starts the pod of the document, and waits until it has its GPUs.
func (k *kubeInstall) train(t *testing.T) pod {
	t.Helper()
	write(t, "release/train.yaml", []byte(k.doc.block(t, "kubernetes", "yaml", 0)))
	k.sh.must(t, "kubectl apply -f train.yaml")
	p, _ := k.awaitWork(t, "train", 2)
	return p
}

// awaitVersion waits until the agent is of this version.
func (k *kubeInstall) awaitVersion(t *testing.T, version string) {
	t.Helper()
	await(t, "version "+version, 60*time.Second, func() error {
		shown, err := command("kubectl", "-n", "kube-system", "exec", daemonSet, "--", "k8s-gpu", "--version")
		if err == nil && !strings.Contains(shown, version) {
			err = fmt.Errorf("it is %s", shown)
		}
		return err
	})
	k.awaitGPUs(t, 8, 8)
}

// checkRemoved fails unless of the agent is left what the document lists, and nothing after the lines that remove it.
func (k *kubeInstall) checkRemoved(t *testing.T) {
	t.Helper()
	k.awaitGPUs(t, 8, 0)
	await(t, "the end of the agent's pods", 60*time.Second, func() error {
		left, err := command("kubectl", "-n", "kube-system", "get", "all,configmaps,networkpolicies", "-l", "app.kubernetes.io/name=tandem-k8s-gpu", "-o", "name")
		if err == nil && left != "" {
			err = errors.New(left)
		}
		return err
	})
	if _, err := os.Stat("/var/lib/tandem/k8s-gpu.json"); err != nil {
		t.Errorf("the history of health did not stay: %v", err)
	}
	k.sh.must(t, k.doc.block(t, "kubernetes-remove", "sh", 1))
	for _, pattern := range []string{"/var/lib/tandem", "/var/run/cdi/*", pluginFolder + "/*.sock"} {
		left, err := filepath.Glob(pattern)
		left = slices.DeleteFunc(left, func(path string) bool { return path == registration })
		if err != nil || len(left) > 0 {
			t.Errorf("%s: %q is left, error %v", pattern, left, err)
		}
	}
}

// withRegistry installs from a registry by digest.
func (k *kubeInstall) withRegistry(t *testing.T) {
	start(t, "registry", nil, "crane", "registry", "serve", "--address=127.0.0.1:5000")
	await(t, "the registry", 20*time.Second, func() error {
		_, err := fetch("http://127.0.0.1:5000/v2/")
		return err
	})
	k.sh.must(t, simulated(t, k.doc.block(t, "without-a-network", "sh", 1)))
	k.awaitVersion(t, version)
	image := must(t, "kubectl", "-n", "kube-system", "get", "pods", "-o", "jsonpath={.items[0].spec.containers[0].image}")
	if !strings.HasPrefix(image, "127.0.0.1:5000/tandem/k8s-gpu@sha256:") {
		t.Errorf("the image is %s", image)
	}
	k.sh.must(t, k.doc.block(t, "kubernetes-remove", "sh", 0))
	k.checkRemoved(t)
}

// withKubectl does the same as withHelm. The part of the simulated machine is added to the folder that the archive has.
func (k *kubeInstall) withKubectl(t *testing.T) {
	k.apply(t, k.doc.block(t, "kubernetes-without-helm", "sh", 0), "8")
	k.awaitGPUs(t, 8, 8)
	was := k.train(t)
	k.apply(t, k.doc.block(t, "kubernetes-upgrade", "sh", 1), "")
	k.awaitVersion(t, nextVersion)
	k.awaitUnchanged(t, "train", was)
	k.sh.follow(t, k.doc.block(t, "kubernetes-roll-back", "sh", 1), "")
	k.awaitVersion(t, version)
	k.awaitUnchanged(t, "train", was)
	k.remove(t, "train")
	_, remove, found := strings.Cut(k.doc.block(t, "kubernetes-remove", "sh", 0), "# or ")
	if !found {
		t.Fatal("the removal has no line for kubectl")
	}
	k.sh.must(t, remove)
	k.checkRemoved(t)
}

// apply runs a script in which an archive is unpacked and its folder applied.
func (k *kubeInstall) apply(t *testing.T, script, shows string) {
	t.Helper()
	unpack, rest, found := strings.Cut(script, "kubectl apply")
	if !found {
		t.Fatalf("no line applies a folder:\n%s", script)
	}
	k.sh.must(t, unpack)
	folders, err := filepath.Glob(k.folder + "/tandem_*/deploy/kustomization.yaml")
	if err != nil || len(folders) == 0 {
		t.Fatalf("the archive has %q, error %v", folders, err)
	}
	for _, file := range folders {
		renderIn(t, filepath.Dir(file), "parts/simulated/kustomization.yaml", map[string]string{"MACHINE": k.machine.Root})
		must(t, "sed", "-i", "s|^components:.*|components: [parts/simulated]|", file)
	}
	k.sh.follow(t, "kubectl apply"+rest, shows)
}

// withService installs the package on a fresh Debian, beside the same kubelet, and upgrades it and restarts the kubelet under a running pod. What
// else happens to the service, and its privileges, are in test/packages.
func (k *kubeInstall) withService(t *testing.T) {
	m := bootFresh(t, func(root string) {
		must(t, "cp", "-r", os.Getenv("E2E_SHIPPED"), root+releaseFolder)
		must(t, "cp", "/bin/true", root+"/usr/bin/nvidia-container-runtime") // doctor looks for it
	}, "--bind=/var/lib/kubelet")
	sh, script := m.shell(), k.doc.block(t, "a-kubelet-without-the-daemonset", "sh", 0)
	sh.follow(t, script, "healthy")
	k.awaitGPUs(t, 8, 8)
	was := k.train(t)
	before, err := k.registrations()
	if err != nil {
		t.Fatal(err)
	}
	sh.must(t, "apt install ./tandem-k8s-gpu_"+nextVersion+"-1_amd64.deb")
	k.awaitRegistration(t, before, 8)
	k.awaitUnchanged(t, "train", was)
	k.restartKubelet(t, syscall.SIGTERM)
	k.awaitUnchanged(t, "train", was)
	k.remove(t, "train")
	sh.must(t, "apt purge tandem-k8s-gpu")
	k.awaitGPUs(t, 8, 0)
	if left := m.files("/usr/bin/k8s-gpu", "/etc/default/k8s-gpu", "/var/lib/tandem/k8s-gpu.json"); len(left) > 0 {
		t.Errorf("after a purge the machine has %q", left)
	}
}
