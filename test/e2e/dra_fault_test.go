//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// draFault is one machine under a kubelet's DRA manager, another kubelet's device manager, and Nomad.
type draFault struct {
	*draCluster
	nomad  *agent
	second *kubeNode
	bad    string // the GPU that fails; the pods "claim" and "plugin" have it
	clock
}

// TestDRAFault has a GPU report an XID that three agents see: each orchestrator shows the same verdict in the same words, how long after
// the event each does is a table, and recovery takes it back.
func TestDRAFault(t *testing.T) {
	f := startDRAFault(t)
	step(t, "a pod has a GPU by a claim, one on the other node has it by the device plugin", f.work)
	f.follow(t)
	slot := slotOf(t, f.machine(), f.bad)
	step(t, "XID 95", func(t *testing.T) {
		f.happens(t, "XID 95", func() error {
			return errors.Join(f.machine().Set(slot, "recovery_action", "1"), f.machine().XID(slot, 95))
		},
			func(s showing) string { return s.fault })
	})
	step(t, "the words are the same", f.sameWords)
	step(t, "the GPU is reset", func(t *testing.T) {
		f.happens(t, "reset", func() error { return f.machine().Reset(slot) }, func(s showing) string { return s.recovered })
	})
	t.Logf("when each shows it:\n%s", f.table)
	checkDriver(t, f.machine())
}

// startDRAFault starts all three on one machine, which is where each node finds it.
func startDRAFault(t *testing.T) *draFault {
	t.Helper()
	both := filepath.Join(filepath.Dir(stateDir()), "both")
	t.Cleanup(func() { _ = os.RemoveAll(both) }) // else it stays with the logs
	m := installIn(t, both, "h100x8")
	c := startDRAOn(t, m)
	f := &draFault{draCluster: c, nomad: launchNomad(t, "nomad", onMachine(m, "nomad-history", ""))}
	f.second = c.newNode(containerd2)
	must(t, "mkdir", f.second.dir)
	f.second.startMachine(t)
	c.join(t, f.second)
	render(t, "parts/on/kustomization.yaml", map[string]string{"NODE": c.name})
	c.deploy(t, "parts/on")
	c.deploySecond(t, f.second, m)
	c.awaitDevices(t, 8, 0)
	f.second.awaitGPUs(t, 8, 8)
	f.nomad.awaitGPUs(t, 8, 8)
	return f
}

// deploySecond deploys k8s-gpu on a node with the default settings.
func (c *draCluster) deploySecond(t *testing.T, n *kubeNode, m *simdriver.Machine) {
	t.Helper()
	must(t, "install", "-D", filepath.Join(stateDir(), "daemonset.yaml"), filepath.Join(stateDir(), "second/daemonset.yaml"))
	render(t, "parts/simulated/kustomization.yaml", map[string]string{"MACHINE": m.Root})
	render(t, "second/kustomization.yaml", map[string]string{"NODE": n.name, "HISTORY": filepath.Join(stateDir(), "second-history")})
	must(t, "kubectl", "apply", "-k", filepath.Join(stateDir(), "second"))
	must(t, "kubectl", "rollout", "status", daemonSet+"-second", "--namespace=kube-system", "--timeout=50s")
}

// work starts a pod with a claim on the first node, and one on the second that has the same GPU among its own.
func (f *draFault) work(t *testing.T) {
	f.bad = f.hold(t, "claim")
	f.apply(t, map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "plugin"}, "spec": map[string]any{
			"terminationGracePeriodSeconds": 0, "nodeSelector": map[string]any{"kubernetes.io/hostname": f.second.name},
			"containers": []any{map[string]any{
				"name": "gpus", "image": "localhost/busybox:1", "imagePullPolicy": "Never", "command": []string{"sleep", "1000000"},
				"resources": map[string]any{"limits": map[string]int{gpuResource: 8}},
			}},
		},
	})
	f.awaitRunning(t, "plugin")
	f.awaitHealth(t, "plugin", f.bad, "Healthy")
}

func (f *draFault) follow(t *testing.T) {
	f.shows = []showing{
		{follow(t, "taint in the slice", func() (string, error) {
			taints, err := f.taintsOf(f.bad)
			return fmt.Sprint(taints), err
		}), `gpu\.nvidia\.com/xid:NoSchedule=95`, `^map\[\]$`},
		{follow(t, "status of the claim's pod", func() (string, error) {
			health, message, err := f.healthOf("claim")
			return health + " " + message, err
		}), "^Unhealthy .*XID 95", "^Healthy "},
		{follow(t, "the other node's kubelet", func() (string, error) {
			ids, err := f.second.healthy(gpuResource)
			return fmt.Sprintf("%d healthy", len(ids)), err
		}), "^7 healthy$", "^8 healthy$"},
		{follow(t, "status of its pod", func() (string, error) {
			p, err := f.pod("plugin")
			return p.health()[f.bad], err
		}), "^Unhealthy$", "^Healthy$"},
		{follow(t, "Nomad's HealthDescription", func() (string, error) {
			g, err := f.nomadGPU()
			return fmt.Sprintf("%v %s", g.Healthy, g.HealthDescription), err
		}), "^false .*XID 95", "^true "},
	}
}

// nomadGPU is the GPU as the Nomad node shows it.
func (f *draFault) nomadGPU() (gpuUse, error) {
	n, err := f.nomad.node()
	i := slices.IndexFunc(n.gpus(), func(g gpuUse) bool { return g.ID == f.bad })
	if i < 0 {
		return gpuUse{}, errors.Join(fmt.Errorf("it has no %s", f.bad), err)
	}
	return n.gpus()[i], err
}

// sameWords compares the message in the pod's status with Nomad's description, and with what the agents of both nodes print. The minute is
// that in which each agent saw the event; what a check finds after it is added by each in the next second.
func (f *draFault) sameWords(t *testing.T) {
	minute := regexp.MustCompile(`since \S+Z`)
	agents := map[string]string{"inspect of node1": f.plugin(t).Metadata.Name, "inspect of node2": f.second.plugin(t).Metadata.Name}
	await(t, "one text", 30*time.Second, func() error {
		g, err := f.nomadGPU()
		_, message, err2 := f.healthOf("claim")
		texts := map[string]string{"Nomad": g.HealthDescription, "the status of pod claim": message}
		for name, agent := range agents {
			text, err := inspected(f.bad, "kubectl", "exec", "--namespace=kube-system", agent, "--", "k8s-gpu", "inspect", "--json")
			texts[name], err2 = text, errors.Join(err2, err)
		}
		different := map[string]bool{}
		for _, text := range texts {
			different[minute.ReplaceAllString(text, "since then")] = true
		}
		if err = errors.Join(err, err2); err == nil && (len(different) != 1 || message == "") {
			err = fmt.Errorf("%q", texts)
		}
		if err == nil {
			t.Logf("the verdict of all: %s", message)
		}
		return err
	})
}
