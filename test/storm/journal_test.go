package storm

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"time"
)

// remembered is how many lines a journal keeps.
const remembered = 600

// journal keeps the latest lines of what was done and of the agent's log. It is safe for concurrent use.
type journal struct {
	began time.Time
	mu    sync.Mutex
	lines []string
}

func newJournal() *journal { return &journal{began: time.Now()} }

// Write takes a line of the agent's log.
func (j *journal) Write(line []byte) (int, error) {
	_, text, found := bytes.Cut(line, []byte(" level=")) // the time is our own
	if !found {
		text = line
	}
	j.enter("  agent  " + strings.TrimRight(string(text), "\n"))
	return len(line), nil
}

// note takes a line about the storm.
func (j *journal) note(format string, args ...any) { j.enter(fmt.Sprintf(format, args...)) }

func (j *journal) enter(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.lines) == remembered {
		j.lines = j.lines[1:]
	}
	j.lines = append(j.lines, fmt.Sprintf("%10.3f %s", time.Since(j.began).Seconds(), line))
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "\n")
}

// wrongAt is a failure with the time at which it was seen, as the journal counts.
func wrongAt(at time.Time, format string, args ...any) error {
	return fmt.Errorf("at %s: %w", at.Format(time.TimeOnly), fmt.Errorf(format, args...))
}
