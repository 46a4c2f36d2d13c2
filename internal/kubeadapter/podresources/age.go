package podresources

import (
	"os"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// ages tells for how long the kubelet has been running that serves a socket. The socket's modification time is of the wall clock, which may be
// stepped: it counts only if the clock was not stepped since the kubelet started, as far as this process can see. After that the time is that
// of the monotonic clock. It is not safe for concurrent use.
type ages struct {
	uptime func() (time.Duration, bool) // of the node; nil = it started long ago
	socket statefile.Identity
	since  time.Time     // when the socket was seen first
	then   time.Duration // age of the kubelet at that time
	looked time.Time     // the latest look, of the monotonic clock
	wall   time.Time     // the same, of the wall clock
}

const (
	// bootTime is for how long after the start of a node its wall clock may still be stepped, because its real-time clock is wrong.
	bootTime = 10 * time.Minute
	// stepped is the least difference between the wall clock and the monotonic one that is a step.
	stepped = time.Second
)

// of returns the age of the kubelet whose socket is at a path, and the socket's identity.
func (a *ages) of(path string) (age time.Duration, id statefile.Identity) {
	now := time.Now()
	wall := now.Round(0) // without the monotonic reading
	steady := a.clockIsSteady(now, wall)
	a.looked, a.wall = now, wall
	id = statefile.IdentityOf(path)
	if id == (statefile.Identity{}) || id != a.socket {
		a.socket, a.since, a.then = id, now, 0
		if info, err := os.Stat(path); err == nil && steady {
			a.then = max(wall.Sub(info.ModTime()), 0)
		}
	}
	return a.then + now.Sub(a.since), id
}

// clockIsSteady reports whether the wall clock was not stepped since the latest look; before the first one, whether the node started long ago.
func (a *ages) clockIsSteady(now, wall time.Time) bool {
	if a.looked.IsZero() {
		if a.uptime == nil {
			return true
		}
		up, known := a.uptime()
		return !known || up >= bootTime
	}
	return (wall.Sub(a.wall) - now.Sub(a.looked)).Abs() < stepped
}
