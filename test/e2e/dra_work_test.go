//go:build e2e

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
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

// works has work come and go, each with one GPU, until it is stopped.
type works struct {
	*cluster
	wait, stay time.Duration // how long work waits for a GPU, and runs with it at most
	must       bool          // work that does not run is a problem, as there is a GPU for each

	kinds    []string
	stopping chan struct{}
	stopped  sync.WaitGroup
	ran      chan struct{} // capacity 1: work runs, or has given up

	mu           sync.Mutex
	outcomes     map[string]int  // by kind and what became of it
	began, ended []time.Duration // how long each took to run, and to be gone
	problems     []string
}

// kind is a kind of work.
type kind struct {
	begin, end func(name string) error
	phase      func(name string) (string, error) // "Running"; what begins with "Failed" ends it
	gone       func(name string) bool
}

const (
	// worksAtMost is how long work may take to run or to be gone: kubelet tries a failed Prepare again after a minute by default, and after 5 to 8
	// seconds here.
	worksAtMost = 90 * time.Second
	worksLook   = 100 * time.Millisecond // between two looks at work
)

func (c *cluster) newWorks(t *testing.T, wait, stay time.Duration) *works {
	t.Helper()
	createTemplate(t)
	return &works{cluster: c, wait: wait, stay: stay, stopping: make(chan struct{}), ran: make(chan struct{}, 1), outcomes: map[string]int{}}
}

// startChurn has pods with claims and pods with extended resources come and go. All must run.
func startChurn(t *testing.T, c *cluster, name string) *works {
	t.Helper()
	w := c.newWorks(t, worksAtMost, 0)
	w.must = true
	w.start(name+"-claim", "claim", c.pods(oneGPU), nil)
	w.start(name+"-extended", "extended", c.pods(""), nil)
	return w
}

// pods are those with a GPU by the claim template, or by the extended resource if that is "".
func (c *cluster) pods(template string) kind {
	return kind{
		begin: func(name string) error { return send(http.MethodPost, podsURL, sleeper(name, template, "1000000")) },
		phase: func(name string) (string, error) {
			p, err := c.pod(name)
			return p.Status.Phase + p.trouble(), err
		},
		end: func(name string) error { return send(http.MethodDelete, podsURL+"/"+name, nil) },
		gone: func(name string) bool {
			_, err := fetch(podsURL + "/" + name)
			return hasStatus(err, http.StatusNotFound)
		},
	}
}

// trouble is why no container of the pod can be made: "" = it can.
func (p pod) trouble() string {
	for _, container := range p.Status.ContainerStatuses {
		if waiting := container.State.Waiting; waiting.Reason != "" && waiting.Reason != "ContainerCreating" {
			return " " + waiting.Reason + ": " + waiting.Message
		}
	}
	return ""
}

// start has works of a kind come and go, one after the other.
func (w *works) start(name, of string, k kind, random *rand.Rand) {
	w.kinds = append(w.kinds, of)
	w.stopped.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-w.stopping:
				return
			default:
				w.one(fmt.Sprintf("%s-%d", name, i), of, k, random)
			}
		}
	})
}

// one begins work, lets it run for a while if it gets a GPU, and ends it.
func (w *works) one(name, of string, k kind, random *rand.Rand) {
	phase, began := "not created", time.Now()
	for ; time.Since(began) < w.wait && phase != "Running" && !strings.HasPrefix(phase, "Failed"); time.Sleep(worksLook) {
		if phase == "not created" && k.begin(name) != nil {
			continue // the API server is away
		}
		if now, err := k.phase(name); err == nil {
			phase = now
		}
	}
	w.note(name, of, phase, time.Since(began))
	watch.Notify(w.ran)
	if phase == "Running" && w.stay > 0 {
		pause(random, w.stay)
	}
	ending := time.Now()
	for ; !k.gone(name); time.Sleep(worksLook) {
		_ = k.end(name)
		if time.Since(ending) > worksAtMost {
			w.problem(fmt.Sprintf("%s is there %v after its end; %s", name, time.Since(ending), w.events(name)))
			return
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = append(w.ended, time.Since(ending))
}

// note notes what became of work.
func (w *works) note(name, of, phase string, took time.Duration) {
	if phase != "Running" && w.must {
		w.problem(fmt.Sprintf("%s after %v: %s; %s", name, took, phase, w.events(name)))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	outcome, _, _ := strings.Cut(phase, ":")
	w.outcomes[of+" "+outcome]++
	if phase == "Running" {
		w.began = append(w.began, took)
	}
}

func (w *works) problem(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, text)
}

// next waits until more work runs, or has given up.
func (w *works) next() {
	select {
	case <-w.ran:
	default:
	}
	<-w.ran
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

// stop ends it, and fails if work did not end, or did not run that must, or none of a kind ran.
func (w *works) stop(t *testing.T) {
	t.Helper()
	close(w.stopping)
	w.stopped.Wait()
	for _, problem := range w.problems {
		t.Error(problem)
	}
	for _, of := range w.kinds {
		if w.outcomes[of+" Running"] == 0 {
			t.Fatalf("no work of kind %s ran: %v", of, w.outcomes)
		}
	}
	t.Logf("works: %v; ran after: %s; were gone after: %s", w.outcomes, percentiles(w.began), percentiles(w.ended))
}
