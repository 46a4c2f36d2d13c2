package cdi

import (
	"fmt"
	"time"
)

// contest records that another process changes a file of this agent: a second agent, or NVIDIA's plugin. Two writers that answer
// each other at once would wake the container runtimes without end, so the pauses grow.
type contest struct {
	path  string
	count int       // changes in a row
	last  time.Time // time of the latest one
	until time.Time // before which this agent does not write
}

const (
	contestFree   = 2                // changes that are answered at once: an agent that replaces another one writes, too
	contestLong   = time.Minute      // longest pause
	contestForget = 10 * time.Minute // after the latest change
)

// contestError means that this agent leaves the file as another process has written it, for now.
type contestError struct{ path string }

func (e *contestError) Error() string {
	return e.path + " is changed by another process again and again: end the other agent or device plugin"
}

// enter records a change by another process. It returns *contestError if this agent must not write now.
func (c *contest) enter(path string, now time.Time) error {
	if now.Before(c.until) {
		return &contestError{path}
	}
	if now.Sub(c.last) > contestForget {
		c.count = 0
	}
	c.path, c.last = path, now
	if c.count++; c.count > contestFree {
		c.until = now.Add(min(time.Second<<min(c.count-contestFree, 6), contestLong))
	}
	return nil
}

// warnings is a line about the latest change, as long as it is not long ago.
func (c *contest) warnings(now time.Time) []string {
	if c.count == 0 || now.Sub(c.last) > contestForget {
		return nil
	}
	return []string{fmt.Sprintf("%s was changed by another process, last at %s: is there a second agent or device plugin?", c.path, c.last.UTC().Format(time.RFC3339))}
}

// text is the warning for the log, which has its own times.
func (c *contest) text() string {
	return c.path + " was changed by another process, and is written again: is there a second agent or device plugin?"
}
