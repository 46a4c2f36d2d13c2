package nvidia

import (
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// subscribedEvents are the events that concern health or the MIG layout. Single-bit ECC errors are excluded, as a GPU
// with failing memory raises thousands a second; so are clock and power state changes, which are normal.
const subscribedEvents = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeSingleBitEccErrorStorm | nvml.EventTypeDramRetirementEvent |
	nvml.EventTypeDramRetirementFailure | nvml.EventTypeNonFatalPoisonError |
	nvml.EventTypeFatalPoisonError | nvml.EventTypeGpuUnavailableError |
	nvml.EventTypeGpuRecoveryAction | nvml.EventMigConfigChange

// eventSets passes event sets from the reader to the waiter. The reader creates them, because it owns the GPUs' handles;
// NVML can't remove a GPU from a set, so a change of the GPUs needs a new set. A set collects events from the registration of
// a GPU on, also while no call waits on it, and an event is in each set of its GPU. So the waiter drains a set before it frees it,
// also one whose wait failed, and leaves out of the next one what it has reported since the reader began that one:
//
//	reader  makes A ......... makes B ............................................. makes C
//	waiter  ....... wait on A: XID 13 ... take B: drain and free A, drain B without XID 13; wait fails ... take C: drain B, C
type eventSets struct {
	mu          sync.Mutex
	making      bool         // the reader registers GPUs in a set that is not pending yet
	pending     []eventSet   // oldest first, not taken yet
	unavailable bool         // there is no usable set, and creating one may succeed
	unfreed     []unfreedSet // see freeUnusedSets
	added       chan struct{}
}

func newEventSets() eventSets { return eventSets{unavailable: true, added: make(chan struct{}, 1)} }

// maxPendingSets is the maximum length of eventSets.pending, which is reached only while the waiter hangs.
const maxPendingSets = 4

// begin records that the reader is about to make a set, which add ends.
func (e *eventSets) begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.making = true
}

// overlap reports whether there may be a set that the waiter has not taken.
func (e *eventSets) overlap() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.making || len(e.pending) > 0
}

// add passes a set to the waiter; retry reports that another one should be created later. It returns the oldest pending
// set if there are too many: its events are lost.
func (e *eventSets) add(set eventSet, retry bool) (surplus eventSet) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.making, e.pending, e.unavailable = false, append(e.pending, set), retry
	if len(e.pending) > maxPendingSets {
		surplus, e.pending = e.pending[0], e.pending[1:]
	}
	watch.Notify(e.added)
	return surplus
}

func (e *eventSets) takePending() []eventSet {
	e.mu.Lock()
	defer e.mu.Unlock()
	pending := e.pending
	e.pending = nil
	return pending
}

// setFailed records that the waiter's set is unusable; a pending one may work.
func (e *eventSets) setFailed() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unavailable = len(e.pending) == 0
}

func (e *eventSets) eventsUnavailable() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.unavailable
}

func (e *eventSets) keepUnfreed(u unfreedSet) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unfreed = append(e.unfreed, u)
}

func (e *eventSets) takeUnfreed() []unfreedSet {
	e.mu.Lock()
	defer e.mu.Unlock()
	unfreed := e.unfreed
	e.unfreed = nil
	return unfreed
}

// eventSet is an NVML event set and the GPUs that are registered in it. The zero value has no set, for a node without
// events.
type eventSet struct {
	set         nvml.EventSet
	gpus        []registeredGPU
	operational bool // operational events of a GPU are in it, too
}

// registeredGPU is a GPU whose events are in a set.
type registeredGPU struct {
	nvmlDevice
	worker *gpuWorker
}

// registration is a GPU that should be registered in the latest set.
type registration struct {
	nvmlDevice
	events health.Tristate // whether its XID events are in the set; NotReported until it was tried
	failed bool            // it could not be registered, and may be another time

	operational health.Tristate // whether its operational events are in the set
}

// unfreedSet is an unused event set whose nvmlEventSetFree failed, or which can't be freed yet, because worker's registration
// in it has not returned.
type unfreedSet struct {
	set    nvml.EventSet
	worker *gpuWorker // nil if nvmlEventSetFree failed
}

// updateEventSet creates an event set of the GPUs, unless the latest one has the same GPUs and works. A GPU that can't be
// registered is left out and tried again after the next Snapshot; one without events is not tried again.
func (s *Session) updateEventSet(gpus []knownGPU) {
	s.freeUnusedSets()
	same := slices.EqualFunc(s.registeredGPUs, gpus, func(r registration, g knownGPU) bool {
		return r.handle == g.handle && r.device.ID == g.device.ID && !r.failed
	})
	if same && !s.eventSets.eventsUnavailable() {
		return
	}
	s.registeredGPUs = make([]registration, len(gpus))
	for i, g := range gpus {
		s.registeredGPUs[i].nvmlDevice = g.nvmlDevice
	}
	s.freeEventSet(&s.reader, s.eventSets.add(s.makeEventSet()))
}

// renewEventSet creates another set of the same GPUs if the latest one is unusable.
func (s *Session) renewEventSet() {
	s.freeUnusedSets()
	if len(s.registeredGPUs) == 0 || !s.eventSets.eventsUnavailable() {
		return
	}
	for i, r := range s.registeredGPUs {
		s.registeredGPUs[i] = registration{nvmlDevice: r.nvmlDevice}
	}
	s.freeEventSet(&s.reader, s.eventSets.add(s.makeEventSet()))
}

