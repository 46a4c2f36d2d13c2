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

// wish is what the reader hands to the waiter: the GPUs to listen to. NVML can't take a GPU out of an
// event set, so another wish means another set, which only the waiter may make. It makes the new one
// first and empties the old one then, so that nothing is missed of a GPU that is in both:
//
//	reader  listenTo(A, B) ................ listenTo(B, C)
//	waiter  ........ set of A, B: wait, wait .......... set of B, C; drain and free set of A, B; wait
//
// What happens to C between the reading and the registration is for polling to find.
type wish struct {
	mu      sync.Mutex
	gpus    []held // identity and handle only
	version int    // 0 before the first reading
	changed chan struct{}
}

func newWish() wish { return wish{changed: make(chan struct{}, 1)} }

// listenTo replaces the wish if it differs.
func (w *wish) listenTo(gpus []gpu) {
	w.mu.Lock()
	defer w.mu.Unlock()
	same := slices.EqualFunc(w.gpus, gpus, func(h held, g gpu) bool {
		return h.handle == g.handle && h.device.ID == g.device.ID
	})
	if same && w.version > 0 {
		return
	}
	w.gpus = make([]held, len(gpus))
	for i, g := range gpus {
		w.gpus[i] = g.held
	}
	w.version++
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *wish) load() ([]held, int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gpus, w.version
}

// armed is the event set in use.
type armed struct {
	set     nvml.EventSet // nil if there is none
	version int           // of the wish that it fulfils
	gpus    []held        // those registered
}

// Wait returns what happened since the last call, blocking for at most max. An XID is an observation of
// that kind, at an instance if the driver can tell. Any other event is an observation of kind 0, which
// changes no health: it says where something happened, and asking says what.
//
// An error means that events can't be had at present: the caller pauses and asks the GPUs. A new event
// set is made at once, so that it fills meanwhile. core.ErrNoEvents means that no GPU here has events.
func (s *Session) Wait(max time.Duration) ([]core.Observation, error) {
	gpus, version := s.wish.load()
	if s.armed.set == nil || s.armed.version != version {
		old := s.armed
		err := s.arm(gpus, version)
		obs := s.drain(old)
		if err != nil || len(obs) > 0 {
			return obs, err
		}
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
		s.disarm()
		_ = s.arm(gpus, version) // the next Wait tries again, and says why
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
	s.free(old)
	return obs
}

// idle waits for the first reading, or for the first GPU.
func (s *Session) idle(max time.Duration) {
	t := time.NewTimer(max)
	defer t.Stop()
	select {
	case <-s.wish.changed:
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

// arm makes an event set of the GPUs that have events. A GPU that can't be registered now is left out
// until the wish changes or the set breaks. After an error, and without GPUs, there is no set.
func (s *Session) arm(gpus []held, version int) error {
	s.armed = armed{}
	if len(gpus) == 0 {
		return nil
	}
	if !s.waiter.have["nvmlEventSetWait"] {
		return core.ErrNoEvents
	}
	set, err := call(&s.waiter, "nvmlEventSetCreate", core.Node, s.lib.EventSetCreate)
	if isUnsupported(err) {
		return core.ErrNoEvents
	}
	if err != nil {
		return err
	}
	a := armed{set: set, version: version}
	failed := core.ErrNoEvents
	for i, g := range gpus {
		switch err := s.register(g, set); {
		case err == nil:
			a.gpus = append(a.gpus, g)
		case returned(err) == nvml.ERROR_UNKNOWN && len(gpus) > 1:
			// The set is in an undefined state now (nvml.h): another one, without this GPU.
			s.free(a)
			return s.arm(slices.Delete(slices.Clone(gpus), i, i+1), version)
		case !isUnsupported(err):
			failed = err
		}
	}
	if len(a.gpus) == 0 {
		s.free(a)
		return failed
	}
	s.armed = a
	return nil
}

// register adds a GPU to the set. One unsupported event would refuse all of them.
func (s *Session) register(g held, set nvml.EventSet) error {
	at := core.WholeGPU(g.device.ID)
	mask, err := call(&s.waiter, "nvmlDeviceGetSupportedEventTypes", at, g.handle.GetSupportedEventTypes)
	if err != nil {
		return err
	}
	if mask &= listened; mask == 0 {
		return &CallError{Call: "nvmlDeviceGetSupportedEventTypes", At: at, Return: nvml.ERROR_NOT_SUPPORTED, text: "no events"}
	}
	return do(&s.waiter, "nvmlDeviceRegisterEvents", at, func() nvml.Return {
		return g.handle.RegisterEvents(mask, set)
	})
}

// disarm frees the event set in use. It belongs to the waiter, and after that to Close.
func (s *Session) disarm() {
	s.free(s.armed)
	s.armed = armed{}
}

// free gives a set back. One that can't be freed is the driver's to keep; nothing can be done about it.
func (s *Session) free(a armed) {
	if a.set != nil {
		_ = do(&s.waiter, "nvmlEventSetFree", core.Node, a.set.Free)
	}
}
