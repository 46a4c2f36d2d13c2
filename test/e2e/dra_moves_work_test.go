//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// works has pods with claims, pods with extended resources and Nomad jobs come and go, each with one GPU, on a host whose GPUs move between
// the three.
type works struct {
	*cluster
	nomad *agent

	stopping chan struct{}
	stopped  sync.WaitGroup

	mu       sync.Mutex
	outcomes map[string]int // by kind and what became of it
	problems []string
}

const (
	worksWait = 8 * time.Second        // for a GPU, until work gives up: there may be none of its API
	worksLook = 200 * time.Millisecond // between two looks at work
)

// kinds of work, each with the function that begins it, that tells how it is, and that ends it.
func (w *works) kinds() map[string]kind {
	pods := func(template string) kind {
		return kind{
			begin: func(name string) error { return send(http.MethodPost, podsURL, sleeper(name, template, "1000000")) },
			phase: func(name string) (string, error) {
				p, err := w.pod(name)
				return p.Status.Phase + p.trouble(), err
			},
			end: func(name string) error { return send(http.MethodDelete, podsURL+"/"+name, nil) },
			gone: func(name string) bool {
				return hasStatus(send(http.MethodGet, podsURL+"/"+name, nil), http.StatusNotFound)
			},
		}
	}
	return map[string]kind{
		"claim": pods(oneGPU), "extended": pods(""),
		"nomad": {begin: beginJob, phase: w.nomad.phase, end: endJob, gone: w.nomad.without},
	}
}

type kind struct {
	begin, end func(name string) error
	phase      func(name string) (string, error) // "Running"; what begins with "Failed" ends it
	gone       func(name string) bool
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

// startWorks has two works of each kind at a time on a machine of eight GPUs, and more, with less for each GPU, on a greater one.
func startWorks(t *testing.T, c *cluster, nomad *agent, gpus int, seed uint64) *works {
	t.Helper()
	createTemplate(t)
	w := &works{cluster: c, nomad: nomad, stopping: make(chan struct{}), outcomes: map[string]int{}}
	for name, k := range w.kinds() {
		for i := range max(2, gpus/10) {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			w.stopped.Go(func() { w.run(fmt.Sprintf("%s-%d", name, i), name, k, random) })
		}
	}
	return w
}

func (w *works) run(prefix, of string, k kind, random *rand.Rand) {
	for i := 0; ; i++ {
		select {
		case <-w.stopping:
			return
		default:
			w.one(fmt.Sprintf("%s-%d", prefix, i), of, k, random)
		}
	}
}

// one begins work, lets it run for a while if it gets a GPU, and ends it.
func (w *works) one(name, of string, k kind, random *rand.Rand) {
	phase := "not created"
	for began := time.Now(); time.Since(began) < worksWait && phase != "Running" && !strings.HasPrefix(phase, "Failed"); time.Sleep(worksLook) {
		if phase == "not created" && k.begin(name) != nil {
			continue
		}
		if now, err := k.phase(name); err == nil {
			phase = now
		}
	}
	if phase == "Running" {
		pause(random, 4*time.Second)
	}
	w.note(of, phase, "")
	for ending := time.Now(); !k.gone(name); time.Sleep(worksLook) {
		_ = k.end(name)
		if time.Since(ending) > churnAtMost {
			w.note(of, "stuck", fmt.Sprintf("%s is there %v after its end", name, time.Since(ending)))
			return
		}
	}
}

func (w *works) note(of, outcome, problem string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	outcome, _, _ = strings.Cut(outcome, ":")
	w.outcomes[of+" "+outcome]++
	if problem != "" {
		w.problems = append(w.problems, problem)
	}
}

// stop ends it, and fails if work did not end or none ran.
func (w *works) stop(t *testing.T) {
	t.Helper()
	close(w.stopping)
	w.stopped.Wait()
	for _, problem := range w.problems {
		t.Error(problem)
	}
	for _, outcome := range slices.Sorted(maps.Keys(w.outcomes)) {
		t.Logf("%4d %s", w.outcomes[outcome], outcome)
	}
	for of := range w.kinds() {
		if w.outcomes[of+" Running"] == 0 {
			t.Errorf("no work of kind %s ran", of)
		}
	}
}

// beginJob submits a job that sleeps with one GPU, and is not tried again.
func beginJob(name string) error {
	none := map[string]any{"Attempts": 0, "Mode": "fail", "Unlimited": false}
	return send(http.MethodPut, nomadAPI+"/v1/jobs", map[string]any{"Job": map[string]any{
		"ID": name, "Name": name, "Type": "batch", "Datacenters": []string{"*"},
		"TaskGroups": []any{map[string]any{
			"Name": "gpus", "RestartPolicy": none, "ReschedulePolicy": map[string]any{"Attempts": 0, "Unlimited": false},
			"Tasks": []any{map[string]any{
				"Name": "gpus", "Driver": "raw_exec", "KillTimeout": int64(time.Second),
				"Config": map[string]any{"command": "/bin/sh", "args": []string{"-c", "exec sleep 1000000"}},
				"Resources": map[string]any{
					"CPU": 20, "MemoryMB": 16, "Devices": []any{map[string]any{"Name": "nvidia/gpu", "Count": 1}},
				},
			}},
		}},
	}})
}

// endJob stops a job. It is purged by without, since the servers take the GPU of a purged job for free while its client still ends the task.
func endJob(name string) error { return send(http.MethodDelete, nomadAPI+"/v1/job/"+name, nil) }

// phase is that of a job's only allocation, in the words of Kubernetes.
func (a *agent) phase(job string) (string, error) {
	var list []allocation
	err := a.get("/v1/job/"+job+"/allocations", &list)
	if err != nil || len(list) == 0 {
		return "Pending", err
	}
	switch list[0].ClientStatus {
	case "running":
		return "Running", nil
	case "failed", "lost":
		return "Failed", nil
	default:
		return "Pending", nil
	}
}

// without reports whether no allocation of the job runs, and has the job forgotten.
func (a *agent) without(job string) bool {
	var list []allocation
	if err := a.get("/v1/job/"+job+"/allocations", &list); err != nil {
		return false
	}
	running := slices.ContainsFunc(list, func(alloc allocation) bool { return alloc.ClientStatus == "running" || alloc.ClientStatus == "pending" })
	return !running && send(http.MethodDelete, nomadAPI+"/v1/job/"+job+"?purge=true", nil) == nil
}
