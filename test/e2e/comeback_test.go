//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestContainersComeBack has kubelet place work on NUMA nodes, and ends all parts of the node under pods whose containers then end, too: they come
// back with their GPU. TestRollouts ends each part alone under containers that run on.
func TestContainersComeBack(t *testing.T) {
	c, m := startCDI(t, containerd2Aligned, "h100x8")
	back := comeBack{cluster: c, Machine: m, was: map[string]pod{}, saw: map[string]seen{}}
	step(t, "kubelet gives GPUs and CPUs of one NUMA node, or refuses the pod", back.aligned)
	names := []string{"removed", "no-agent", "all", "emptied"}
	for _, name := range names {
		c.probe(t, m, name, map[string]int{gpuResource: 1}, nil)
	}
	for _, name := range names {
		p, s := c.awaitProbe(t, name, 1)
		s.checkNodes(t, m, p.ids())
		back.was[name], back.saw[name] = p, s
	}
	step(t, "containerd, kubelet and the agent are killed", func(t *testing.T) {
		c.killAgent(t)
		c.kubelet.stop(t, syscall.SIGKILL)
		c.restartContainerd(t, syscall.SIGKILL)
		c.startKubelet()
		c.awaitRegistration(t, 0, 8)
		back.killed(t, "all")
	})
	step(t, "the CDI file is removed under the agent", func(t *testing.T) {
		must(t, "rm", cdiFile)
		back.killed(t, "removed")
	})
	step(t, "there is no agent", func(t *testing.T) {
		c.undeploy(t)
		back.killed(t, "no-agent")
	})
	step(t, "there is no agent, and its CDI file is gone", func(t *testing.T) {
		must(t, "rm", cdiFile)
		back.killContainers(t, back.was["emptied"])
		back.awaitWaiting(t, "emptied", "CreateContainerError", "unresolvable CDI devices "+cdiKind+"="+back.was["emptied"].ids()[0])
	})
	step(t, "the agent is back", func(t *testing.T) {
		c.redeploy(t)
		back.returned(t, "emptied")
	})
	step(t, "the machine is rebooted", back.reboot)
	step(t, "NVIDIA's hook program is an old one", back.oldHook)
	checkDriver(t, m)
}

// comeBack are pods with one GPU each, as they were at first.
type comeBack struct {
	*cluster
	*simdriver.Machine
	was map[string]pod
	saw map[string]seen
}

// reboot takes the power off the node, and starts its programs again. kubelet rejects for good a pod that it admits before the plugin has
// registered; the deployment replaces it.
func (b *comeBack) reboot(t *testing.T) {
	must(t, append([]string{"kubectl", "delete", "pod"}, slices.Collect(maps.Keys(b.was))...)...)
	b.deployProbe(t, b.Machine, "deployed", 2)
	before := b.awaitDeployed(t, "deployed", 2, nil)
	b.powerOff(t)
	if err := b.Reboot(); err != nil {
		t.Fatal(err)
	}
	b.startContainerd(t)
	b.startKubelet()
	b.awaitRegistration(t, 0, 8)
	b.awaitDeployed(t, "deployed", 2, before)
}

// oldHook expects a specification without the hooks that the program does not have and would end a container for.
func (b *comeBack) oldHook(t *testing.T) {
	const later = "disable-device-node-modification"
	if text := must(t, "cat", cdiFile); !strings.Contains(text, later) {
		t.Errorf("no hook %s in %s", later, text)
	}
	installProgram(t, "nvidia-cdi-hook-old", hook(b.Machine))
	b.killPlugin(t, 8)
	if text := must(t, "cat", cdiFile); strings.Contains(text, later) {
		t.Errorf("a hook %s in %s", later, text)
	}
	b.probe(t, b.Machine, "old-hook", map[string]int{gpuResource: 1}, nil)
	p, s := b.awaitProbe(t, "old-hook", 1)
	s.checkNodes(t, b.Machine, p.ids())
	s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", void)
	s.checkLibrary(t, true)
}

