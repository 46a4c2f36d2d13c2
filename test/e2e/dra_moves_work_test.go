//go:build e2e

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"
)

// worksWait is how long work waits for a GPU until it gives up: there may be none of its API.
const worksWait = 8 * time.Second

// startWorks has pods with claims, pods with extended resources and Nomad jobs come and go on a node whose GPUs move between the three: two of
// each kind at a time on a machine of eight GPUs, and more, with less for each GPU, on a greater one.
func startWorks(t *testing.T, c *cluster, nomad *agent, gpus int, seed uint64) *works {
	t.Helper()
	w := c.newWorks(t, worksWait, 4*time.Second)
	for of, k := range map[string]kind{
		"claim": c.pods(oneGPU), "extended": c.pods(""), "nomad": {begin: beginJob, phase: nomad.phase, end: endJob, gone: nomad.without},
	} {
		for i := range max(2, gpus/10) {
			w.start(fmt.Sprintf("%s-%d", of, i), of, k, rand.New(rand.NewPCG(seed, uint64(i))))
		}
	}
	return w
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
