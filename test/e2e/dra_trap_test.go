//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// pastKubelet is how long a kubelet keeps an endpoint of a device plugin after its connection has ended (endpointStopGracePeriod), after which
// it starts no container of that resource any more, also not for DRA.
const pastKubelet = 5*time.Minute + 20*time.Second

// longWaits is the variable with which the tests of what happens after minutes wait for them.
const longWaits = "E2E_DRA_LONG"

// TestDRATrapStock shows what a cluster of stock parts does that offers nvidia.com/gpu both by a device plugin and by DRA: the scheduler goes
// over to DRA while no GPU of the plugin is allocatable, and a second pod runs on a GPU that a pod has. TestDRATrap has the same with this
// agent.
func TestDRATrapStock(t *testing.T) {
	m := install(t, "l40s") // eight GPUs of which two matter
	g := uuids(t, m)
	c := startCluster(t)
	s := &stockTrap{cluster: c, holders: traceHolders(t, m), first: g[0], second: g[1]}
	s.plugin = startStockPlugin(s.owner, s.first)
	driver := startStockDriver(t, "stock.example.com", map[string]string{"gpu-0": s.first})
	c.awaitGPUs(t, 1, 1)
	driver.publish(t, c.name)
	step(t, "a pod has the GPU by the device plugin", func(t *testing.T) {
		c.request(t, "plugin", gpuResource, 1)
		c.awaitRunning(t, "plugin")
	})
	step(t, "the plugin ends: a second pod runs on the GPU", func(t *testing.T) {
		s.plugin.stop()
		c.awaitGPUs(t, 1, 0)
		s.doubled(t, "ended")
	})
	step(t, "the plugin is back, and has only an unhealthy GPU: a second pod runs on it", func(t *testing.T) {
		s.plugin = startStockPlugin(s.owner, s.first)
		c.awaitGPUs(t, 1, 1)
		s.plugin.list.Store(listOf(v1beta1.Unhealthy, []string{s.first}))
		c.awaitGPUs(t, 1, 0)
		s.doubled(t, "unhealthy")
	})
	step(t, "a pod has the GPU by DRA: the plugin gives it to a second pod", s.back)
	step(t, "minutes after the plugin has ended no container of the name starts", s.past)
}

type stockTrap struct {
	*cluster
	holders       *holderTrace
	plugin        *stockPlugin
	first, second string // UUIDs
}

// doubled has the scheduler give the GPU that pod plugin has to a pod by DRA.
func (s *stockTrap) doubled(t *testing.T, name string) {
	t.Helper()
	s.request(t, name, gpuResource, 1)
	if results := s.awaitAllocated(t, name); len(results) != 1 {
		t.Errorf("pod %s has a claim with %+v", name, results)
	}
	s.holders.awaitTwo(t, s.first, "plugin", name)
	s.remove(t, name)
}

// back has the plugin offer two GPUs, of which a pod has one by DRA: the number of those that are given out is right, and it is the wrong one.
func (s *stockTrap) back(t *testing.T) {
	s.request(t, "dra", gpuResource, 1)
	s.awaitAllocated(t, "dra")
	s.awaitRunning(t, "dra")
	s.remove(t, "plugin")
	s.plugin.list.Store(listOf(v1beta1.Healthy, []string{s.first, s.second}))
	s.awaitGPUs(t, 2, 2)
	s.request(t, "after", gpuResource, 1)
	s.holders.awaitTwo(t, s.first, "after", "dra")
	s.remove(t, "after")
}

// past shows what a kubelet does with a pod that has a GPU by DRA when the plugin has been gone for minutes, and that a plugin without
// devices mends it.
func (s *stockTrap) past(t *testing.T) {
	if os.Getenv(longWaits) == "" {
		t.Skipf("set %s to wait for %v", longWaits, pastKubelet)
	}
	s.plugin.stop()
	time.Sleep(pastKubelet)
	s.remove(t, "dra")
	s.request(t, "late", gpuResource, 1)
	s.awaitWaiting(t, "late", "CreateContainerConfigError", "endpoint not found in cache")
	s.plugin = startStockPlugin(s.owner)
	s.awaitRunning(t, "late")
}

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
		{"kubelet is killed", func(t *testing.T) { tr.kubelet.stop(t, syscall.SIGKILL); tr.startKubelet(); tr.awaitReady(t) }, func(*testing.T) {}},
		{"kubelet and the agent are killed", func(t *testing.T) {
			tr.kubelet.stop(t, syscall.SIGKILL)
			tr.killAgent(t)
			tr.startKubelet()
			tr.awaitReady(t)
		}, func(*testing.T) {}},
	} {
		step(t, api+": "+fault.what, func(t *testing.T) {
			fault.do(t)
			tr.alone(t, has, waits)
			fault.undo(t)
			tr.alone(t, has, waits)
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
