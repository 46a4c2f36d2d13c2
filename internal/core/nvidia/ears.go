package nvidia

import (
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// This file is the reader's side of events: it makes the sets that the waiter waits on.

// listened are the events that say something about health or layout. Single-bit ECC errors are left out:
// a weak GPU raises thousands a second. So are clocks and power states, which change all the time.
const listened = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeSingleBitEccErrorStorm | nvml.EventTypeDramRetirementEvent |
	nvml.EventTypeDramRetirementFailure | nvml.EventTypeNonFatalPoisonError |
	nvml.EventTypeFatalPoisonError | nvml.EventTypeGpuUnavailableError |
	nvml.EventTypeGpuRecoveryAction | nvml.EventMigConfigChange

// ears are the event sets on their way from the reader to the waiter. The reader makes them, because it
// owns the GPUs' handles; NVML can't take a GPU out of a set, so other GPUs need another set. The waiter
// waits on the latest and empties the one before, so that nothing is missed of a GPU that is in both. A set
// collects events from its making on, whether or not somebody waits:
//
//	reader  makes A ............. makes B ....................... makes C
//	waiter  ....... wait on A, wait ..... take B, drain and free A; wait fails: free B ... take C
type ears struct {
	mu     sync.Mutex
	made   []armed         // oldest first, not taken yet
	deaf   bool            // there is no set, and there might be
	kept   []nvml.EventSet // that the driver did not take back
	arrive chan struct{}
}

func newEars() ears { return ears{deaf: true, arrive: make(chan struct{}, 1)} }

// mostMade is how many sets wait to be taken. There are more only when the waiter hangs.
const mostMade = 4

// offer passes a set on; without one, the reader may want to try again. One that was made too long ago comes
// back: what it has heard is lost.
func (e *ears) offer(a armed, again bool) (surplus armed) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.made, e.deaf = append(e.made, a), again
	if len(e.made) > mostMade {
		surplus, e.made = e.made[0], e.made[1:]
	}
	select {
	case e.arrive <- struct{}{}:
	default:
	}
	return surplus
}

func (e *ears) take() []armed {
	e.mu.Lock()
	defer e.mu.Unlock()
	made := e.made
	e.made = nil
	return made
}

// broke is told by the waiter; a set made meanwhile is as good as new.
func (e *ears) broke() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.deaf = len(e.made) == 0
}

func (e *ears) areDeaf() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.deaf
}

// keep notes a set that is to be freed still.
func (e *ears) keep(set nvml.EventSet) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kept = append(e.kept, set)
}

func (e *ears) takeKept() []nvml.EventSet {
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := e.kept
	e.kept = nil
	return kept
}

// armed is an event set with the GPUs that are registered in it. Without a set nobody is heard.
type armed struct {
	set  nvml.EventSet
	gpus []registered
}

// registered is a GPU whose events are in a set.
type registered struct {
	held
	lane *lane
}

// listener is a GPU that is to be heard.
type listener struct {
	held
	events  core.Tristate // whether its XIDs are listened to; unsaid until that was tried
	refused bool          // it could not be registered, and might be another time
}

// stranded is an event set with a call about it that did not come back: it can't be freed under it.
type stranded struct {
	set  nvml.EventSet
	lane *lane
}

// listen makes an event set of the GPUs, unless the latest is of just these and works. Who is refused, or
// stuck, is left out and tried again with the next reading; who has no events is not.
func (s *Session) listen(gpus []gpu) {
	s.freeStranded()
	same := slices.EqualFunc(s.heard, gpus, func(h listener, g gpu) bool {
		return h.handle == g.handle && h.device.ID == g.device.ID && !h.refused
	})
	if same && !s.ears.areDeaf() {
		return
	}
	s.heard = make([]listener, len(gpus))
	for i, g := range gpus {
		s.heard[i].held = g.held
	}
	s.free(&s.reader, s.ears.offer(s.arm()))
}

// listenAgain makes another set of the same GPUs if the latest broke.
func (s *Session) listenAgain() {
	s.freeStranded()
	if len(s.heard) == 0 || !s.ears.areDeaf() {
		return
	}
	for i, h := range s.heard {
		s.heard[i] = listener{held: h.held}
	}
	s.free(&s.reader, s.ears.offer(s.arm()))
}

