package watchdog

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"
)

const (
	look = 5 * time.Second // between looks at the board
	lost = time.Minute     // for which a loop is late before nobody waits for it any more
)

// StuckError says that a loop which the agent can't do without does not turn any more, so that only a new process
// helps.
type StuckError struct {
	Task string
	Last time.Time // its latest beat
}

func (e *StuckError) Error() string {
	return fmt.Sprintf("%s has been stuck since %s", e.Task, e.Last.UTC().Format(time.RFC3339))
}

// Watch logs which loops are late, and when they are back, until ctx ends (nil) or one that is vital has been late
// for a minute (*StuckError). A process that was stopped for a while finds all of its loops late: only one that
// still is at the next look counts.
func (b *Registry) Watch(ctx context.Context, log *slog.Logger, vital ...string) error {
	tick := time.NewTicker(look)
	defer tick.Stop()
	late := map[string]int{} // looks in a row
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		next := map[string]int{}
		for _, s := range b.Late(time.Now()) {
			if next[s.Name] != 0 {
				continue // one of the name is enough
			}
			next[s.Name] = late[s.Name] + 1
			if next[s.Name] == 2 {
				log.Error("part of the agent is stuck", "part", s.Name, "since", s.Last.UTC(), "expected_within", s.Within)
			}
			if time.Duration(next[s.Name])*look > lost && slices.Contains(vital, s.Name) {
				return &StuckError{s.Name, s.Last}
			}
		}
		for name, looks := range late {
			if looks > 1 && next[name] == 0 {
				log.Info("part of the agent is no longer stuck", "part", name)
			}
		}
		late = next
	}
}
