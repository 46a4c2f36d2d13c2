//go:build e2e

package e2e

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const podsURL = kubeAPI + "/api/v1/namespaces/default/pods"

// sleeper is a pod that sleeps for so long, with one GPU: by the claim template, or by the extended resource if that is "".
func sleeper(name, template, seconds string) map[string]any {
	container := map[string]any{
		"name": "gpus", "image": "localhost/busybox:1", "imagePullPolicy": "Never", "command": []string{"sleep", seconds},
	}
	spec := map[string]any{
		"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false, "enableServiceLinks": false,
		"containers": []any{container},
	}
	if template == "" {
		container["resources"] = map[string]any{"limits": map[string]any{gpuResource: 1}}
	} else {
		container["resources"] = map[string]any{"claims": []any{map[string]any{"name": "gpu"}}}
		spec["resourceClaims"] = []any{map[string]any{"name": "gpu", "resourceClaimTemplateName": template}}
	}
	return map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name, "labels": map[string]any{"app": "sleeper"}}, "spec": spec}
}

// oneGPU is the template of a claim for one GPU.
const oneGPU = "one-gpu"

func createTemplate(t *testing.T) {
	t.Helper()
	err := send(http.MethodPost, kubeAPI+"/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates", map[string]any{
		"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": map[string]any{"name": oneGPU},
		"spec": map[string]any{"spec": map[string]any{"devices": map[string]any{"requests": []any{
			map[string]any{"name": "gpu", "exactly": map[string]any{"deviceClassName": draDriver}},
		}}}},
	})
	if err != nil && !hasStatus(err, http.StatusConflict) {
		t.Fatal(err)
	}
}

// churn has pods come and go, one after the other, until it is stopped.
type churn struct {
	*cluster
	stopping chan struct{}
	stopped  sync.WaitGroup

	ran      chan struct{}   // capacity 1: a pod runs
	began    []time.Duration // how long each took to run
	ended    []time.Duration // how long each took to be gone
	problems []string
}

// churnAtMost is how long a pod may take to run: kubelet tries a failed Prepare again after a minute by default, and after 5 to 8 seconds here.
const churnAtMost = 90 * time.Second

func startChurn(t *testing.T, c *cluster, name string) *churn {
	t.Helper()
	createTemplate(t)
	ch := &churn{cluster: c, stopping: make(chan struct{}), ran: make(chan struct{}, 1)}
	ch.stopped.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-ch.stopping:
				return
			default:
				template := oneGPU
				if i%2 == 1 {
					template = ""
				}
				ch.one(fmt.Sprintf("%s-%d", name, i), template)
			}
		}
	})
	return ch
}

// one has a pod run and end.
func (ch *churn) one(name, template string) {
	began := time.Now()
	for send(http.MethodPost, podsURL, sleeper(name, template, "1000000")) != nil && time.Since(began) < churnAtMost {
		time.Sleep(lookEvery) // the API server is away
	}
	var p pod
	for ; p.Status.Phase != "Running" && time.Since(began) < churnAtMost; time.Sleep(lookEvery) {
		p, _ = ch.pod(name)
		if p.Status.Phase == "Failed" {
			break
		}
	}
	if p.Status.Phase != "Running" {
		ch.problems = append(ch.problems, fmt.Sprintf("pod %s after %v: %+v; %s", name, time.Since(began), p.Status, ch.events(name)))
	}
	ch.began = append(ch.began, time.Since(began))
	watch.Notify(ch.ran)
	ending := time.Now()
	for {
		if _ = send(http.MethodDelete, podsURL+"/"+name, nil); time.Since(ending) > churnAtMost {
			ch.problems = append(ch.problems, fmt.Sprintf("pod %s is there %v after its end: %+v; %s", name, time.Since(ending), p.Status, ch.events(name)))
			return
		}
		err := send(http.MethodGet, podsURL+"/"+name, nil)
		if hasStatus(err, http.StatusNotFound) {
			break
		}
		time.Sleep(lookEvery)
	}
	ch.ended = append(ch.ended, time.Since(ending))
}

// next waits until another pod runs, or has failed.
func (ch *churn) next() {
	select {
	case <-ch.ran:
	default:
	}
	<-ch.ran
}

// events are those of a pod.
func (c *cluster) events(name string) string {
	var list struct {
		Items []struct {
			Reason, Message string
			Count           int
		}
	}
	err := c.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name="+name, &list)
	return fmt.Sprintf("its events %+v, error %v", list.Items, err)
}

// stop ends it, and fails if a pod did not run or did not end.
func (ch *churn) stop(t *testing.T) {
	t.Helper()
	close(ch.stopping)
	ch.stopped.Wait()
	for _, problem := range ch.problems {
		t.Error(problem)
	}
	if len(ch.began) == 0 || len(ch.ended) == 0 {
		t.Fatal("no pod ran")
	}
	t.Logf("pods ran after: %s; were gone after: %s", percentiles(ch.began), percentiles(ch.ended))
}
