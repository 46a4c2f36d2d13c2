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
// event set, so another wish means another set, which only the waiter may make:
//
//	reader  Snapshot: listenTo(A, B) ............ listenTo(B)
//	waiter  ................ set of A, B: wait, wait ........ free it; set of B: wait
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
// An error means that events can't be had at present: the caller pauses and asks the GPUs, the next Wait
// starts over with a new event set. core.ErrNoEvents means that no GPU here has events.
func (s *Session) Wait(max time.Duration) ([]core.Observation, error) {
	gpus, version := s.wish.load()
	if s.armed.set == nil || s.armed.version != version {
		if len(gpus) == 0 {
			s.disarm()
			return nil, s.idle(max)
		}
		if err := s.arm(gpus, version); err != nil {
			s.disarm()
			return nil, err
		}
	}
	event, err := call(&s.waiter, "nvmlEventSetWait", core.Node, func() (nvml.EventData, nvml.Return) {
		return s.armed.set.Wait(uint32(max.Milliseconds()))
	})
	if returned(err) == nvml.ERROR_TIMEOUT {
		return nil, nil
	}
	if err != nil {
		s.disarm()
		return nil, err
	}
	return []core.Observation{s.observed(event)}, nil
}

// idle waits for the first reading, or for the first GPU.
func (s *Session) idle(max time.Duration) error {
	t := time.NewTimer(max)
	defer t.Stop()
	select {
	case <-s.wish.changed:
	case <-t.C:
	}
	return nil
}

// observed says what an event means. The GPU is found by its handle: asking a lost one for its UUID
// fails, and then all GPUs would be to blame.
func (s *Session) observed(event nvml.EventData) core.Observation {
	o := core.Observation{At: core.Node, Detail: fmt.Sprintf("event 0x%x", event.EventType)}
	for _, g := range s.armed.gpus {
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
// until the wish changes or the set breaks.
func (s *Session) arm(gpus []held, version int) error {
	s.disarm()
	set, err := call(&s.waiter, "nvmlEventSetCreate", core.Node, s.lib.EventSetCreate)
	if isUnsupported(err) || !s.waiter.have["nvmlEventSetWait"] {
		return core.ErrNoEvents
	}
	if err != nil {
		return err
	}
	s.armed = armed{set: set, version: version}
	var failed error
	for i, g := range gpus {
		switch err := s.register(g, set); {
		case err == nil:
			s.armed.gpus = append(s.armed.gpus, g)
		case isGone(err):
			return err
		case returned(err) == nvml.ERROR_UNKNOWN && len(gpus) > 1:
			// The set is in an undefined state now (nvml.h): another one, without this GPU.
			return s.arm(slices.Delete(slices.Clone(gpus), i, i+1), version)
		case !isUnsupported(err):
			failed = err
		}
	}
	if len(s.armed.gpus) > 0 {
		return nil
	}
	if failed != nil {
		return failed
	}
	return core.ErrNoEvents
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

// disarm frees the event set. It belongs to the waiter, and after that to Close.
func (s *Session) disarm() {
	if s.armed.set != nil {
		// A set that can't be freed is the driver's to keep; there is nothing to do about it.
		_ = do(&s.waiter, "nvmlEventSetFree", core.Node, s.armed.set.Free)
	}
	s.armed = armed{}
}
