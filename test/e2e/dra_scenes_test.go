//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestDRA has pods get GPUs, MIG instances and shares by claims and by extended resources, on two nodes whose agents speak DRA.
func TestDRA(t *testing.T) {
	c := startDRA(t, "h100x8")
	second, m2 := c.addNode(t, containerd2, "a100-mig")
	installHook(t, m2)
	c.machines[second.name] = m2
	policy := shippedPart(t, "policy")
	render(t, "policies/twonodes.yaml", nil)
	if err := os.Rename(filepath.Join(stateDir(), "policies/twonodes.yaml"), filepath.Join(stateDir(), policy, "policy.yaml")); err != nil {
		t.Fatal(err)
	}
	c.deploy(t, policy, shippedPart(t, "mig"))
	step(t, "slices have what the machines have", func(t *testing.T) {
		c.awaitDevices(t, 8, 0)
		second.awaitDevices(t, 16, 0) // two GPUs, two that are shared, 12 MIG instances
		for _, n := range c.nodes {
			if offers, err := n.offers(); err != nil || offers != "" {
				t.Errorf("%s offers by the device plugin API: %s, error %v", n.name, offers, err)
			}
		}
	})
	step(t, "the classes of the policy's pools", func(t *testing.T) {
		classes := must(t, binary("k8s-gpu"), "classes", "--config-file", filepath.Join(stateDir(), policy, "policy.yaml"))
		must(t, "kubectl", "apply", "-f", write(t, "classes.yaml", []byte(classes)))
	})
	for _, e := range draExamples {
		step(t, e.file, func(t *testing.T) { e.run(t, c) })
	}
	step(t, "an XID: the taint, the status of the pod, the choice of the next", c.checkUnhealthy)
	step(t, "parameters of a claim", c.checkConfig)
	step(t, "a pod ends while the driver is away", c.checkEnd)
	checkDriver(t, c.machine())
	checkDriver(t, m2)
}

// draExamples are what users get, and what goes beyond.
var draExamples = []draExample{
	{"single.yaml", 1, func(t *testing.T, w draWork) { distinct(t, w, 1, "single-gpu/main") }},
	{"two-containers.yaml", 1, func(t *testing.T, w draWork) { same(t, w, 1, "two-containers/first", "two-containers/second") }},
	{"shared-claim.yaml", 2, func(t *testing.T, w draWork) { same(t, w, 1, "shared-claim-1/main", "shared-claim-2/main") }},
	{"extended-resource.yaml", 1, func(t *testing.T, w draWork) { distinct(t, w, 1, "extended-resource/main") }},
	{"extended.yaml", 2, func(t *testing.T, w draWork) { distinct(t, w, 3, "extended/ctr", "by-class/ctr") }},
	{"first-available.yaml", 1, func(t *testing.T, w draWork) { distinct(t, w, 2, "first-available/main") }},
	{"several.yaml", 1, func(t *testing.T, w draWork) {
		distinct(t, w, 4, "several/all")
		within(t, w, 1, "several/one", "several/all")
	}},
	{"mig.yaml", 1, func(t *testing.T, w draWork) { distinct(t, w, 2, "mig/small", "mig/large") }},
	{"instances.yaml", 1, func(t *testing.T, w draWork) {
		distinct(t, w, 3, "instances/small", "instances/middle", "instances/large")
		distinct(t, w, 3, "instances/every")
	}},
	{"share.yaml", 4, func(t *testing.T, w draWork) {
		if pods := w.ofPods("share-"); len(pods) != 4 {
			t.Errorf("containers of shares: %q", pods)
		}
		same(t, w, 1, w.ofPods("share-")...) // the scheduler fills the first GPU first
	}},
	{"shares.yaml", 3, func(t *testing.T, w draWork) { // four shares: one, two and one
		same(t, w, 1, "share-one/ctr", "share-two/ctr", "share-extended/ctr")
	}},
	{"admin-access.yaml", 2, func(t *testing.T, w draWork) { // a pod on each node, with all GPUs that are not shared or divided
		if pods := w.ofPods("gpu-monitoring-"); len(pods) != 2 || len(w.gpusOf(t, pods[0]))+len(w.gpusOf(t, pods[1])) != 10 {
			t.Errorf("containers that monitor: %v", w.gpus)
		}
	}},
}

