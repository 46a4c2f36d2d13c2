//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"
)

// trap is a machine with one GPU, under an agent whose API is changed.
type trap struct {
	*draCluster
	holders *holderTrace
	gpu     string
}

// TestDRATrap has pods ask for nvidia.com/gpu, which a class maps, while the agent offers the only GPU by one API, and then by the other: a second
// pod never runs on it, whatever ends or fails, in both directions.
func TestDRATrap(t *testing.T) {
	c := startDRA(t, "t4")
	tr := &trap{draCluster: c, holders: traceHolders(t, c.machine()), gpu: uuids(t, c.machine())[0]}
	must(t, "kubectl", "apply", "-f", "../../deploy/dra/classes.yaml")
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(c.machine())})
	step(t, "a pod has the GPU by the device plugin", func(t *testing.T) {
		tr.deployPlugin(t, c.machine().Root, "k8s-history", "parts/cdi")
		tr.awaitGPUs(t, 1, 1)
		tr.request(t, "first", gpuResource, 1)
		tr.awaitRunning(t, "first")
	})
	tr.stays(t, "the device plugin", "first", "second", func(t *testing.T) { tr.awaitGPUs(t, 1, 0) })
	step(t, "the node changes to DRA: the next pod has the GPU when the first has ended", func(t *testing.T) {
		tr.deploy(t)
		tr.changes(t, "first", "second")
		tr.awaitAllocated(t, "second")
	})
	tr.stays(t, "DRA", "second", "third", func(*testing.T) {})
	step(t, "the node changes back", func(t *testing.T) {
		must(t, "kubectl", "set", "env", daemonSet, "--namespace=kube-system", "API=device-plugin")
		awaitRollout(t)
		tr.changes(t, "second", "third")
		if p, err := tr.pod("third"); err != nil || len(p.claims()) != 0 {
			t.Errorf("pod third has the claims %v, error %v", p.claims(), err)
		}
	})
	tr.holders.checkAlone(t)
	checkDriver(t, c.machine())
}

// stays ends and breaks what gives the GPU of one pod out, while another pod waits for it. gone waits until the scheduler has seen that.
func (tr *trap) stays(t *testing.T, api, has, waits string, gone func(*testing.T)) {
	t.Helper()
	tr.request(t, waits, gpuResource, 1)
	for _, fault := range []struct {
		what     string
		do, undo func(*testing.T)
	}{
		{"the agent is away", func(t *testing.T) { tr.undeploy(t); gone(t) }, func(t *testing.T) { tr.redeploy(t); awaitRollout(t) }},
		{"the GPU is unhealthy", func(t *testing.T) {
			if err := tr.machine().Lose(0); err != nil {
				t.Fatal(err)
			}
			gone(t)
		}, func(t *testing.T) {
			if err := tr.machine().Restore(0); err != nil {
				t.Fatal(err)
			}
		}},
		{"kubelet is killed", func(t *testing.T) { tr.kubelet.stop(t, syscall.SIGKILL); tr.startKubelet(); tr.awaitReady(t) }, nil},
		{"kubelet and the agent are killed", func(t *testing.T) {
			tr.kubelet.stop(t, syscall.SIGKILL)
			tr.killAgent(t)
			tr.startKubelet()
			tr.awaitReady(t)
		}, nil},
	} {
		step(t, api+": "+fault.what, func(t *testing.T) {
			fault.do(t)
			tr.alone(t, has, waits)
			if fault.undo != nil {
				fault.undo(t)
				tr.alone(t, has, waits)
			}
		})
	}
}

// trapOpen is how long a scheduler has for the mistake: with stock parts the second pod runs after a second.
const trapOpen = 3 * time.Second

// alone fails unless one pod has the GPU and the other one waits, for as long as a mistake would take.
func (tr *trap) alone(t *testing.T, has, waits string) {
	t.Helper()
	for until := time.Now().Add(trapOpen); time.Now().Before(until); time.Sleep(holdersEvery) {
		if holders := tr.holders.holders()[tr.gpu]; !slices.Equal(holders, []string{has}) {
			t.Fatalf("the GPU is used by %q", holders)
		}
	}
	if p, err := tr.pod(waits); err != nil || p.Status.Phase != "Pending" || p.Spec.NodeName != "" {
		t.Errorf("pod %s is %+v, error %v", waits, p.Status, err)
	}
}

// changes expects the GPU to stay with the pod that has it, although the agent has another API, and to go to the next pod then.
func (tr *trap) changes(t *testing.T, has, next string) {
	t.Helper()
	tr.age(t, has)
	tr.alone(t, has, next)
	tr.remove(t, has)
	began := time.Now()
	await(t, "the process of pod "+next, offersAtMost+time.Minute, func() error {
		if holders := tr.holders.holders()[tr.gpu]; !slices.Equal(holders, []string{next}) {
			return fmt.Errorf("the GPU is used by %q", holders)
		}
		return nil
	})
	t.Logf("pod %s has the GPU %v after the end of pod %s", next, time.Since(began).Round(time.Second), has)
}