// awaitDeployed waits until the deployment has so many pods in containers other than those before, checks what they see, and
// returns their containers.
func (b *comeBack) awaitDeployed(t *testing.T, name string, count int, before []string) (containers []string) {
	t.Helper()
	began := time.Now()
	var pods []pod
	await(t, fmt.Sprintf("%d pods of %s", count, name), 90*time.Second, func() error {
		var err error
		pods, err = b.podsOf(name)
		containers = nil
		for _, p := range pods {
			if ids := p.containers(); p.Status.Phase == "Running" && len(ids) == 1 && ids[0] != "" && !slices.Contains(before, ids[0]) {
				containers = append(containers, ids[0])
			}
		}
		if err == nil && len(containers) != count {
			err = fmt.Errorf("they are %+v", pods)
		}
		return err
	})
	t.Logf("%d pods run after %v", count, time.Since(began).Round(time.Millisecond))
	for _, p := range pods {
		t.Logf("pod %s: %s %s %s", p.Metadata.Name, p.Status.Phase, p.Status.Reason, p.Status.Message)
		if p.Status.Phase == "Running" {
			p, s := b.awaitProbe(t, p.Metadata.Name, 1)
			s.checkNodes(t, b.Machine, p.ids())
			s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", void)
		}
	}
	return containers
}

// killed kills the pod's container, which until then has been the same, and waits until it is back.
func (b *comeBack) killed(t *testing.T, name string) {
	t.Helper()
	b.awaitUnchanged(t, name, b.was[name])
	b.killContainers(t, b.was[name])
	b.returned(t, name)
}

// returned waits for another container of the pod, and checks that it has the device of the one before.
func (b *comeBack) returned(t *testing.T, name string) {
	t.Helper()
	was := b.was[name]
	b.awaitAnother(t, was)
	p, s := b.awaitProbe(t, name, 1)
	if !slices.Equal(p.ids(), was.ids()) {
		t.Errorf("pod %s had %q, it has %q", name, was.ids(), p.ids())
	}
	if s.String() != b.saw[name].String() {
		t.Errorf("pod %s saw %v", name, b.saw[name])
	}
}

// awaitWaiting waits until the pod's container waits for this reason, with a message that has the text.
func (c *cluster) awaitWaiting(t *testing.T, name, reason, text string) {
	t.Helper()
	c.awaitPod(t, name, "to wait: "+reason, func(p pod) error {
		if len(p.Status.ContainerStatuses) != 1 {
			return fmt.Errorf("it is %+v", p.Status)
		}
		waiting := p.Status.ContainerStatuses[0].State.Waiting
		if waiting.Reason != reason || !strings.Contains(waiting.Message, text) {
			return fmt.Errorf("it waits: %+v", waiting)
		}
		t.Logf("pod %s: %s: %s", name, waiting.Reason, waiting.Message)
		return nil
	})
}

// undeploy takes k8s-gpu off the node.
func (c *cluster) undeploy(t *testing.T) {
	t.Helper()
	c.selectNodes(t, `{"no-such-label": "x"}`)
	await(t, "the end of k8s-gpu", 30*time.Second, func() error {
		if agents := running("k8s-gpu"); len(agents) > 0 {
			return fmt.Errorf("%v run", agents)
		}
		return nil
	})
}

// redeploy puts k8s-gpu on the node again.
func (c *cluster) redeploy(t *testing.T) {
	t.Helper()
	c.selectNodes(t, `{"no-such-label": null}`)
}

func (c *cluster) selectNodes(t *testing.T, labels string) {
	t.Helper()
	must(t, "kubectl", "patch", "daemonset", "tandem-k8s-gpu", "--namespace=kube-system", "--type=merge",
		"--patch", `{"spec": {"template": {"spec": {"nodeSelector": `+labels+`}}}}`)
}
