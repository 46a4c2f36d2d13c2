//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// allocation is the part of an allocation that tests use.
type allocation struct {
	ID, ClientStatus               string
	JobID, NodeName, DesiredStatus string
	PreviousAllocation             string
	RescheduleTracker              *struct{}
	AllocatedResources             struct {
		Tasks map[string]struct {
			Devices []struct{ DeviceIDs []string }
		}
	}
	TaskStates map[string]struct {
		StartedAt time.Time
		Restarts  int
		Events    []struct{ DisplayMessage string }
	}
}

// identity returns what stays while the allocation's tasks run.
func (alloc allocation) identity() string {
	text := alloc.ID + " " + alloc.ClientStatus
	for name, task := range alloc.TaskStates {
		text += fmt.Sprintf(", task %s since %v, restarted %d times", name, task.StartedAt, task.Restarts)
	}
	return fmt.Sprintf("%s, devices %s", text, alloc.devices())
}

func (a *agent) submit(t *testing.T, file string, vars ...string) {
	t.Helper()
	argv := []string{"nomad", "job", "run", "-address=" + nomadAPI, "-detach"}
	for _, v := range vars {
		argv = append(argv, "-var", v)
	}
	must(t, append(argv, filepath.Join("testdata", file))...)
}

// allocation returns the job's only allocation.
func (a *agent) allocation(job string) (allocation, error) {
	var list []allocation
	if err := a.get("/v1/job/"+job+"/allocations", &list); err != nil {
		return allocation{}, err
	}
	if len(list) != 1 {
		return allocation{}, fmt.Errorf("its allocations are %+v", list)
	}
	var alloc allocation
	err := a.get("/v1/allocation/"+list[0].ID, &alloc)
	return alloc, err
}

// devices returns the ids that Nomad's scheduler chose, in order.
func (alloc allocation) devices() []string {
	var ids []string
	for _, task := range alloc.AllocatedResources.Tasks {
		for _, device := range task.Devices {
			ids = append(ids, device.DeviceIDs...)
		}
	}
	slices.Sort(ids)
	return ids
}

// runJob runs the job gpus.nomad.hcl under a name of its own, waits for the wanted status of its
// allocation, checks that its task printed the devices that Nomad chose, and returns them and what it printed.
func (a *agent) runJob(t *testing.T, name, status string, vars ...string) (ids []string, output string) {
	t.Helper()
	a.submit(t, "gpus.nomad.hcl", append(vars, "name="+name)...)
	return a.awaitWork(t, name, status)
}

// awaitWork waits until the job's allocation has the status and its task has printed the devices that Nomad chose.
func (a *agent) awaitWork(t *testing.T, name, status string) (ids []string, output string) {
	t.Helper()
	var alloc allocation
	await(t, "job "+name+" to be "+status, 60*time.Second, func() (err error) {
		if alloc, err = a.allocation(name); err == nil && alloc.ClientStatus != status {
			err = fmt.Errorf("it is %s: %+v", alloc.ClientStatus, alloc.TaskStates)
		}
		return err
	})
	await(t, "the log of job "+name, 30*time.Second, func() (err error) {
		output, err = alloc.log("gpus", "stdout")
		if err == nil && output == "" {
			err = errors.New("it is empty")
		}
		return err
	})
	output = strings.TrimSpace(output)
	t.Logf("output of job %s: %s", name, output)
	for _, id := range alloc.devices() {
		if !strings.Contains(output, deviceOf(id)) {
			t.Errorf("Nomad allocated %s, the task printed %q", id, output)
		}
	}
	return alloc.devices(), output
}

// log is what a task of the allocation has written to stdout or stderr. Nomad copies that each 100 ms, so lines can come apart.
func (a allocation) log(task, stream string) (string, error) {
	return fetch(nomadAPI + "/v1/client/fs/logs/" + a.ID + "?task=" + task + "&type=" + stream + "&plain=true")
}

// awaitOutput waits until a task has written a text to stdout, and returns what it has written.
func awaitOutput(t *testing.T, a allocation, task, text string) (output string) {
	t.Helper()
	await(t, "the output of "+a.JobID, 60*time.Second, func() (err error) {
		if output, err = a.log(task, "stdout"); err == nil && !strings.Contains(output, text) {
			err = fmt.Errorf("it is %q", output)
		}
		return err
	})
	return output
}

// awaitBlocked waits until the scheduler has found no place for the job, and returns why.
func (a *agent) awaitBlocked(t *testing.T, job string) (why string) {
	t.Helper()
	await(t, "job "+job+" to be blocked", 60*time.Second, func() error {
		var evals []struct {
			Status         string
			FailedTGAllocs map[string]struct{ ConstraintFiltered, DimensionExhausted map[string]int }
		}
		if err := a.get("/v1/job/"+job+"/evaluations", &evals); err != nil {
			return err
		}
		blocked := false
		for _, eval := range evals {
			blocked = blocked || eval.Status == "blocked"
			for _, failed := range eval.FailedTGAllocs {
				why = fmt.Sprint(failed.ConstraintFiltered, failed.DimensionExhausted)
			}
		}
		if !blocked || why == "" {
			return fmt.Errorf("its evaluations are %+v", evals)
		}
		return nil
	})
	t.Logf("job %s is blocked, nodes filtered and exhausted: %s", job, why)
	return why
}

// awaitComplete waits until the job is done, on so many devices.
func (a *agent) awaitComplete(t *testing.T, job string, count int) {
	t.Helper()
	await(t, "job "+job+" to complete", 60*time.Second, func() error {
		alloc, err := a.allocation(job)
		if err == nil && (alloc.ClientStatus != "complete" || len(alloc.devices()) != count) {
			err = fmt.Errorf("it is %s on %q", alloc.ClientStatus, alloc.devices())
		}
		return err
	})
}

// awaitRefused waits until an allocation of the job has failed because the plugin refused, for this reason. Nomad tries
// a batch job once more after a while.
func (a *agent) awaitRefused(t *testing.T, job, reason string) {
	t.Helper()
	await(t, "job "+job+" to fail because: "+reason, 60*time.Second, func() error {
		var list []allocation
		if err := a.get("/v1/job/"+job+"/allocations", &list); err != nil {
			return err
		}
		for _, alloc := range list {
			if message, found := alloc.event(reason); found && alloc.ClientStatus == "failed" {
				t.Logf("job %s: %s", job, message)
				return nil
			}
		}
		return fmt.Errorf("its allocations are %+v", list)
	})
}

// event returns the message of an event of the allocation's tasks that contains the text.
func (alloc allocation) event(text string) (string, bool) {
	for _, task := range alloc.TaskStates {
		for _, event := range task.Events {
			if strings.Contains(event.DisplayMessage, text) {
				return event.DisplayMessage, true
			}
		}
	}
	return "", false
}

// remove stops jobs and forgets them.
func (a *agent) remove(t *testing.T, jobs ...string) {
	t.Helper()
	for _, job := range jobs {
		must(t, "nomad", "job", "stop", "-address="+nomadAPI, "-purge", "-detach", job)
	}
}