// claimPod creates a pod with one GPU by a claim, with these parameters of the claim.
func (c *draCluster) claimPod(t *testing.T, name, driver, parameters string) {
	t.Helper()
	must(t, "kubectl", "apply", "-f", render(t, "dra/claim.yaml", map[string]string{
		"RUN": c.runProbe(t), "NAME": name, "NODE": c.name, "DRIVER": driver, "PARAMETERS": parameters,
	}))
}

// others is a driver for which parameters are that this agent does not read.
const othersDriver = "other.example.com"

// hold starts a pod with one GPU by a claim, and returns the GPU.
func (c *draCluster) hold(t *testing.T, name string) string {
	t.Helper()
	c.claimPod(t, name, othersDriver, "{kind: Whatever}")
	c.awaitRunning(t, name)
	ids := c.uuidsOf(t, c.name, []string{c.awaitAllocated(t, name)[0].Device})
	return ids[0]
}

// taintsOf are those of a device of the first node, by their keys: "NoSchedule=xid-79".
func (c *draCluster) taintsOf(uuid string) (map[string]string, error) {
	devices, err := c.published()
	d, found := devices[deviceName(uuid)]
	if err == nil && !found {
		err = fmt.Errorf("no device %s", uuid)
	}
	taints := map[string]string{}
	for _, taint := range d.Taints {
		taints[taint.Key] = string(taint.Effect) + "=" + taint.Value
	}
	return taints, err
}

// healthOf is the health of a pod's only device in its status, with the message.
func (c *cluster) healthOf(name string) (health, message string, err error) {
	p, err := c.pod(name)
	if err != nil {
		return "", "", err
	}
	for _, container := range p.Status.ContainerStatuses {
		for _, status := range container.AllocatedResourcesStatus {
			for _, r := range status.Resources {
				return r.Health, r.Message, nil
			}
		}
	}
	return "", "", fmt.Errorf("the status of pod %s has no devices", name)
}

func (c *draCluster) checkUnhealthy(t *testing.T) {
	m := c.machine()
	bad := c.hold(t, "held")
	failGPU(t, m, bad)
	c.awaitDevices(t, 8, 1)
	taints, err := c.taintsOf(bad)
	if err != nil || taints["gpu.nvidia.com/xid"] != "NoSchedule=95" {
		t.Errorf("taints of %s: %v, error %v", bad, taints, err)
	}
	t.Logf("taints of %s: %v", bad, taints)
	c.awaitMessage(t, "held", "Unhealthy", "XID 95")
	await(t, "inspect to have the words of the pod's status", 30*time.Second, func() error { // what a check adds to them is there a second later
		_, message, err := c.healthOf("held")
		text, err2 := c.inspected(bad)
		if err = errors.Join(err, err2); err == nil && text != message {
			err = fmt.Errorf("%q and %q", text, message)
		}
		return err
	})
	must(t, "kubectl", "apply", "-f", render(t, "dra/rest.yaml", map[string]string{"RUN": c.runProbe(t), "NODE": c.name}))
	rest := c.uuidsOf(t, c.name, devicesIn(c.awaitAllocated(t, "rest")))
	if len(rest) != 7 || slices.Contains(rest, bad) {
		t.Errorf("seven others than %s: %q", bad, rest)
	}
	if err := m.Reset(slotOf(t, m, bad)); err != nil {
		t.Fatal(err)
	}
	c.awaitDevices(t, 8, 0)
	c.awaitMessage(t, "held", "Healthy", "")
	c.removeAll(t)
}

// awaitMessage waits until the status of a pod's only device has this health, and a message that contains the text.
func (c *cluster) awaitMessage(t *testing.T, name, health, text string) {
	t.Helper()
	await(t, "pod "+name+" to have a GPU that is "+health, 60*time.Second, func() error {
		got, message, err := c.healthOf(name)
		if err == nil && (got != health || !strings.Contains(message, text)) {
			err = fmt.Errorf("it is %s: %q", got, message)
		}
		if err == nil {
			t.Logf("pod %s: %s %q", name, got, message)
		}
		return err
	})
}
