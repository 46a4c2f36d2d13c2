package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"

	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

const (
	gpus      = "nvidia.com/gpu"
	pluginDir = sandbox.KubeletHome + "/device-plugins"
)

type agent = sandbox.Agent

// node is a machine with a kubelet's device manager and agents on it.
type node struct {
	sandbox.Node
	logger  klog.Logger
	manager *deviceManager
	admit   topologymanager.Manager // nil without a topology policy

	stopPodResources func()

	mu      sync.Mutex
	pods    []*v1.Pod
	serving *deviceManager // for the pod-resources API, also while manager is replaced
}

// current is the device manager for calls from other goroutines than that of the test.
func (n *node) current() *deviceManager {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.serving
}

// newNode installs a simulated machine; neither kubelet nor agent runs.
func newNode(t *testing.T, machine string) *node {
	t.Helper()
	n := &node{Node: sandbox.NewNode(t, t.TempDir(), machine), logger: klog.LoggerWithName(klog.NewKlogr(), "kubelet")}
	n.pods = []*v1.Pod{n.pod("agent", nil, 0)} // a node has pods
	n.Must(os.RemoveAll(pluginDir))
	t.Cleanup(n.stopKubelet)
	return n
}

// startKubelet starts a device manager as a kubelet does, on the directory as it is.
func (n *node) startKubelet(policy ...string) {
	n.Helper()
	m, admit, err := newManagers(n.logger, strings.Join(policy, ""))
	n.Must(err)
	n.admit = admit
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	n.Must(m.Start(n.logger, n.activePods, ready, containermap.NewContainerMap(), sets.New[string]()))
	n.manager = m
	n.mu.Lock()
	defer n.mu.Unlock()
	n.serving = m
}

func (n *node) stopKubelet() {
	if n.manager != nil {
		if err := n.manager.Stop(n.logger); err != nil {
			n.Error(err)
		}
		n.manager = nil
	}
}

func (n *node) activePods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *node) startAgent(flags ...string) *agent {
	n.Helper()
	return n.Start(append([]string{"--state-dir="}, flags...)...)
}

// capacity is what the kubelet would write into the node's status.
func (n *node) capacity(name string) (capacity, allocatable int64) {
	c, a, _ := n.manager.GetCapacity(n.logger)
	total, healthy := c[v1.ResourceName(name)], a[v1.ResourceName(name)]
	return total.Value(), healthy.Value()
}

func (n *node) awaitCapacity(name string, capacity, allocatable int64) {
	n.Helper()
	n.Await(fmt.Sprintf("%s: capacity %d, allocatable %d", name, capacity, allocatable), func() bool {
		c, a := n.capacity(name)
		return c == capacity && a == allocatable
	})
}

// sockets are the agents' sockets in the kubelet's directory.
func (n *node) sockets() []string {
	paths, err := filepath.Glob(filepath.Join(pluginDir, "tandem-*.sock"))
	n.Must(err)
	return paths
}

// pod makes a pod with one container for each count of GPUs; init containers come first.
func (n *node) pod(name string, init []int, counts ...int) *v1.Pod {
	return podOf(gpus, name, init, counts...)
}

func podOf(kind v1.ResourceName, name string, init []int, counts ...int) *v1.Pod {
	container := func(i, count int, role string) v1.Container {
		limits := v1.ResourceList{kind: *resource.NewQuantity(int64(count), resource.DecimalSI)}
		return v1.Container{Name: fmt.Sprintf("%s%d", role, i), Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}}
	}
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)}}
	for i, count := range init {
		p.Spec.InitContainers = append(p.Spec.InitContainers, container(i, count, "init"))
	}
	for i, count := range counts {
		p.Spec.Containers = append(p.Spec.Containers, container(i, count, "app"))
	}
	return p
}

// allocate admits a pod as the kubelet's sync loop does, without a topology policy.
func (n *node) allocate(p *v1.Pod) error {
	n.mu.Lock()
	n.pods = append(n.pods, p)
	n.mu.Unlock()
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if err := n.manager.Allocate(n.Context(), p, &c, add); err != nil {
			n.remove(p)
			return err
		}
	}
	return nil
}

func (n *node) remove(p *v1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = slices.DeleteFunc(n.pods, func(o *v1.Pod) bool { return o.UID == p.UID })
}

// held are the device IDs of a container, sorted.
func (n *node) held(p *v1.Pod, container string) []string {
	var ids []string
	for _, devices := range n.manager.GetDevices(string(p.UID), container) {
		for id := range devices {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// options are what the kubelet gives the container runtime for an app container.
func (n *node) options(p *v1.Pod, i int) *devicemanager.DeviceRunContainerOptions {
	n.Helper()
	o, err := n.manager.GetDeviceRunContainerOptions(n.Context(), p, &p.Spec.Containers[i])
	n.Must(err)
	if o == nil {
		n.Fatal("no options for the container")
	}
	return o
}

// visible is the value of NVIDIA_VISIBLE_DEVICES for an app container.
func (n *node) visible(p *v1.Pod, i int) string { return n.env(p, i)["NVIDIA_VISIBLE_DEVICES"] }

// env is the environment that the kubelet gives an app container because of its devices.
func (n *node) env(p *v1.Pod, i int) map[string]string {
	n.Helper()
	env := map[string]string{}
	for _, e := range n.options(p, i).Envs {
		env[e.Name] = e.Value
	}
	return env
}
