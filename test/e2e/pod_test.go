//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// pod is the part of a pod's status that tests use.
type pod struct {
	Metadata struct{ Namespace, Name, UID, DeletionTimestamp string }
	Spec     struct {
		NodeName       string
		ResourceClaims []podClaim
		Containers     []struct {
			Name      string
			Resources struct {
				Claims []struct{ Name, Request string }
			}
		}
	}
	Status struct {
		Phase, Reason, Message string
		Conditions             []struct{ Message string }
		PodIP                  string

		ResourceClaimStatuses       []podClaim
		ExtendedResourceClaimStatus struct {
			ResourceClaimName string
			RequestMappings   []struct{ ContainerName, RequestName string }
		}

		ContainerStatuses []struct {
			ContainerID  string
			RestartCount int
			Ready        bool
			State        struct {
				Waiting struct{ Reason, Message string }
				Running struct{ StartedAt string }
			}
			AllocatedResourcesStatus []struct {
				Name      string
				Resources []struct{ ResourceID, Health, Message string }
			}
		}
	}
}

// health returns the pod's GPUs and their health as kubelet reports them.
func (p pod) health() map[string]string {
	health := map[string]string{}
	for _, container := range p.Status.ContainerStatuses {
		for _, resource := range container.AllocatedResourcesStatus {
			for _, r := range resource.Resources {
				health[r.ResourceID] = r.Health
			}
		}
	}
	return health
}

// ids returns the pod's GPUs in order.
func (p pod) ids() []string { return slices.Sorted(maps.Keys(p.health())) }

// identity returns what stays while the pod's container runs.
func (p pod) identity() string {
	text := p.Status.Phase
	for _, container := range p.Status.ContainerStatuses {
		text += fmt.Sprintf(", container %s, restarted %d times", container.ContainerID, container.RestartCount)
	}
	return fmt.Sprintf("%s, devices %s", text, p.ids())
}

// containers returns the ids of the pod's containers, as containerd knows them.
func (p pod) containers() []string {
	var ids []string
	for _, container := range p.Status.ContainerStatuses {
		ids = append(ids, strings.TrimPrefix(container.ContainerID, "containerd://"))
	}
	return ids
}

func (c *cluster) pod(name string) (pod, error) {
	var p pod
	err := c.get("/api/v1/namespaces/default/pods/"+name, &p)
	return p, err
}

// podsOf returns the pods with this label app.
func (c *cluster) podsOf(app string) ([]pod, error) {
	var list struct{ Items []pod }
	err := c.get("/api/v1/namespaces/default/pods?labelSelector=app="+app, &list)
	return list.Items, err
}

// pluginLog returns what the DaemonSet's containers have printed so far.
func (c *cluster) pluginLog(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob(logDir() + "/pods/kube-system_*/k8s-gpu/*.log")
	if err != nil || len(files) == 0 {
		t.Fatalf("the plugin has no log, error %v", err)
	}
	var text strings.Builder
	for _, file := range files {
		one, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(one)
	}
	return text.String()
}

// request creates a pod that asks for count of a resource.
func (c *cluster) request(t *testing.T, name, resource string, count int) {
	t.Helper()
	must(t, "kubectl", "apply", "-f", render(t, "pod.yaml",
		map[string]string{"NAME": name, "RESOURCE": resource, "COUNT": fmt.Sprint(count)}))
}

// runPod starts a pod that asks for count GPUs, waits until it has printed which it got, and returns it.
func (c *cluster) runPod(t *testing.T, name string, count int) pod {
	t.Helper()
	c.request(t, name, gpuResource, count)
	p, _ := c.awaitWork(t, name, count)
	return p
}

// awaitWork waits until the pod runs and has printed which of its count devices it got, and returns it and its output.
func (c *cluster) awaitWork(t *testing.T, name string, count int) (p pod, output string) {
	t.Helper()
	c.awaitRunning(t, name)
	p = c.awaitPod(t, name, "to show its devices in its status", func(p pod) error {
		if len(p.health()) != count {
			return fmt.Errorf("it shows %q", p.health())
		}
		return nil
	})
	await(t, "the log of pod "+name, 30*time.Second, func() (err error) {
		if output, err = command("kubectl", "logs", name); err == nil && output == "" {
			err = errors.New("it is empty")
		}
		return err
	})
	t.Logf("output of pod %s: %s; kubelet has %v", name, output, p.health())
	for id, health := range p.health() {
		if health != "Healthy" || !strings.Contains(output, deviceOf(id)) {
			t.Errorf("kubelet allocated %s, %s, the pod printed %q", id, health, output)
		}
	}
	return p, output
}

