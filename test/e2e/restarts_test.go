//go:build e2e

package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// kubeletRestarts is the variable for more restarts than make e2e has time for.
const kubeletRestarts = "E2E_KUBELET_RESTARTS"

// TestKubeletRestarts ends kubelet 12 times and more under a running GPU pod: at rest, as soon as it has started and
// while a pod is being admitted. E2E_SEED repeats the moments of another run.
func TestKubeletRestarts(t *testing.T) {
	random := seeded(t)
	m := install(t, "h100x8")
	kube := startCluster(t, pluginImage())
	kube.deployPlugin(t, m.Root, "k8s-history")
	kube.awaitGPUs(t, 8, 8)
	story := restarts{cluster: kube, held: kube.runPod(t, "held", 1), agent: kube.plugin(t)}
	story.tasks = story.look(t)
	for i, o := range outages(random) {
		step(t, fmt.Sprintf("restart %d, %s", i+1, o), func(t *testing.T) { story.survive(t, i, o, random) })
	}
	step(t, "a new pod gets a GPU", func(t *testing.T) {
		kube.awaitGPUs(t, 8, 8)
		if next := kube.runPod(t, "next", 1); slices.Equal(next.ids(), story.held.ids()) {
			t.Errorf("pods held and next both have %q", next.ids())
		}
		kube.awaitUnchanged(t, "held", story.held)
		if now := kube.plugin(t).identity(); now != story.agent.identity() {
			t.Errorf("the agent was %s, it is %s", story.agent.identity(), now)
		}
	})
	step(t, "kubelet and the agent are killed at once", func(t *testing.T) {
		kube.kubelet.stop(t, syscall.SIGKILL)
		kube.killAgent(t)
		kube.startKubelet()
		kube.awaitRegistration(t, 0, 8)
		kube.awaitOneSocket(t)
		kube.awaitUnchanged(t, "held", story.held)
		kube.runPod(t, "last", 1)
	})
	t.Logf("from the start of kubelet to eight healthy GPUs in it: %s", percentiles(story.listed))
	t.Logf("pods whose admission a restart fell into: %v", story.caught)
}

// seeded returns a source of random times, and logs its seed.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed, err := strconv.ParseUint(os.Getenv("E2E_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64()
	}
	t.Logf("E2E_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// outage is one end of kubelet.
type outage struct {
	signal    syscall.Signal
	hurried   int  // so many kubelets are ended before they have settled
	admitting bool // a pod is on its way in
}

func (o outage) String() string {
	text := "at rest"
	if o.hurried > 0 {
		text = fmt.Sprintf("after %d hurried ones", o.hurried)
	}
	if o.admitting {
		text = "a pod on its way in"
	}
	return fmt.Sprintf("%s, %v", text, o.signal)
}

// outages returns restarts, of which every fourth is a kill, in random order, every third after one or two hurried ones and every
// third while a pod is admitted.
func outages(random *rand.Rand) []outage {
	all := make([]outage, roundsOf(kubeletRestarts, 12))
	for i := range all {
		all[i].signal = syscall.SIGTERM
		if i%4 == 0 {
			all[i].signal = syscall.SIGKILL
		}
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for i := range all {
		switch i % 3 {
		case 1:
			all[i].hurried = 1 + random.IntN(2)
		case 2:
			all[i].admitting = true
		}
	}
	return all
}

// restarts is what must stay, and what was measured.
type restarts struct {
	*cluster
	held, agent pod
	tasks       string // of both, as containerd shows them
	listed      []time.Duration
	caught      map[string]int // by what became of them
}

func (r *restarts) survive(t *testing.T, number int, o outage, random *rand.Rand) {
	admitted := fmt.Sprintf("admitted-%d", number)
	if o.admitting {
		r.request(t, admitted, gpuResource, 1)
	}
	pause(random, 400*time.Millisecond)
	for range o.hurried {
		r.kubelet.stop(t, o.signal)
		r.startKubelet()
		pause(random, 1500*time.Millisecond)
	}
	if o.admitting {
		pods, err := r.cluster.held()
		t.Logf("kubelet ends now; it holds %q for the pod, error %v", pods[admitted], err)
	}
	r.kubelet.stop(t, o.signal)
	began := time.Now()
	r.startKubelet()
	await(t, "kubelet to know of eight healthy GPUs", 60*time.Second, func() error {
		ids, err := r.healthy(gpuResource)
		if err == nil && len(ids) != 8 {
			err = fmt.Errorf("it knows of %q", ids)
		}
		return err
	})
	r.listed = append(r.listed, time.Since(began))
	r.awaitOneSocket(t)
	r.checkSame(t)
	if o.admitting {
		r.settle(t, admitted)
	}
}

// checkSame fails unless the pod and the agent still run in their containers and kubelet still knows the pod's GPU.
func (r *restarts) checkSame(t *testing.T) {
	t.Helper()
	if now := r.look(t); now != r.tasks {
		t.Errorf("containerd ran %s, it runs %s", r.tasks, now)
	}
	await(t, "the GPU of the pod held", 30*time.Second, func() error { // kubelet lists pods after it has read them from the API server
		pods, err := r.cluster.held()
		if err == nil && !slices.Equal(pods["held"], r.held.ids()) {
			err = fmt.Errorf("kubelet holds %q, want %q for the pod held", pods, r.held.ids())
		}
		return err
	})
}

// look returns the containers of the pod and of the agent with their process and state.
func (r *restarts) look(t *testing.T) string {
	t.Helper()
	tasks, err := r.cluster.tasks()
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	for _, id := range append(r.held.containers(), r.agent.containers()...) {
		seen = append(seen, id+" "+tasks[id])
	}
	return strings.Join(seen, ", ")
}

// settle waits for what becomes of a pod whose admission a restart fell into, and removes it. A kubelet that finds it
// before the plugin has registered rejects it for good ("cannot allocate unregistered device"): that is kubelet's
// design.
func (r *restarts) settle(t *testing.T, name string) {
	t.Helper()
	p := r.awaitPod(t, name, "to run or to be rejected", func(p pod) error {
		if p.Status.Phase == "Pending" {
			return fmt.Errorf("it is pending: %+v", p.Status)
		}
		return nil
	})
	outcome := strings.TrimSpace(p.Status.Phase + " " + p.Status.Reason)
	t.Logf("pod %s: %s %s", name, outcome, p.Status.Message)
	if outcome != "Running" && outcome != "Failed UnexpectedAdmissionError" {
		t.Errorf("pod %s is %s: %s", name, outcome, p.Status.Message)
	}
	pods, err := r.cluster.held()
	if err != nil || outcome == "Running" && (len(pods[name]) != 1 || slices.Equal(pods[name], r.held.ids())) {
		t.Errorf("kubelet holds %q, error %v; want one GPU for %s that the pod held has not", pods, err, name)
	}
	if r.caught == nil {
		r.caught = map[string]int{}
	}
	r.caught[outcome]++
	must(t, "kubectl", "delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
}

// pause lets a random time pass, at most limit.
func pause(random *rand.Rand, limit time.Duration) {
	time.Sleep(time.Duration(random.Int64N(int64(limit))))
}
