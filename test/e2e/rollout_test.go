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
)

const (
	daemonSet    = "daemonset/tandem-k8s-gpu"
	statusPeriod = 3 * time.Second // in which kubelet has written the status of the node: nodeStatusUpdateFrequency and a second
)

// rollouts is a node whose eight GPUs are held by eight pods.
type rollouts struct {
	*cluster
	trace     *capacityTrace
	pods      map[string]pod
	old, next string // versions of the agent
}

// TestRollouts has an operator upgrade the DaemonSet, break it and roll it back, and ends kubelet and containerd, while eight pods hold
// all GPUs: none is disturbed, and the node does not show less capacity.
func TestRollouts(t *testing.T) {
	m := install(t, "h100x8")
	next, version := nextImage(t)
	c := startCluster(t, pluginImage(), next)
	c.deployPlugin(t, m.Root, "k8s-history")
	c.awaitGPUs(t, 8, 8)
	r := &rollouts{cluster: c, pods: map[string]pod{}}
	for i := range 8 {
		r.request(t, fmt.Sprint("held-", i), gpuResource, 1)
	}
	for i := range 8 {
		name := fmt.Sprint("held-", i)
		r.pods[name], _ = r.awaitWork(t, name, 1)
	}
	r.trace = traceCapacity(t, c, len(r.pods))
	r.old, r.next = r.version(t), version
	r.rollOut(t, "as shipped", 0)
	c.deployPlugin(t, m.Root, "k8s-history", shippedPart(t, "surge"))
	r.trace.strict = true
	r.rollOut(t, "with the component surge", 8)
	r.trace.strict = false
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		r.trace.restarted = true
		r.step(t, "kubelet is restarted: "+signal.String(), func(t *testing.T) {
			r.restartKubelet(t, signal)
			time.Sleep(statusPeriod) // the node shows what kubelet has
		})
		r.trace.restarted = false
		r.step(t, "containerd is restarted: "+signal.String(), func(t *testing.T) { r.restartContainerd(t, signal) })
	}
	checkDriver(t, m)
}

// rollOut upgrades the DaemonSet, rolls it back, and rolls back two upgrades that fail, during which so many GPUs are allocatable.
func (r *rollouts) rollOut(t *testing.T, how string, meanwhile int) {
	r.step(t, how+": an upgrade", func(t *testing.T) {
		r.setImage(t, "ghcr.io/tandem-gpu/k8s-gpu:"+r.next)
		r.rolledOut(t, r.next)
	})
	r.step(t, how+": a rollback", func(t *testing.T) {
		r.undo(t)
		r.rolledOut(t, r.old)
	})
	r.step(t, how+": an image that is not to be had, and a rollback", func(t *testing.T) {
		r.setImage(t, "ghcr.io/tandem-gpu/k8s-gpu:2.0.O")
		r.awaitBroken(t, "ErrImagePull", meanwhile)
		r.undo(t)
		r.rolledOut(t, r.old)
	})
	r.step(t, how+": a setting that the agent refuses, and a rollback", func(t *testing.T) {
		must(t, "kubectl", "set", "env", daemonSet, "--namespace=kube-system", "MIG_STRATEGY=mixd")
		r.awaitBroken(t, "CrashLoopBackOff", meanwhile)
		r.undo(t)
		r.rolledOut(t, r.old)
	})
}

// nextImage returns an image archive of another version than pluginImage, and that version.
func nextImage(t *testing.T) (archive, version string) {
	t.Helper()
	archive = os.Getenv("E2E_NEXT_IMAGE")
	name := strings.TrimSuffix(filepath.Base(archive), ".oci.tar")
	version, found := strings.CutPrefix(name, "k8s-gpu-")
	if _, err := os.Stat(archive); err != nil || !found {
		t.Fatalf("E2E_NEXT_IMAGE=%q: %v; make it with \"make next-image BASE=debian\"", archive, err)
	}
	return archive, version
}

// step does something to the node with a trace of its capacity, and fails unless all pods are as they were after it.
func (r *rollouts) step(t *testing.T, name string, do func(*testing.T)) {
	t.Helper()
	step(t, name, func(t *testing.T) {
		r.trace.during(t, func() {
			do(t)
			r.awaitGPUs(t, 8, 8)
		})
		r.checkPods(t)
	})
}

// checkPods fails unless every pod runs in its container with its GPU, and kubelet still holds the GPU for it.
func (r *rollouts) checkPods(t *testing.T) {
	t.Helper()
	await(t, "the pods to be as they were", 30*time.Second, func() error {
		held, err := r.held() // kubelet lists pods after it has read them from the API server
		for name, was := range r.pods {
			p, err2 := r.pod(name)
			if err2 == nil && (p.identity() != was.identity() || !slices.Equal(held[name], was.ids())) {
				err2 = fmt.Errorf("pod %s was %s, it is %s, and kubelet holds %q for it", name, was.identity(), p.identity(), held[name])
			}
			err = errors.Join(err, err2)
		}
		return err
	})
}

func (r *rollouts) setImage(t *testing.T, image string) {
	t.Helper()
	must(t, "kubectl", "set", "image", daemonSet, "--namespace=kube-system", "k8s-gpu="+image)
}

func (r *rollouts) undo(t *testing.T) {
	t.Helper()
	must(t, "kubectl", "rollout", "undo", daemonSet, "--namespace=kube-system")
}

// rolledOut waits until the node has an agent of this version.
func (r *rollouts) rolledOut(t *testing.T, version string) {
	t.Helper()
	awaitRollout(t)
	if got := r.version(t); got != version {
		t.Errorf("the agent is version %q, want %q", got, version)
	}
}

// version is that of the agent.
func (r *rollouts) version(t *testing.T) string {
	t.Helper()
	metrics, err := fetch("http://" + r.plugin(t).Status.PodIP + ":9410/metrics")
	if err != nil {
		t.Fatal(err)
	}
	line, _ := lineWith(metrics, "tandem_build_info{")
	_, after, _ := strings.Cut(line, `version="`)
	version, _, _ := strings.Cut(after, `"`)
	return version
}

// awaitBroken waits until the agent's container waits for this reason, and so many GPUs are allocatable. The pods run meanwhile.
func (r *rollouts) awaitBroken(t *testing.T, reason string, allocatable int) {
	t.Helper()
	await(t, "the agent to be broken: "+reason, 60*time.Second, func() error {
		var list struct{ Items []pod }
		err := r.get("/api/v1/namespaces/kube-system/pods", &list)
		for _, p := range list.Items {
			for _, container := range p.Status.ContainerStatuses {
				if container.State.Waiting.Reason == reason {
					t.Logf("pod %s: %s: %s", p.Metadata.Name, reason, container.State.Waiting.Message)
					return nil
				}
			}
		}
		return errors.Join(fmt.Errorf("its pods are %+v", list.Items), err)
	})
	r.awaitGPUs(t, 8, allocatable)
	r.checkPods(t)
}
