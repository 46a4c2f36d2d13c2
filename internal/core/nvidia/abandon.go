package nvidia

import (
	"fmt"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
)

// abandoned are sessions of this process that ended with a call in the driver. The driver has one lock, one
// list of handles and one set of GPUs for the whole process, so whoever comes next has to know.
var abandoned struct {
	sync.Mutex
	sessions []*Session
}

// abandon keeps a session that can't be shut down, and says so; nil if nothing is stuck.
func abandon(s *Session) error {
	i := slices.IndexFunc(s.lanes, (*lane).isStuck)
	if i < 0 {
		return nil
	}
	abandoned.Lock()
	defer abandoned.Unlock()
	abandoned.sessions = append(abandoned.sessions, s)
	c, _ := s.lanes[i].busy()
	return fmt.Errorf("%w: %s about the GPU with index %d", ErrAbandoned, c.Name, i)
}

// inherit shuts down the abandoned sessions whose calls have come back, and returns the lanes in which
// some have not.
func inherit() (stuck []*lane) {
	abandoned.Lock()
	defer abandoned.Unlock()
	abandoned.sessions = slices.DeleteFunc(abandoned.sessions, func(s *Session) bool {
		n := len(stuck)
		for _, l := range s.lanes {
			if l.isStuck() {
				stuck = append(stuck, l)
			}
		}
		if len(stuck) > n {
			return false
		}
		_ = do(&s.reader, "nvmlShutdown", core.Node, s.lib.Shutdown) // as good as it gets
		return true
	})
	return stuck
}