// xidEvents reports whether the XID events of a GPU are received at present.
func (s *Session) xidEvents(id gpu.DeviceID) health.Tristate {
	if _, hangs := s.hungWait(); hangs || s.eventSets.eventsUnavailable() {
		return health.NotReported
	}
	for _, r := range s.registeredGPUs {
		if r.device.ID == id {
			return r.events
		}
	}
	return health.NotReported
}

// makeEventSet creates a set of the GPUs whose registration has not failed. It returns an empty one if no GPU could be
// registered; retry then reports whether another attempt may succeed.
func (s *Session) makeEventSet() (e eventSet, retry bool) {
	s.eventSets.begin()
	for s.library.has("nvmlEventSetWait") {
		if !slices.ContainsFunc(s.registeredGPUs, func(r registration) bool { return !r.failed }) {
			return eventSet{}, len(s.registeredGPUs) > 0
		}
		set, err := call(&s.reader, "nvmlEventSetCreate", gpu.Node, s.lib.EventSetCreate)
		if err != nil {
			return eventSet{}, s.hadEventSet || !isUnsupported(err)
		}
		s.hadEventSet = true
		if e = (eventSet{set: set}); !s.registerAll(&e) {
			continue
		}
		if len(e.gpus) > 0 {
			return e, false
		}
		s.freeEventSet(&s.reader, e)
		return eventSet{}, slices.ContainsFunc(s.registeredGPUs, func(r registration) bool { return r.failed })
	}
	for i := range s.registeredGPUs {
		s.registeredGPUs[i].events = health.No
	}
	return eventSet{}, false
}

// registerAll registers the GPUs in a set, except those whose registration failed. It returns false if a failure has
// made the set unusable.
func (s *Session) registerAll(e *eventSet) bool {
	for i := range s.registeredGPUs {
		r := &s.registeredGPUs[i]
		if r.failed {
			continue
		}
		got, err := s.register(r.nvmlDevice, e.set)
		r.events = health.TristateOf(err == nil && got.mask&nvml.EventTypeXidCriticalError != 0)
		r.operational = got.operational
		e.operational = e.operational || got.operational == health.Yes
		w := s.worker(r.device.ID)
		r.failed = err != nil && (w.hadEvents || !isUnsupported(err))
		w.hadEvents = w.hadEvents || err == nil
		switch {
		case err == nil:
			e.gpus = append(e.gpus, registeredGPU{r.nvmlDevice, w})
		case isHung(err):
			// The hung call may still use the set.
			s.eventSets.keepUnfreed(unfreedSet{e.set, w})
			return false
		case returnCode(err) == nvml.ERROR_UNKNOWN:
			// The set is in an undefined state now (nvml.h).
			s.freeEventSet(&s.reader, *e)
			return false
		}
	}
	return true
}

// register registers a GPU in a set and returns its events. Only supported events are requested, as one that is not
// supported would make the call fail.
func (s *Session) register(d nvmlDevice, set nvml.EventSet) (registered, error) {
	at := gpu.WholeGPU(d.device.ID)
	return query(s, s.targetOf(d.device), func(c *caller) (got registered) {
		mask := retained(c, "nvmlDeviceGetSupportedEventTypes", d.handle.GetSupportedEventTypes) & subscribedEvents
		if c.err == nil && mask == 0 {
			c.err = &nvmlError{Call: "nvmlDeviceGetSupportedEventTypes", Return: nvml.ERROR_NOT_SUPPORTED, text: "no events"}
		}
		if c.err == nil {
			c.err = do(c.slot, "nvmlDeviceRegisterEvents", at, func() nvml.Return {
				return d.handle.RegisterEvents(mask, set)
			})
		}
		if c.err == nil {
			got = registered{mask, s.registerOperational(c.slot, d.device.ID, set)}
		}
		return got
	})
}

// registered are the events of a GPU that are in a set.
type registered struct {
	mask        uint64
	operational health.Tristate
}

// freeUnusedSets frees the unused sets that can be freed.
func (s *Session) freeUnusedSets() {
	for _, u := range s.eventSets.takeUnfreed() {
		if u.worker != nil && u.worker.isHung() {
			s.eventSets.keepUnfreed(u)
		} else {
			s.freeEventSet(&s.reader, eventSet{set: u.set})
		}
	}
}

// freeEventSets frees every set. It belongs to Close, when the reader and the waiter have ended.
func (s *Session) freeEventSets() {
	s.freeUnusedSets()
	s.closeBindEvents()
	for _, e := range append(s.eventSets.takePending(), s.eventSet) {
		s.freeEventSet(&s.waiter, e)
	}
	s.eventSet = eventSet{}
}

// freeEventSet frees a set. If that fails it is tried again later, as a set holds file descriptors, unless the driver
// is lost and the set with it.
func (s *Session) freeEventSet(l *callSlot, e eventSet) {
	if e.set == nil {
		return
	}
	if err := do(l, "nvmlEventSetFree", gpu.Node, e.set.Free); err != nil && !isDriverLost(err) {
		s.eventSets.keepUnfreed(unfreedSet{set: e.set})
	}
}
