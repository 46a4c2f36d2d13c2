package watchdog

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"
)

const (
	checkEvery = 5 * time.Second
	fatalAfter = time.Minute // for which a vital task is overdue before Watch fails
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
// check counts.
func (r *Registry) Watch(ctx context.Context, log *slog.Logger, vital ...string) error {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	late := map[string]int{} // checks in a row
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		next := map[string]int{}
		for _, s := range r.Late(time.Now()) {
			if next[s.Name] != 0 {
				continue // one task of a name is enough
			}
			next[s.Name] = late[s.Name] + 1
			if next[s.Name] == 2 {
				log.Error("watchdog: task overdue", "task", s.Name, "since", s.Last.UTC(), "expected_within", s.Within)
			}
			if time.Duration(next[s.Name])*checkEvery > fatalAfter && slices.Contains(vital, s.Name) {
				return &StuckError{s.Name, s.Last}
			}
		}
		for name, checks := range late {
			if checks > 1 && next[name] == 0 {
				log.Info("watchdog: task no longer overdue", "task", name)
			}
		}
		late = next
	}
}
