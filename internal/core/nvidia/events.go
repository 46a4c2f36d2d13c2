package nvidia

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

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
	made   []armed // oldest first, not taken yet
	deaf   bool    // there is no set, and there might be
	arrive chan struct{}
}

func newEars() ears { return ears{deaf: true, arrive: make(chan struct{}, 1)} }

// offer passes a set on; without one, the reader may want to try again.
func (e *ears) offer(a armed, again bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.made, e.deaf = append(e.made, a), again
	select {
	case e.arrive <- struct{}{}:
	default:
	}
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

// armed is an event set with the GPUs that are registered in it. Without a set nobody is heard.
type armed struct {
	set  nvml.EventSet
	gpus []held // identity and handle only
}

// Wait returns what happened since the last call, blocking for at most max. An XID is an observation of
// that kind, at an instance if the driver can tell. Any other event is an observation of kind 0, which
// changes no health: it says where something happened, and asking says what. Where no GPU has events it
// just waits.
//
// An error means that events can't be had at present: the caller pauses and asks the GPUs, and Probe or
// Snapshot makes another set.
func (s *Session) Wait(max time.Duration) ([]core.Observation, error) {
	var obs []core.Observation
	for _, next := range s.ears.take() {
		obs = append(obs, s.drain(s.armed)...)
		s.armed = next
	}
	if len(obs) > 0 {
		return obs, nil
	}
	if s.armed.set == nil {
		s.idle(max)
		return nil, nil
	}
	o, err := s.next(s.armed, max)
	switch {
	case returned(err) == nvml.ERROR_TIMEOUT:
		return nil, nil
	case err != nil:
		s.free(&s.waiter, s.armed)
		s.armed = armed{}
		s.ears.broke()
		return nil, err
	}
	return []core.Observation{o}, nil
}

// next waits for one event of a set.
func (s *Session) next(a armed, max time.Duration) (core.Observation, error) {
	event, err := call(&s.waiter, "nvmlEventSetWait", core.Node, func() (nvml.EventData, nvml.Return) {
		return a.set.Wait(uint32(max.Milliseconds()))
	})
	if err != nil {
		return core.Observation{}, err
	}
	return s.observed(a, event), nil
}

// drain frees a set that is replaced and returns what it still held. It stops at a number that only a
// flood exceeds.
func (s *Session) drain(old armed) []core.Observation {
	var obs []core.Observation
	for old.set != nil && len(obs) < 256 {
		o, err := s.next(old, 0)
		if err != nil {
			break
		}
		obs = append(obs, o)
	}
	s.free(&s.waiter, old)
	return obs
}

// idle waits for a set.
func (s *Session) idle(max time.Duration) {
	t := time.NewTimer(max)
	defer t.Stop()
	select {
	case <-s.ears.arrive:
	case <-t.C:
	}
}

// observed says what an event means. The GPU is found by its handle: asking a lost one for its UUID
// fails, and then all GPUs would be to blame.
func (s *Session) observed(a armed, event nvml.EventData) core.Observation {
	o := core.Observation{At: core.Node, Detail: fmt.Sprintf("event 0x%x", event.EventType)}
	for _, g := range a.gpus {
		if g.handle == event.Device {
			o.At = core.WholeGPU(g.device.ID)
		}
	}
	if event.EventType != nvml.EventTypeXidCriticalError || o.At == core.Node {
		return o
	}
	o.Kind, o.Code, o.Detail = core.XID, event.EventData, ""
	if s.waiter.have[attributed] {
		o.At.GI, o.At.CI = event.GpuInstanceId, event.ComputeInstanceId
	}
	return o
}

// listen belongs to the reader: it makes an event set of the GPUs, unless the latest is of just these and
// works. A GPU that can't be registered now is left out until the GPUs change or the set breaks; so is one
// that has no events. If nobody could be registered, but might be, the next call tries again.
func (s *Session) listen(gpus []gpu) {
	same := slices.EqualFunc(s.heard, gpus, func(h held, g gpu) bool {
		return h.handle == g.handle && h.device.ID == g.device.ID
	})
	if same && !s.ears.areDeaf() {
		return
	}
	s.heard = make([]held, len(gpus))
	for i, g := range gpus {
		s.heard[i] = g.held
	}
	s.ears.offer(s.arm(s.heard))
}

// listenAgain makes another set of the same GPUs if the latest broke.
func (s *Session) listenAgain() {
	if len(s.heard) > 0 && s.ears.areDeaf() {
		s.ears.offer(s.arm(s.heard))
	}
}

// arm makes a set; an empty one if nobody could be registered, and then again says whether that is worth
// another try.
func (s *Session) arm(gpus []held) (a armed, again bool) {
	if len(gpus) == 0 || !s.reader.have["nvmlEventSetWait"] {
		return armed{}, false
	}
	set, err := call(&s.reader, "nvmlEventSetCreate", core.Node, s.lib.EventSetCreate)
	if err != nil {
		return armed{}, !isUnsupported(err)
	}
	a.set = set
	for i, g := range gpus {
		switch err := s.register(g, set); {
		case err == nil:
			a.gpus = append(a.gpus, g)
		case returned(err) == nvml.ERROR_UNKNOWN && len(gpus) > 1:
			// The set is in an undefined state now (nvml.h): another one, without this GPU.
			s.free(&s.reader, a)
			return s.arm(slices.Delete(slices.Clone(gpus), i, i+1))
		default:
			again = again || !isUnsupported(err)
		}
	}
	if len(a.gpus) == 0 {
		s.free(&s.reader, a)
		return armed{}, again
	}
	return a, false
}

// register adds a GPU to the set. One unsupported event would refuse all of them.
func (s *Session) register(g held, set nvml.EventSet) error {
	at := core.WholeGPU(g.device.ID)
	mask, err := call(&s.reader, "nvmlDeviceGetSupportedEventTypes", at, g.handle.GetSupportedEventTypes)
	if err != nil {
		return err
	}
	if mask &= listened; mask == 0 {
		return &CallError{Call: "nvmlDeviceGetSupportedEventTypes", At: at, Return: nvml.ERROR_NOT_SUPPORTED, text: "no events"}
	}
	return do(&s.reader, "nvmlDeviceRegisterEvents", at, func() nvml.Return {
		return g.handle.RegisterEvents(mask, set)
	})
}

// hangUp frees every set. It belongs to Close, after reader and waiter.
func (s *Session) hangUp() {
	for _, a := range append(s.ears.take(), s.armed) {
		s.free(&s.waiter, a)
	}
	s.armed = armed{}
}

// free gives a set back. One that can't be freed is the driver's to keep; nothing can be done about it.
func (s *Session) free(l *line, a armed) {
	if a.set != nil {
		_ = do(l, "nvmlEventSetFree", core.Node, a.set.Free)
	}
}
