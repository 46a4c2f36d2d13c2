package dra

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

const plenty = sandbox.Plenty // for anything that is waited for

type agent = sandbox.Agent

// node is a machine with an API server, kubelets, one after another, and agents.
type node struct {
	sandbox.Node
	kubeletDir string // the kubelet's --root-dir
	cdiDir     string
	stateDir   string // the agent's
	logger     klog.Logger
	api        *apiServer
	kubelet    *kubelet // the last one

	mu   sync.Mutex
	pods []*v1.Pod
}

// newNode installs a simulated machine and starts an API server; neither kubelet nor agent runs.
func newNode(t *testing.T, machine string) *node {
	t.Helper()
	short, err := os.MkdirTemp("", "dra") // sockets have at most 107 bytes; t.TempDir is longer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	n := &node{
		Node: sandbox.NewNode(t, filepath.Join(short, "m"), machine), kubeletDir: filepath.Join(short, "k"), cdiDir: filepath.Join(short, "cdi"),
		stateDir: filepath.Join(short, "s"), logger: klog.LoggerWithName(klog.NewKlogr(), "kubelet"), api: newAPIServer(t),
	}
	n.Must(os.MkdirAll(n.kubeletDir, 0o750))
	n.Must(os.MkdirAll(filepath.Dir(n.hook()), 0o755))
	n.Must(os.WriteFile(n.hook(), nil, 0o755)) //nolint:gosec // a program
	n.recordAPI(inventory.DRA)
	return n
}

// hook is the machine's program for the hooks of CDI specifications, which nothing runs here.
func (n *node) hook() string { return filepath.Join(n.Root, "usr/bin/nvidia-cdi-hook") }

// recordAPI makes the node one whose GPUs an API has had before. On a new one, GPUs come to DRA only when the kubelet's record of the
// device plugin shows no holder for a while.
func (n *node) recordAPI(api inventory.API) {
	n.Helper()
	had := map[gpu.DeviceID]inventory.API{}
	for _, id := range n.UUIDs() {
		had[gpu.DeviceID(id)] = api
	}
	n.Must(os.MkdirAll(n.stateDir, 0o755))
	n.Must(ownership.Write(n.stateDir, ownership.File{LocalAPIs: map[string]map[gpu.DeviceID]inventory.API{"k8s-gpu": had}}))
}

func (n *node) activePods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *node) addPod(p *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, p)
}

func (n *node) removePod(p *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = slices.DeleteFunc(n.pods, func(o *v1.Pod) bool { return o.UID == p.UID })
}

// flags are the agent's on this node.
func (n *node) flags() []string {
	return n.Flags(
		"--api=dra", "--node-name="+nodeName, "--kube-api="+n.api.url(), "--kube-token-file="+n.api.file("token"),
		"--kube-ca-file="+n.api.file("ca.crt"), "--kubelet-dir="+n.kubeletDir,
		"--kubelet-socket="+filepath.Join(n.kubeletDir, "device-plugins", "kubelet.sock"), "--pod-resources-socket=",
		"--cdi-dir="+n.cdiDir, "--nvidia-cdi-hook-path="+n.hook(), "--cri-socket=", "--state-dir="+n.stateDir,
	)
}

// startAgent starts an agent; a flag replaces that of the same name.
func (n *node) startAgent(flags ...string) *agent {
	n.Helper()
	return n.Start(sandbox.Merge(n.flags(), flags)...)
}

// awaitDevices waits until so many devices are published.
func (n *node) awaitDevices(count int) {
	n.Helper()
	n.api.await("devices", func(all []*resourceapi.ResourceSlice) bool { return len(devicesOf(n.T, all)) == count })
}

// newReady returns a node with a kubelet in which an agent has registered, and which has published its devices.
func newReady(t *testing.T, machine string, devices int, args ...string) (*node, *agent) {
	t.Helper()
	n := newNode(t, machine)
	k := n.startKubelet()
	a := n.startAgent(args...)
	k.awaitRegistered(t)
	n.awaitDevices(devices)
	return n, a
}

// inspect is what the running agent prints about itself.
func (n *node) inspect() string {
	n.Helper()
	out, err := exec.Command(sandbox.Program("k8s-gpu"), append(n.flags(), "inspect")...).CombinedOutput()
	if err != nil {
		n.Fatalf("inspect: %v\n%s", err, out)
	}
	return string(out)
}
