// Package watchdog detects goroutines of an agent that hang. Each long-lived goroutine is a task that sends a heartbeat in every
// iteration, with the time within which the next one follows. A task without it is overdue: it hangs in the agent's code, on a
// disk or in a peer that does not read. Driver calls are checked by the monitor.
package watchdog

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Registry has the status of each task. It is safe for concurrent use; a nil *Registry records nothing.
type Registry struct {
	mu    sync.Mutex
	tasks map[*Task]Status
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry { return &Registry{tasks: map[*Task]Status{}} }

// Task is one goroutine in a registry. All methods of a nil *Task do nothing.
type Task struct{ registry *Registry }

// Status is the latest status of a task.
type Status struct {
	Name   string
	Began  time.Time
	Last   time.Time     // of the latest heartbeat
	Within time.Duration // until the next heartbeat; 0 = the task waits for an event that may never happen
	Beats  uint64        // number of heartbeats
}

// slack is the delay that a node under load may add to Within.
const slack = 5 * time.Second

// Late reports whether the next heartbeat is overdue.
func (s Status) Late(now time.Time) bool { return s.Within > 0 && now.Sub(s.Last) > s.Within+slack }

// Register adds a task, which is not overdue before its first heartbeat. Call Done when it ends.
func (r *Registry) Register(name string) *Task {
	if r == nil {
		return nil
	}
	t := &Task{r}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.tasks[t] = Status{Name: name, Began: now, Last: now}
	return t
}

// Heartbeat records that the task runs. The next heartbeat follows within that time; 0 = the task waits for an event that may
// never happen.
func (t *Task) Heartbeat(within time.Duration) {
	if t == nil {
		return
	}
	t.registry.mu.Lock()
	defer t.registry.mu.Unlock()
	if s, ok := t.registry.tasks[t]; ok {
		s.Last, s.Within = time.Now(), within
		s.Beats++
		t.registry.tasks[t] = s
	}
}

// Late reports whether the next heartbeat of the task is overdue.
func (t *Task) Late(now time.Time) bool {
	if t == nil {
		return false
	}
	t.registry.mu.Lock()
	defer t.registry.mu.Unlock()
	return t.registry.tasks[t].Late(now)
}

// Done removes the task.
func (t *Task) Done() {
	if t == nil {
		return
	}
	t.registry.mu.Lock()
	defer t.registry.mu.Unlock()
	delete(t.registry.tasks, t)
}

// Tasks are the registered tasks, by name and then by age.
func (r *Registry) Tasks() []Status {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Status, 0, len(r.tasks))
	for _, s := range r.tasks {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Status) int { return cmp.Or(cmp.Compare(a.Name, b.Name), a.Began.Compare(b.Began)) })
	return all
}

// Late are the tasks whose heartbeat is overdue.
func (r *Registry) Late(now time.Time) []Status {
	return slices.DeleteFunc(r.Tasks(), func(s Status) bool { return !s.Late(now) })
}

const (
	checkEvery = 10 * time.Second // while no task is overdue
	checkAgain = 5 * time.Second  // while one is
	fatalAfter = time.Minute      // for which a vital task is overdue before Watch fails
)

// StuckError is returned if a task without which the agent is of no use hangs, so that only a new process helps.
type StuckError struct {
	Task string
	Last time.Time // of its latest heartbeat
}

// Error names the task and its latest heartbeat.
func (e *StuckError) Error() string {
	return fmt.Sprintf("%s has been stuck since %s", e.Task, e.Last.UTC().Format(time.RFC3339))
}

// Watch logs which tasks are overdue, and when their heartbeats resume, until ctx ends (nil) or a vital task has been overdue for
// a minute (*StuckError). In a process that was stopped for a while all tasks are overdue: only one that still is at the next
// check counts. So a task is logged within 15 s after it is overdue.
func (r *Registry) Watch(ctx context.Context, log *slog.Logger, vital ...string) error {
	check := time.NewTimer(checkEvery)
	defer check.Stop()
	late := map[string]int{} // checks in a row
	for {
		select {
		case <-check.C:
		case <-ctx.Done():
			return nil
		}
		overdue := map[string]int{}
		for _, s := range r.Late(time.Now()) {
			if overdue[s.Name] != 0 {
				continue // one task of a name is enough
			}
			overdue[s.Name] = late[s.Name] + 1
			if overdue[s.Name] == 2 {
				log.Error("watchdog: task overdue", "task", s.Name, "since", s.Last.UTC(), "expected_within", s.Within)
			}
			if time.Duration(overdue[s.Name])*checkAgain > fatalAfter && slices.Contains(vital, s.Name) {
				return &StuckError{s.Name, s.Last}
			}
		}
		for name, checks := range late {
			if checks > 1 && overdue[name] == 0 {
				log.Info("watchdog: task no longer overdue", "task", name)
			}
		}
		if late = overdue; len(late) > 0 {
			check.Reset(checkAgain)
		} else {
			check.Reset(checkEvery)
		}
	}
}
