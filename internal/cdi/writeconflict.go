package cdi

import (
	"fmt"
	"time"
)

// writeConflict records that another process changes a file of this agent: a second agent, or NVIDIA's plugin. Two writers that answer
// each other at once would wake the container runtimes without end, so the pauses grow.
type writeConflict struct {
	path  string
	count int       // changes in a row
	last  time.Time // time of the latest one
	until time.Time // before which this agent does not write
}

const (
	conflictFree   = 2                // changes that are answered at once: an agent that replaces another one writes, too
	conflictLong   = time.Minute      // longest pause
	conflictForget = 10 * time.Minute // after the latest change
)

// writeConflictError means that this agent leaves the file as another process has written it, for now.
type writeConflictError struct{ path string }

func (e *writeConflictError) Error() string {
	return e.path + " is changed by another process again and again: end the other agent or device plugin"
}

// record records a change by another process. It returns *writeConflictError if this agent must not write now.
func (c *writeConflict) record(path string, now time.Time) error {
	if now.Before(c.until) {
		return &writeConflictError{path}
	}
	if now.Sub(c.last) > conflictForget {
		c.count = 0
	}
	c.path, c.last = path, now
	if c.count++; c.count > conflictFree {
		c.until = now.Add(min(time.Second<<min(c.count-conflictFree, 6), conflictLong))
	}
	return nil
}

// warnings is a line about the latest change, as long as it is not long ago.
func (c *writeConflict) warnings(now time.Time) []string {
	if c.count == 0 || now.Sub(c.last) > conflictForget {
		return nil
	}
	return []string{fmt.Sprintf("%s was changed by another process, last at %s: is there a second agent or device plugin?", c.path, c.last.UTC().Format(time.RFC3339))}
}

// text is the warning for the log, which has its own times.
func (c *writeConflict) text() string {
	return c.path + " was changed by another process, and is written again: is there a second agent or device plugin?"
}
