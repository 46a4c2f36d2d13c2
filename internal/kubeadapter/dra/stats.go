package dra

import (
	"path/filepath"
	"time"
)

// Stats are the status and the counters of an adapter since the process started.
type Stats struct {
	Registered bool
	Refused    bool      // the kubelet has refused the latest registration
	Reason     string    // why Registered is false; "" if it is true
	Since      time.Time // of Reason
	Socket     string    // path of the socket that is served; "" = none

	Infos              uint64 // calls of GetInfo
	Registrations      uint64 // that the kubelet has confirmed
	RegistrationErrors uint64 // that it has refused
	Prepares           uint64 // claims that were prepared, also those that were before
	PrepareErrors      uint64
	Unprepares         uint64
	UnprepareErrors    uint64
	HealthStreams      int // that are open
	HealthMessages     uint64

	LastError   string // why the kubelet refused last
	LastErrorAt time.Time

	Claims int // that are prepared or begun in this boot of the node
}

// Stats returns the present status.
func (a *Adapter) Stats() Stats {
	a.mu.Lock()
	s := a.current
	a.mu.Unlock()
	for _, c := range a.claims.Load() {
		if c.Holds(a.opts.BootID) {
			s.Claims++
		}
	}
	return s
}

// count changes a counter.
func (a *Adapter) count(change func(*Stats)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.current)
}

// setReason sets why the driver is not registered, without a socket.
func (a *Adapter) setReason(reason string) {
	a.mu.Lock()
	if c := &a.current; c.Reason != reason {
		c.Since = time.Now()
	}
	before := a.current.Reason
	a.current.Registered, a.current.Refused, a.current.Reason, a.current.Socket = false, false, reason, ""
	a.mu.Unlock()
	if before != reason {
		a.opts.Log.Info("not served to the kubelet", "reason", reason)
	}
}

// setSocket sets the socket, which the kubelet has not registered yet.
func (a *Adapter) setSocket(path string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := &a.current
	c.Registered, c.Refused, c.Reason, c.Socket, c.Since = false, false, "the kubelet has not registered "+filepath.Base(path)+" yet", path, time.Now()
}

// setRegistered sets the result of a registration and returns the reason before.
func (a *Adapter) setRegistered(reason string, refused bool) (before string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, now := &a.current, time.Now()
	before = c.Reason
	if c.Registered == refused || c.Reason != reason {
		c.Since = now
	}
	c.Registered, c.Refused, c.Reason = !refused, refused, reason
	if refused {
		c.RegistrationErrors++
		c.LastError, c.LastErrorAt = reason, now
	} else {
		c.Registrations++
	}
	return before
}

// claimsDir is where the prepared claims are.
func (a *Adapter) claimsDir() string { return claimsDir(a.opts.StateDir) }
