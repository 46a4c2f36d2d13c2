package kubelet

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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
)

const (
	gpus   = "nvidia.com/gpu"
	plenty = 40 * time.Second // for anything that is waited for
)

// node is a machine with a kubelet's device manager and agents on it.
type node struct {
	*testing.T
	root    string // of the simulated machine
	logger  klog.Logger
	manager *deviceManager
	admit   topologymanager.Manager // nil without a topology policy

	mu   sync.Mutex
	pods []*v1.Pod
}

// newNode installs a simulated machine; neither kubelet nor agent runs.
func newNode(t *testing.T, machine string) *node {
	t.Helper()
	n := &node{T: t, root: t.TempDir(), logger: klog.LoggerWithName(klog.NewKlogr(), "kubelet")}
	n.must(os.RemoveAll(pluginDir))
	n.sim("install", n.root, machine)
	t.Cleanup(n.stopKubelet)
	return n
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// sim runs simctl.
func (n *node) sim(args ...string) string {
	n.Helper()
	cmd := exec.Command(filepath.Join(os.Getenv(inside), "simctl"), args...)
	cmd.Env = append(os.Environ(), "SIMDRIVER_MACHINE="+n.root)
	cmd.Dir = project // where go-nvml's nvml.h is found
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// startKubelet starts a device manager as a kubelet does, on the directory as it is.
func (n *node) startKubelet(policy ...string) {
	n.Helper()
	m, admit, err := newManagers(n.logger, strings.Join(policy, ""))
	n.must(err)
	n.admit = admit
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	n.must(m.Start(n.logger, n.activePods, ready, containermap.NewContainerMap(), sets.New[string]()))
	n.manager = m
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

// agent is a running k8s-gpu.
type agent struct {
	cmd    *exec.Cmd
	exited chan struct{}
	log    string // path
}

func (n *node) startAgent(args ...string) *agent {
	n.Helper()
	log, err := os.Create(filepath.Join(n.TempDir(), "log"))
	n.must(err)
	a := &agent{exited: make(chan struct{}), log: log.Name()}
	a.cmd = exec.Command(filepath.Join(os.Getenv(inside), "k8s-gpu"), append([]string{
		"--driver-root=" + n.root, "--sysfs-root=" + n.root + "/sys", "--procfs-root=" + n.root + "/proc",
		"--http-address=", "--rescan=1s", "--state-dir=", "--kernel-log=off", "--log-format=text",
	}, args...)...)
	a.cmd.Stderr = log
	n.must(a.cmd.Start())
	go func() {
		_ = a.cmd.Wait()
		close(a.exited)
	}()
	n.Cleanup(func() {
		_ = a.cmd.Process.Kill()
		<-a.exited
		_ = log.Close()
		if n.Failed() {
			n.Log("agent:\n" + n.read(a.log))
		}
	})
	return a
}

func (n *node) read(path string) string {
	n.Helper()
	text, err := os.ReadFile(path)
	n.must(err)
	return string(text)
}

// end stops an agent with a signal and returns its exit code.
func (n *node) end(a *agent, sig syscall.Signal) int {
	n.Helper()
	n.must(a.cmd.Process.Signal(sig))
	select {
	case <-a.exited:
	case <-time.After(plenty):
		n.Fatalf("still running after %v", sig)
	}
	return a.cmd.ProcessState.ExitCode()
}

// capacity is what the kubelet would write into the node's status.
func (n *node) capacity(name string) (capacity, allocatable int64) {
	c, a, _ := n.manager.GetCapacity(n.logger)
	total, healthy := c[v1.ResourceName(name)], a[v1.ResourceName(name)]
	return total.Value(), healthy.Value()
}

func (n *node) awaitCapacity(name string, capacity, allocatable int64) {
	n.Helper()
	n.await(fmt.Sprintf("%s: capacity %d, allocatable %d", name, capacity, allocatable), func() bool {
		c, a := n.capacity(name)
		return c == capacity && a == allocatable
	})
}

// await polls: the device manager has no notification.
func (n *node) await(what string, ok func() bool) {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), plenty)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			n.Fatalf("%s: not in time", what)
		}
	}
}

func (n *node) awaitLog(a *agent, text string) {
	n.Helper()
	n.await(fmt.Sprintf("log of the agent with %q", text), func() bool { return strings.Contains(n.read(a.log), text) })
}

// sockets are the agents' sockets in the kubelet's directory.
func (n *node) sockets() []string {
	paths, err := filepath.Glob(filepath.Join(pluginDir, "tandem-*.sock"))
	n.must(err)
	return paths
}

// uuids are those of the simulated machine, by slot.
func (n *node) uuids() []string {
	var ids []string
	for line := range strings.Lines(n.sim("show")) {
		if id, ok := strings.CutPrefix(strings.TrimSpace(line), "uuid = "); ok {
			ids = append(ids, strings.TrimSpace(id))
		}
	}
	return ids
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
	n.must(err)
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
