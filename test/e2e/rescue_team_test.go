//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// team is what one gpu-fleet looks after: node1, whose GPUs 0 to 3 are Nomad's and 4 to 7 Kubernetes'; node2, which is another node of
// Kubernetes; and node3, which is another one of Nomad.
type team struct {
	*fleet
	kube     *cluster
	machines map[string]*simdriver.Machine // by the names of the nodes in both orchestrators
}

// startTeam starts it with a policy of node1, and with so many more GPUs of node2 and of node3. The agents of node1 share their state directory.
func startTeam(t *testing.T, policy string, gpus int, parts ...string) *team {
	t.Helper()
	writePolicy(t, policy)
	text, err := os.ReadFile(filepath.Join(policyDir(), "policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	proof := regexp.MustCompile(`command: \[/usr/bin/k8s-gpu.*`)
	nomadPolicy := write(t, "policy/nomad.yaml", proof.ReplaceAll(text, []byte("command: [/bin/sh, -c, sleep 2]"))) // it has another program
	writeIn(t, filepath.Join(stateDir(), "node2"), "policy/policy.yaml", []byte("version: v1\n"))
	render(t, "parts/own/kustomization.yaml", map[string]string{"POLICY": policyDir()})
	tm := &team{fleet: startFleetWith(t, fmt.Sprintf("policy_file = %q\nnomad_address = \"http://127.0.0.1:%d\"", nomadPolicy, clientPort), 4), kube: startCluster(t, pluginImage())}
	second, machine := tm.kube.addNode(t, containerd2, "l40s")
	addGPUs(t, machine, gpus)
	tm.machines = map[string]*simdriver.Machine{"h100": tm.machine, "l40s": tm.other, "node1": tm.machine, "node2": machine}
	tm.kube.deployPlugin(t, tm.machine.Root, h100History, append(parts, "parts/own")...)
	tm.kube.awaitGPUs(t, 4, 4)
	tm.kube.age(t)
	second.age(t)
	second.awaitGPUs(t, 8+gpus, 8+gpus)
	addGPUs(t, tm.other, gpus)
	tm.l40s.awaitGPUs(t, 6+gpus, 6+gpus)
	return tm
}

// addGPUs adds so many to a machine.
func addGPUs(t *testing.T, m *simdriver.Machine, count int) {
	t.Helper()
	for i := range count {
		slot := 8 + i
		if err := m.Add(slot, fmt.Sprintf("minor = %d", slot)); err != nil {
			t.Fatal(err)
		}
	}
}

// place is where a workload runs.
type place struct {
	id   string // of the allocation; UID of the pod
	name string // of the pod
	node string
	gpu  string
}

// fail makes a GPU need a reset.
func (tm *team) fail(t *testing.T, at place) { t.Helper(); failGPU(t, tm.machines[at.node], at.gpu) }

// failGPU has a GPU report an uncontained memory error, after which it needs a reset. Another one within an hour would need service, which ends by no
// reset: so the tests have each GPU fail once. The XID comes first: a health check between the two would find a fault without it.
func failGPU(t *testing.T, m *simdriver.Machine, gpu string) {
	t.Helper()
	slot := slotOf(t, m, gpu)
	if err := errors.Join(m.XID(slot, 95), m.Set(slot, "recovery_action", "1")); err != nil {
		t.Fatal(err)
	}
}

// repairAll resets all GPUs of machines.
func repairAll(t *testing.T, machines ...*simdriver.Machine) {
	t.Helper()
	for _, m := range machines {
		slots, err := m.Slots()
		for _, slot := range slots {
			err = errors.Join(err, m.Reset(slot))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// workload is one that its orchestrator replaces: an allocation of a job, or a pod of a Deployment.
type workload struct {
	orchestrator string
	byHand       string                  // the request of stop
	runs         func() ([]place, error) // where it runs now
	stop         func(place) error       // by hand, as gpu-fleet does
}

// nomadWork is the job of this name.
func nomadWork(job string) workload {
	query := url.Values{"resources": {"true"}, "filter": {fmt.Sprintf("JobID == %q and DesiredStatus == run and ClientStatus == running", job)}}
	return workload{
		"Nomad", "alloc stop",
		func() (all []place, err error) {
			var list []allocation
			err = fetchJSON(nomadAPI+"/v1/allocations?"+query.Encode(), &list)
			for _, a := range list {
				all = append(all, place{a.ID, a.ID, a.NodeName, firstOf(a.devices())})
			}
			return all, err
		},
		func(at place) error { return send(http.MethodPut, nomadAPI+"/v1/allocation/"+at.id+"/stop", nil) },
	}
}

// kubeWork is the Deployment of this name.
func (c *cluster) kubeWork(app string) workload {
	return workload{
		"Kubernetes", "eviction",
		func() (all []place, err error) {
			list, err := c.podsOf(app)
			for _, p := range list {
				if p.Status.Phase == "Running" && p.Metadata.DeletionTimestamp == "" {
					all = append(all, place{p.Metadata.UID, p.Metadata.Name, p.Spec.NodeName, firstOf(p.ids())})
				}
			}
			return all, err
		},
		func(at place) error {
			return send(http.MethodPost, kubeAPI+"/api/v1/namespaces/default/pods/"+at.name+"/eviction", map[string]any{
				"apiVersion": "policy/v1", "kind": "Eviction", "metadata": map[string]any{"name": at.name, "namespace": "default"},
				"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": at.id}},
			})
		},
	}
}

func firstOf(ids []string) string {
	if len(ids) == 0 {
		return ""
	}
	return ids[0]
}

// awaitElsewhere waits until the workload runs in one place that is not the one of before, and returns how long after since that was.
func (w workload) awaitElsewhere(t *testing.T, was place, since time.Time) (now place, took time.Duration) {
	t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		all, err := w.runs()
		for _, p := range all {
			if p.id != was.id && took == 0 {
				took = time.Since(since)
			}
		}
		if len(all) == 1 && all[0].id != was.id && all[0].gpu != "" {
			return all[0], took
		}
		if time.Now().After(deadline) {
			t.Fatalf("90 s after it was in %+v the workload of %s runs in %+v, error %v", was, w.orchestrator, all, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
