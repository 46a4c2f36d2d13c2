package nvidia

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// NVML counts initialisations for the whole process: the last nvmlShutdown closes the device nodes, and until
// then nobody can unload the kernel module. So none may be forgotten, also where it can't be made in time:
//
//	session A  call hangs .. Close: ErrAbandoned ..................... call returns
//	session B                                Open ... knows A's lanes ............... Close: shuts down A and B

// initialised are the sessions of this process that were not shut down, oldest first. The driver has one lock,
// one list of handles and one set of GPUs for the whole process, so whoever comes next has to know.
var initialised struct {
	sync.Mutex
	sessions []*Session
}

// Of sessions that are over: how many shutdowns are still to be made, and how many are in the driver.
var owed, paying atomic.Int64

// enlist notes a session that is open.
func enlist(s *Session) {
	initialised.Lock()
	defer initialised.Unlock()
	initialised.sessions = append(initialised.sessions, s)
}

// settle shuts down, on the reader's line of s, what can be: closed sessions without a call in the driver, and
// what was owed before. It returns the closed sessions with calls that have not come back, oldest first.
func settle(s *Session) (held []*Session, err error) {
	var over []*Session
	initialised.Lock()
	initialised.sessions = slices.DeleteFunc(initialised.sessions, func(s *Session) bool {
		if !s.closed.Load() {
			return false
		}
		if len(s.stuck()) > 0 {
			held = append(held, s)
			return false
		}
		over = append(over, s)
		return true
	})
	initialised.Unlock()
	for _, o := range over {
		o.freeStranded()
		owed.Add(1)
	}
	return held, pay(s)
}

// inherit takes over from closed sessions with a call in the driver: the driver stays initialised, so what they
// knew holds, and whom they wait for must not be called.
func (s *Session) inherit(held []*Session) {
	for _, other := range held {
		s.inherited = append(s.inherited, other.stuck()...)
		s.census, s.gpus = census{other.census.count, slices.Clone(other.census.there)}, other.gpus
	}
}

// pay makes the shutdowns that are owed, until one fails. It is safe for concurrent use.
func pay(s *Session) error {
	for n := owed.Load(); n > 0; n = owed.Load() {
		if !owed.CompareAndSwap(n, n-1) {
			continue
		}
		paying.Add(1)
		err := do(&s.reader, "nvmlShutdown", core.Node, s.lib.Shutdown)
		paying.Add(-1)
		if err != nil && returned(err) != nvml.ERROR_UNINITIALIZED { // else it is down already
			owed.Add(1)
			return err
		}
	}
	return nil
}

// inTheWay is ErrAbandoned while this session or an earlier one has a call in the driver that hangs. Else again
// says that one has come back since it was last settled.
func (s *Session) inTheWay() (again bool, err error) {
	if paying.Load() > 0 {
		return false, fmt.Errorf("%w: nvmlShutdown", ErrAbandoned)
	}
	initialised.Lock()
	defer initialised.Unlock()
	for _, other := range initialised.sessions {
		if other.opened.After(s.opened) {
			break // it has taken the place of this one
		}
		if c, ok := other.hanging(); ok {
			return false, fmt.Errorf("%w: %s about %s", ErrAbandoned, c.Name, aboutIndex(c.Index))
		}
		again = again || other.closed.Load()
	}
	return again, nil
}

func aboutIndex(index int) string {
	if index < 0 {
		return "no GPU"
	}
	return fmt.Sprintf("the GPU with index %d", index)
}

// hanging is a call in the driver that nobody waits for any more.
func (s *Session) hanging() (core.Call, bool) {
	closed := s.closed.Load()
	for _, c := range s.Busy() {
		if closed || time.Since(c.Since) >= s.patience {
			return c, true
		}
	}
	return s.deaf()
}