// awaitPod waits until the check of the pod is nil, and returns the pod.
func (c *cluster) awaitPod(t *testing.T, name, what string, check func(pod) error) (p pod) {
	t.Helper()
	await(t, "pod "+name+" "+what, 60*time.Second, func() (err error) {
		if p, err = c.pod(name); err == nil {
			err = check(p)
		}
		return err
	})
	return p
}

// awaitRunning waits until the pod runs.
func (c *cluster) awaitRunning(t *testing.T, name string) {
	t.Helper()
	c.awaitPod(t, name, "to run", func(p pod) error {
		if p.Status.Phase != "Running" {
			return fmt.Errorf("it is %s: %s %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		return nil
	})
}

// awaitInsufficient waits until the scheduler has found too little of the resource for the pod.
func (c *cluster) awaitInsufficient(t *testing.T, name, resource string) {
	t.Helper()
	c.awaitPod(t, name, "to be unschedulable", func(p pod) error {
		for _, condition := range p.Status.Conditions {
			if strings.Contains(condition.Message, "Insufficient "+resource) {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", p.Status.Conditions)
	})
}

// awaitHealth waits until the pod's status shows this health of a GPU that it holds.
func (c *cluster) awaitHealth(t *testing.T, name, id, health string) {
	t.Helper()
	c.awaitPod(t, name, "to show in its status that "+id+" is "+health, func(p pod) error {
		if p.health()[id] != health {
			return fmt.Errorf("it shows %q", p.health())
		}
		return nil
	})
	t.Logf("pod %s: %s is %s", name, id, health)
}

// awaitUnchanged waits until the pod is seen running in the container and with the devices that it had. One that
// was restarted never is.
func (c *cluster) awaitUnchanged(t *testing.T, name string, was pod) {
	t.Helper()
	c.awaitPod(t, name, "to be as it was", func(p pod) error {
		if p.identity() != was.identity() {
			return fmt.Errorf("it was %s, it is %s", was.identity(), p.identity())
		}
		return nil
	})
	t.Logf("pod %s still is %s", name, was.identity())
}

// killContainers kills the containers that a pod had.
func (n *kubeNode) killContainers(t *testing.T, was pod) {
	t.Helper()
	for _, id := range was.containers() {
		if _, err := n.ctr("tasks", "kill", "--signal", "SIGKILL", id); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitAnother waits until another container of a pod runs than it had.
func (c *cluster) awaitAnother(t *testing.T, was pod) {
	t.Helper()
	began := time.Now()
	c.awaitPod(t, was.Metadata.Name, "to have another container", func(p pod) error {
		ids := p.containers()
		if len(ids) != 1 || ids[0] == "" || slices.Equal(ids, was.containers()) || p.Status.ContainerStatuses[0].State.Running.StartedAt == "" {
			return fmt.Errorf("it is %+v", p.Status)
		}
		return nil
	})
	t.Logf("pod %s has another container after %v", was.Metadata.Name, time.Since(began).Round(time.Millisecond))
}

// awaitRefused waits until kubelet has rejected the pod because the plugin refused, for this reason.
func (c *cluster) awaitRefused(t *testing.T, name, why string) {
	t.Helper()
	c.awaitRejected(t, name, "UnexpectedAdmissionError", why)
}

// awaitRejected waits until kubelet has rejected the pod for this reason, and checks that the message has the text.
func (c *cluster) awaitRejected(t *testing.T, name, reason, text string) {
	t.Helper()
	p := c.awaitPod(t, name, "to be rejected: "+reason, func(p pod) error {
		if p.Status.Reason != reason {
			return fmt.Errorf("it is %s: %s %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		return nil
	})
	t.Logf("pod %s: %s: %s", name, p.Status.Reason, p.Status.Message)
	if !strings.Contains(p.Status.Message, text) {
		t.Errorf("want %q", text)
	}
}

// remove deletes pods and waits until they are gone, and their units free.
func (c *cluster) remove(t *testing.T, names ...string) {
	t.Helper()
	must(t, append([]string{"kubectl", "delete", "pod"}, names...)...)
}
