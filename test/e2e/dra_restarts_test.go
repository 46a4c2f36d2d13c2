//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// Variables for more than make e2e has time for: how often kubelet and the agent are ended, and how long the API server is away.
const (
	draRounds = "E2E_DRA_ROUNDS"
	draOutage = "E2E_DRA_OUTAGE"
)

func roundsOf(variable string, byDefault int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return byDefault
}

// draRestarts is a node with pods that hold GPUs while its programs end.
type draRestarts struct {
	*draCluster
	slices *sliceTrace
	was    map[string]pod
}

// TestDRARestarts ends kubelet, the agent and the API server under pods with claims: they run on, slices are back within a second of the
// wipe, and what ends comes back with its GPU.
func TestDRARestarts(t *testing.T) {
	random := seeded(t)
	c := startDRA(t, "h100x8")
	c.deploy(t)
	c.awaitDevices(t, 8, 0)
	r := &draRestarts{draCluster: c, slices: traceSlices(t, c.kubeNode, 8), was: map[string]pod{}}
	holders := traceHolders(t, c.machine())
	for _, name := range []string{"held", "dies"} {
		c.hold(t, name)
		r.was[name] = r.running(t, name)
	}
	rounds := roundsOf(draRounds, 4)
	step(t, fmt.Sprintf("kubelet ends %d times", rounds), func(t *testing.T) {
		for i := range rounds {
			pause(random, time.Second)
			wipes := r.slices.wipes()
			c.kubelet.stop(t, []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[i%2])
			c.startKubelet()
			r.slices.await(t, wipes+1)
		}
		r.check(t)
		r.killed(t, "dies")
		t.Logf("slices were away for: %s", r.slices.check(t))
	})
	step(t, fmt.Sprintf("the agent is killed %d times while pods come and go", rounds), func(t *testing.T) {
		churn := startChurn(t, c.cluster, "beside")
		for i := range rounds {
			pause(random, time.Second)
			r.killAgain(t, func(*testing.T) {})
			if i%4 == 3 { // most others end before kubelet has found them: no pod would ever run
				churn.next()
			}
		}
		churn.stop(t)
		r.awaitAgent(t, "")
		r.check(t)
		r.killed(t, "dies")
	})
	step(t, "the CDI folder is emptied under the agent", r.emptied)
	step(t, "there is no agent: containers come back, kubelet ends, the CDI folder is emptied", r.away)
	step(t, "the API server is away", r.outage)
	for _, surge := range []bool{false, true} {
		step(t, fmt.Sprintf("the DaemonSet is updated under pods that come and go, surge: %v", surge), func(t *testing.T) { r.updated(t, surge) })
	}
	r.check(t)
	t.Logf("slices were away for: %s", r.slices.check(t))
	holders.checkAlone(t)
	checkDriver(t, c.machine())
}

// running waits until the pod runs in a container, and returns it.
func (c *cluster) running(t *testing.T, name string) pod {
	t.Helper()
	return c.awaitPod(t, name, "to run in a container", func(p pod) error {
		if ids := p.containers(); p.Status.Phase != "Running" || len(ids) != 1 || ids[0] == "" {
			return fmt.Errorf("it is %+v", p.Status)
		}
		return nil
	})
}

// check fails unless the pods run in their containers with their GPUs, and every device is in a slice once.
func (r *draRestarts) check(t *testing.T) {
	t.Helper()
	r.slices.await(t, 0)
	r.slices.check(t)
	tasks, err := r.tasks()
	if err != nil {
		t.Fatal(err)
	}
	for name, was := range r.was {
		now := r.running(t, name)
		if now.Metadata.UID != was.Metadata.UID || !slices.Equal(now.containers(), was.containers()) || tasks[was.containers()[0]] == "" {
			t.Errorf("pod %s was %+v, it is %+v; containers %v", name, was, now, tasks)
		}
	}
}

// killed kills the container of a pod, and waits until another one has its GPU.
func (r *draRestarts) killed(t *testing.T, name string) {
	t.Helper()
	r.killContainers(t, r.was[name])
	r.returned(t, name)
}

// returned waits for another container of the pod, and checks what it sees.
func (r *draRestarts) returned(t *testing.T, name string) {
	t.Helper()
	r.awaitAnother(t, r.was[name])
	now := r.running(t, name)
	devices, err := now.devicesOfContainers()
	if err != nil {
		t.Fatal(err)
	}
	r.checkSeen(t, now, r.uuidsOf(t, r.name, devices["ctr"]), r.awaitSeen(t, now, "ctr"))
	r.was[name] = now
}

// killAgain kills the agent, and waits for the next one's process. kubelet starts it after a second.
func (n *kubeNode) killAgain(t *testing.T, meanwhile func(*testing.T)) {
	t.Helper()
	old := running("k8s-gpu")
	n.killAgent(t)
	await(t, "another agent", 60*time.Second, func() error {
		meanwhile(t)
		for pid := range running("k8s-gpu") {
			if _, found := old[pid]; !found {
				return nil
			}
		}
		return fmt.Errorf("before: %v, now: %v", old, running("k8s-gpu"))
	})
}

// awaitAgent waits until the node has one agent, whose pod is ready and another than the old one; "" = any.
func (n *kubeNode) awaitAgent(t *testing.T, old string) {
	t.Helper()
	await(t, "another agent", 60*time.Second, func() error {
		var list struct{ Items []pod }
		err := fetchJSON(kubeAPI+"/api/v1/namespaces/kube-system/pods?fieldSelector=spec.nodeName="+n.name, &list)
		if len(list.Items) != 1 || err != nil {
			return errors.Join(fmt.Errorf("pods %+v", list.Items), err)
		}
		p := list.Items[0]
		if p.Metadata.Name == old || p.Metadata.DeletionTimestamp != "" || len(p.Status.ContainerStatuses) != 1 || !p.Status.ContainerStatuses[0].Ready {
			return fmt.Errorf("it is %+v", p)
		}
		return nil
	})
}
