package nomadadapter

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// unreadAfter is how long after the first reservation Nomad has opened a stream of devices at the latest. A Nomad agent that starts a plugin
// again, which ended, opens it within milliseconds.
const unreadAfter = 10 * time.Second

// unreadWarning is logged and shown by inspect.
const unreadWarning = "Nomad asks for reservations and does not read the devices: it shows the health that they had before. Restart the Nomad agent"

// streams detects that Nomad opens no stream of devices. If a plugin can't be started once, Nomad gives it up: it goes on to list the devices
// that it had, starts the plugin for reservations only, and reads no device from it until the Nomad agent is restarted
// (client/devicemanager/instance.go). A stream that ends is no such case: Nomad ends the process, too.
type streams struct {
	opened atomic.Bool // one was, at any time
	unread atomic.Bool // none was some time after the first reservation
	first  sync.Once
}

// reserved is called with each reservation; warn with the first one, later, if Nomad has opened no stream then.
func (s *streams) reserved(warn func()) {
	s.first.Do(func() {
		time.AfterFunc(unreadAfter, func() {
			if !s.opened.Load() {
				s.unread.Store(true)
				warn()
			}
		})
	})
}

// Problems returns one if Nomad does not read the devices.
func (p *Plugin) Problems() []problem.Problem {
	if !p.streams.unread.Load() || p.streams.opened.Load() {
		return nil
	}
	return problem.Each(problem.NomadUnread, unreadWarning)
}
