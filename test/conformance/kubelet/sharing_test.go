package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// The tests of this file have no case in the kubelet contract's checklist: they are about policies.

const (
	shares  v1.ResourceName = "nvidia.com/gpu.shared"
	special v1.ResourceName = "nvidia.com/special"

	byFour = `
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources: [{name: nvidia.com/gpu, replicas: 4}]
`
	lastInAnotherPool = `
version: v1
policy:
  rules:
    - {select: {index: 7}, name: nvidia.com/special}
`
	configFile = "--config-file="
)

// newPolicy writes a configuration file and returns the agent's option for it.
func newPolicy(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return configFile + path
}

// reload changes the file of policy and has an agent read it.
func (n *node) reload(a *agent, option, text string) {
	n.Helper()
	n.Must(os.WriteFile(strings.TrimPrefix(option, configFile), []byte(text), 0o600))
	n.Must(a.Cmd.Process.Signal(syscall.SIGHUP))
}

func TestFourPodsShareAGPU(t *testing.T) {
	n := newNode(t, "t4")
	n.startKubelet()
	n.startAgent(newPolicy(t, byFour))
	n.awaitCapacity(string(shares), 4, 4)
	gpu := n.UUIDs()[0]
	var first *v1.Pod
	for i := range 4 {
		p := podOf(shares, fmt.Sprintf("pod%d", i), nil, 1)
		n.Must(n.allocate(p))
		if got := n.visible(p, 0); got != gpu {
			t.Errorf("pod %d sees %q, want %s", i, got, gpu)
		}
		if held := n.held(p, "app0"); !slices.Equal(held, []string{fmt.Sprintf("%s::%d", gpu, i)}) {
			t.Errorf("pod %d holds %v", i, held)
		}
		if first == nil {
			first = p
		}
	}
	if err := n.allocate(podOf(shares, "fifth", nil, 1)); err == nil {
		t.Error("a fifth pod is admitted")
	}
	n.remove(first)
	n.Must(n.allocate(podOf(shares, "next", nil, 1)))
	if c, _ := n.capacity(gpus); c != 0 {
		t.Errorf("%d GPUs beside their shares", c)
	}
	n.mu.Lock()
	n.pods = nil // all have ended
	n.mu.Unlock()
	two := podOf(shares, "two", nil, 2)
	n.Must(n.allocate(two))
	if held, seen := n.held(two, "app0"), n.visible(two, 0); len(held) != 2 || seen != gpu {
		t.Errorf("holds %v, sees %q", held, seen)
	}
}

// Each kind of GPU has its own resource, and pods are spread over the shared ones.
func TestRulesOnEightGPUs(t *testing.T) {
	n := newNode(t, "h100x8")
	root := n.mpsDaemon("gpu.mps")
	n.startKubelet()
	n.startAgent("--mps-root="+root, newPolicy(t, `
version: v1
policy:
  rules:
    - {select: {index: 7}, use: reserved}
    - {select: {index: "2-4"}, use: time-slicing, replicas: 4}
    - {select: {index: [5, 6]}, use: mps, replicas: 2, memory: 30GiB}
`))
	n.awaitCapacity(gpus, 2, 2)
	n.awaitCapacity(string(shares), 12, 12)
	n.awaitCapacity("nvidia.com/gpu.mps", 4, 4)
	ids := n.UUIDs()
	var seen []string
	for i := range 3 {
		p := podOf(shares, fmt.Sprintf("share%d", i), nil, 1)
		n.Must(n.allocate(p))
		seen = append(seen, n.visible(p, 0))
	}
	if slices.Sort(seen); !slices.Equal(seen, slices.Sorted(slices.Values(ids[2:5]))) {
		t.Errorf("three pods share %v, want one each of %v", seen, ids[2:5])
	}
	both := n.pod("whole", nil, 2)
	n.Must(n.allocate(both))
	if got := n.visible(both, 0); got != ids[0]+","+ids[1] {
		t.Errorf("exclusive GPUs: %s", got)
	}
	client := podOf("nvidia.com/gpu.mps", "client", nil, 1)
	n.Must(n.allocate(client))
	env := n.env(client, 0)
	if env["CUDA_MPS_PIPE_DIRECTORY"] != "/mps/nvidia.com/gpu.mps/pipe" || env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] != "0=30720M" ||
		!slices.Contains(ids[5:7], env["NVIDIA_VISIBLE_DEVICES"]) {
		t.Errorf("a client of MPS has %v", env)
	}
	mounts := map[string]string{}
	for _, m := range n.options(client, 0).Mounts {
		mounts[m.ContainerPath] = m.HostPath
	}
	if mounts["/mps/nvidia.com/gpu.mps/pipe"] != root+"/nvidia.com/gpu.mps/pipe" || mounts["/dev/shm"] != root+"/shm" {
		t.Errorf("a client of MPS has mounts %v", mounts)
	}
	err := n.allocate(podOf("nvidia.com/gpu.mps", "clients", nil, 2))
	if err == nil || !strings.Contains(err.Error(), "maximum request size for shared resources is 1; found 2") {
		t.Errorf("two clients of MPS: %v", err)
	}
}

// mpsDaemon starts a stand-in for a pool's control daemon and returns the root of its pipe.
func (n *node) mpsDaemon(pool string) string {
	n.Helper()
	root := coretest.ShortDir(n.T)
	coretest.MPSDaemon(n.T, filepath.Join(root, "nvidia.com", pool, "pipe"))
	return root
}

