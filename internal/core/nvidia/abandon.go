package nvidia

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// NVML counts initialisations for the whole process: the last nvmlShutdown closes the device nodes, and until
// then nobody can unload the kernel module. So none may be forgotten, also where it can't be made in time:
//
//	session A  call hangs .. Close: ErrAbandoned ..................... call returns
//	session B                                Open ... knows A's lanes ............... Close: shuts down A and B

// abandoned are sessions of this process that were closed with a call in the driver. The driver has one lock,
// one list of handles and one set of GPUs for the whole process, so whoever comes next has to know.
var abandoned struct {
	sync.Mutex
	sessions []*Session
}

// owed is the number of shutdowns still to be made.
var owed atomic.Int64

// abandon leaves a session to whoever settles next.
func abandon(s *Session) {
	abandoned.Lock()
	defer abandoned.Unlock()
	abandoned.sessions = append(abandoned.sessions, s)
}

// settle shuts down, on the reader's line of s, what can be: the abandoned sessions whose calls have come back,
// and what was owed before. It returns the lanes of which the calls have not come back.
func settle(s *Session) (stuck []*lane, err error) {
	var back []*Session
	abandoned.Lock()
	abandoned.sessions = slices.DeleteFunc(abandoned.sessions, func(s *Session) bool {
		lanes := slices.DeleteFunc(slices.Clone(s.lanes), func(l *lane) bool { return !l.isStuck() })
		if stuck = append(stuck, lanes...); len(lanes) > 0 {
			return false
		}
		back = append(back, s)
		return true
	})
	abandoned.Unlock()
	for _, b := range back {
		b.freeStranded()
		owed.Add(1)
	}
	return stuck, pay(s)
}

// pay makes the shutdowns that are owed, until one fails. It is safe for concurrent use.
func pay(s *Session) error {
	for n := owed.Load(); n > 0; n = owed.Load() {
		if !owed.CompareAndSwap(n, n-1) {
			continue
		}
		err := do(&s.reader, "nvmlShutdown", core.Node, s.lib.Shutdown)
		if err != nil && returned(err) != nvml.ERROR_UNINITIALIZED { // else it is down already
			owed.Add(1)
			return err
		}
	}
	return nil
}

// left is ErrAbandoned if one of the lanes that are stuck is the session's.
func (s *Session) left(stuck []*lane) error {
	for _, l := range s.lanes {
		if slices.Contains(stuck, l) {
			c, _ := l.busy()
			return fmt.Errorf("%w: %s about the GPU with index %d", ErrAbandoned, c.Name, l.index)
		}
	}
	return nil
}