// hears says whether the XIDs of a GPU are listened to now.
func (s *Session) hears(id core.DeviceID) core.Tristate {
	if _, hangs := s.deaf(); hangs || s.ears.areDeaf() {
		return core.NotReported
	}
	for _, h := range s.heard {
		if h.device.ID == id {
			return h.events
		}
	}
	return core.NotReported
}

// arm makes a set of those that were not refused; an empty one if nobody could be registered, and then
// again says whether that is worth another try.
func (s *Session) arm() (a armed, again bool) {
	for s.reader.have["nvmlEventSetWait"] {
		free := func(h listener) bool { return !h.refused }
		if !slices.ContainsFunc(s.heard, free) {
			return armed{}, len(s.heard) > 0
		}
		set, err := call(&s.reader, "nvmlEventSetCreate", core.Node, s.lib.EventSetCreate)
		if err != nil {
			return armed{}, !isUnsupported(err)
		}
		if a = (armed{set: set}); !s.registerAll(&a) {
			continue
		}
		if len(a.gpus) > 0 {
			return a, false
		}
		s.free(&s.reader, a)
		return armed{}, slices.ContainsFunc(s.heard, func(h listener) bool { return h.refused })
	}
	for i := range s.heard {
		s.heard[i].events = core.No
	}
	return armed{}, false
}

// registerAll adds all but the refused to a set. False if the set is of no use any more: then it is given
// up, and who spoiled it is refused.
func (s *Session) registerAll(a *armed) bool {
	for i := range s.heard {
		h := &s.heard[i]
		if h.refused {
			continue
		}
		mask, err := s.register(h.held, a.set)
		h.events = core.TristateOf(err == nil && mask&nvml.EventTypeXidCriticalError != 0)
		h.refused = err != nil && !isUnsupported(err)
		l := s.lane(h.device.ID)
		switch {
		case err == nil:
			a.gpus = append(a.gpus, registered{h.held, l})
		case isStuck(err):
			// The call may be at the set still.
			s.stranded = append(s.stranded, stranded{a.set, l})
			return false
		case returned(err) == nvml.ERROR_UNKNOWN:
			// The set is in an undefined state now (nvml.h).
			s.free(&s.reader, *a)
			return false
		}
	}
	return true
}

// register adds a GPU to the set and returns its events. One unsupported event would refuse all of them.
func (s *Session) register(g held, set nvml.EventSet) (mask uint64, err error) {
	at := core.WholeGPU(g.device.ID)
	return visit(s, s.at(g.device), func(a *asker) uint64 {
		mask := required(a, "nvmlDeviceGetSupportedEventTypes", g.handle.GetSupportedEventTypes) & listened
		if a.err == nil && mask == 0 {
			a.err = &CallError{Call: "nvmlDeviceGetSupportedEventTypes", At: at, Return: nvml.ERROR_NOT_SUPPORTED, text: "no events"}
		}
		if a.err == nil {
			a.err = do(a.line, "nvmlDeviceRegisterEvents", at, func() nvml.Return {
				return g.handle.RegisterEvents(mask, set)
			})
		}
		return mask
	})
}

// freeStranded frees the sets whose call has come back, and those that could not be freed before.
func (s *Session) freeStranded() {
	for _, set := range s.ears.takeKept() {
		s.free(&s.reader, armed{set: set})
	}
	s.stranded = slices.DeleteFunc(s.stranded, func(t stranded) bool {
		if t.lane.isStuck() {
			return false
		}
		s.free(&s.reader, armed{set: t.set})
		return true
	})
}

// hangUp frees every set. It belongs to Close, after reader and waiter.
func (s *Session) hangUp() {
	s.freeStranded()
	s.closeSystem()
	for _, a := range append(s.ears.take(), s.armed) {
		s.free(&s.waiter, a)
	}
	s.armed = armed{}
}

// free gives a set back. One that the driver does not take is offered to it again later, as it has descriptors;
// those of a driver that is gone are gone with it.
func (s *Session) free(l *line, a armed) {
	if a.set == nil {
		return
	}
	if err := do(l, "nvmlEventSetFree", core.Node, a.set.Free); err != nil && !isGone(err) {
		s.ears.keep(a.set)
	}
}
