package nvidia

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// NVML counts initialisations per process: the last nvmlShutdown closes the device nodes, and until then the kernel
// module can't be unloaded. So each session needs its nvmlShutdown, also if that has to wait for a hung call:
//
//	session A  call hangs .. Close: errAbandoned ............... call returns
//	session B                                Open: adopts A's workers ....... Close: shuts down A and B

// initialized holds the sessions of this process that were not shut down, oldest first. NVML has one lock, one list
// of handles and one set of GPUs per process, so a session must take account of the earlier ones.
var initialized struct {
	sync.Mutex
	sessions []*Session
}

// pendingShutdowns counts the calls of nvmlShutdown that ended sessions still need, activeShutdowns those in
// progress.
var pendingShutdowns, activeShutdowns atomic.Int64

// track adds an open session to initialized.
func track(s *Session) {
	initialized.Lock()
	defer initialized.Unlock()
	initialized.sessions = append(initialized.sessions, s)
}

// shutDownClosed shuts down every closed session without a call in progress, and makes the shutdowns that failed
// before, on the reader slot of s. It returns the closed sessions with calls in progress, oldest first.
func shutDownClosed(s *Session) (hung []*Session, err error) {
	var ended []*Session
	initialized.Lock()
	initialized.sessions = slices.DeleteFunc(initialized.sessions, func(s *Session) bool {
		if !s.closed.Load() {
			return false
		}
		if len(s.hungWorkers()) > 0 {
			hung = append(hung, s)
			return false
		}
		ended = append(ended, s)
		return true
	})
	initialized.Unlock()
	for _, e := range ended {
		e.freeUnusedSets()
		pendingShutdowns.Add(1)
	}
	return hung, runPendingShutdowns(s)
}

// adoptHungCalls takes over the workers of closed sessions whose calls have not returned, so that no second call is
// made about their GPUs. The driver stays initialised meanwhile, so the handles of these sessions stay valid.
func (s *Session) adoptHungCalls(hung []*Session) {
	for _, other := range hung {
		s.adopted = append(s.adopted, other.hungWorkers()...)
		s.enumeration, s.gpus = enumeration{other.enumeration.count, slices.Clone(other.enumeration.gpus)}, other.gpus
	}
}

// runPendingShutdowns makes the pending shutdowns until one fails. It is safe for concurrent use.
func runPendingShutdowns(s *Session) error {
	for n := pendingShutdowns.Load(); n > 0; n = pendingShutdowns.Load() {
		if !pendingShutdowns.CompareAndSwap(n, n-1) {
			continue
		}
		activeShutdowns.Add(1)
		err := do(&s.reader, "nvmlShutdown", gpu.Node, s.lib.Shutdown)
		activeShutdowns.Add(-1)
		if err != nil && returnCode(err) != nvml.ERROR_UNINITIALIZED { // which means that it is shut down already
			pendingShutdowns.Add(1)
			return err
		}
	}
	return nil
}

// hungCall is errAbandoned while a call of this session, or of an earlier one, has not returned. Else more reports
// whether a closed session became ready for its shutdown meanwhile.
func (s *Session) hungCall() (more bool, err error) {
	if activeShutdowns.Load() > 0 {
		return false, fmt.Errorf("%w: nvmlShutdown", errAbandoned)
	}
	initialized.Lock()
	defer initialized.Unlock()
	for _, other := range initialized.sessions {
		if other.opened.After(s.opened) {
			break
		}
		if c, ok := other.abandonedCall(); ok {
			return false, fmt.Errorf("%w: %s%s", errAbandoned, c.Name, indexText(c.Index))
		}
		more = more || other.closed.Load()
	}
	return more, nil
}

func indexText(index int) string {
	if index < 0 {
		return ""
	}
	return fmt.Sprintf(", GPU index %d", index)
}

// abandonedCall is a call in progress whose result is not awaited any more.
func (s *Session) abandonedCall() (gpu.Call, bool) {
	closed := s.closed.Load()
	for _, c := range s.Busy() {
		if closed || time.Since(c.Since) >= s.deadline {
			return c, true
		}
	}
	return s.hungWait()
}