// Full GPUs, MIG instances and shares of either on one node.
func TestMixedMIGAndShares(t *testing.T) {
	n := newNode(t, "a100-mig")
	n.startKubelet()
	n.startAgent(newPolicy(t, `
version: v1
flags: {migStrategy: mixed}
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpu, replicas: 2}
      - {name: nvidia.com/mig-1g.10gb, rename: nvidia.com/mig-1g.10gb.shared, replicas: 3}
`))
	for resource, want := range map[string]int64{
		gpus: 8, "nvidia.com/mig-1g.10gb.shared": 24, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-2g.20gb": 1,
		"nvidia.com/mig-3g.40gb": 1, "nvidia.com/mig-7g.80gb": 1, "nvidia.com/mig-1g.10gb": 0,
	} {
		n.awaitCapacity(resource, want, want)
	}
	p := podOf("nvidia.com/mig-1g.10gb.shared", "instance", nil, 1, 1)
	n.Must(n.allocate(p))
	for i := range 2 {
		id, _, _ := strings.Cut(n.held(p, fmt.Sprintf("app%d", i))[0], "::")
		if !strings.HasPrefix(id, "MIG-") || n.visible(p, i) != id {
			t.Errorf("container %d sees %q, holds a share of %s", i, n.visible(p, i), id)
		}
	}
	if n.visible(p, 0) == n.visible(p, 1) {
		t.Error("two shares of one instance, although others are free")
	}
	// A fault of the GPU takes all shares of its seven instances, and no others.
	n.Sim("xid", "4", "79")
	n.awaitCapacity("nvidia.com/mig-1g.10gb.shared", 24, 3)
	n.awaitCapacity(gpus, 8, 8)
}

// Another policy, read on HUP: the resource of before is no longer allocatable, and has only what pods hold, which keep it.
func TestAnotherPolicy(t *testing.T) {
	option := newPolicy(t, "version: v1\n")
	n, a := newReady(t, option)
	p := n.pod("holder", nil, 2)
	n.Must(n.allocate(p))
	before := n.visible(p, 0)
	n.reload(a, option, byFour)
	n.awaitCapacity(string(shares), 32, 32)
	n.awaitCapacity(gpus, 2, 0) // what the pod holds: without it the kubelet would panic if the pod is admitted again
	if got := n.visible(p, 0); got != before {
		t.Errorf("the pod saw %s, and sees %s", before, got)
	}
	if err := n.allocate(n.pod("late", nil, 1)); err == nil {
		t.Error("a GPU of a pool without units is allocated")
	}
	n.Must(n.allocate(podOf(shares, "share", nil, 1)))
}

// A pod holds eight GPUs when a policy moves one of them to another resource. By the kubelet's own pod-resources API it is
// withheld there until the pod ends, and stays listed where it was allocated: kubelet 1.37 dereferences nil when such a pod is
// resized in place or admitted again. Kubelets up to 1.36 refuse to resize it.
func TestADeviceThatAPodHoldsMovesToAnotherResource(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet("best-effort")
	n.servePodResources()
	option := newPolicy(t, "version: v1\n")
	a := n.startAgent(option)
	n.awaitCapacity(gpus, 8, 8)
	p := n.pod("holder", nil, 8)
	n.Must(n.allocate(p))
	n.reload(a, option, lastInAnotherPool)
	n.AwaitLog(a, "still listed as unhealthy because pods may hold them")
	n.awaitCapacity(string(special), 1, 0)
	n.awaitCapacity(gpus, 8, 7)
	if err := n.allocate(podOf(special, "thief", nil, 1)); err == nil {
		t.Error("a GPU that a pod holds is allocated to another")
	}
	pause := time.NewTimer(3 * time.Second) // longer than an ID that no pod holds stays listed
	<-pause.C
	r := admitPod(n.Context(), n.admit, p, resize)
	if r.Admit != resizesWithUnhealthy {
		t.Errorf("resize in place: %t, %s %s", r.Admit, r.Reason, r.Message)
	}
	if got := n.held(p, "app0"); !slices.Equal(got, slices.Sorted(slices.Values(n.UUIDs()))) {
		t.Errorf("the pod holds %v", got)
	}
	n.remove(p)
	n.awaitCapacity(string(special), 1, 1)
	n.awaitCapacity(gpus, 7, 7)
	n.Must(n.allocate(podOf(special, "next", nil, 1)))
}

// 16 GPUs with seven instances each, ten shares of an instance: the kubelet has all 1,120, and one that goes.
func TestElevenHundredShares(t *testing.T) {
	const resource v1.ResourceName = "nvidia.com/mig-1g.5gb"
	n := newNode(t, "a100x16-mig")
	n.startKubelet()
	n.startAgent(newPolicy(t, `
version: v1
flags: {migStrategy: mixed}
sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 10}]}}
`))
	n.awaitCapacity(string(resource), 1120, 1120)
	seen := map[string]int{}
	for i := range 112 {
		p := podOf(resource, fmt.Sprintf("pod%d", i), nil, 1)
		n.Must(n.allocate(p))
		seen[n.visible(p, 0)]++
	}
	if len(seen) != 112 {
		t.Errorf("112 pods share %d instances, although others are free", len(seen))
	}
	n.Sim("lose", "11")
	n.awaitCapacity(string(resource), 1120, 1050)
}
