package nvidia

import (
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// maxDrain is the maximum number of events that one Wait reads from a set without waiting. Only a storm has more.
const maxDrain = 1024

// lateAfter is for how long Wait does not read a set, beyond the time that it may wait, until the events are late: a wait hangs, or
// there is no usable set. The kernel log has them earlier then.
const lateAfter = 5 * time.Second

// Wait returns what happened since the last call, each observation once, and waits for at most max.
//   - An XID event is of kind health.XID, at a MIG instance if the driver reports one.
//   - Another event that names a fault is of kind health.Event; Code is its nvmlEventType.
//   - A GPU that the kernel driver was unbound from and bound to again is of kind health.DriverRebound.
//   - An operational event is of kind health.Operational, and its XID, if that is a fault, is an XID event, too.
//   - Anything else is of kind 0 and changes no health: a Snapshot or Probe has to show what changed.
//
// On a node without events it only waits. After an error there are no events until the reader has created another event
// set, which Probe and Snapshot do; the caller pauses meanwhile. It belongs to the waiter.
func (s *Session) Wait(max time.Duration) ([]health.Observation, error) {
	drained := s.drained
	obs, err := s.wait(max)
	s.keepReported(obs)
	if delay := s.now().Sub(drained); delay > max+lateAfter {
		for i := range obs {
			obs[i].Age.Most = delay
		}
	}
	return obs, err
}

func (s *Session) wait(max time.Duration) ([]health.Observation, error) {
	s.waitLimit.Store(int64(max))
	obs := append(s.readBindEvents(), s.dueXIDs(holdFor)...)
	if s.unstable.Swap(false) {
		obs = append(obs, health.Observation{At: gpu.Node, Detail: enumerationUnstable})
	}
	if s.procfs.changed(s.proc) {
		obs = append(obs, health.Observation{At: gpu.Node, Detail: "GPUs or MIG instances were added or removed"})
	}
	if sets := s.eventSets.takePending(); len(sets) > 0 {
		obs = s.replaceEventSet(sets, obs)
	}
	switch {
	case len(obs) > 0:
		return obs, nil
	case s.eventSet.set == nil || s.eventSetFailed:
		s.waitForEventSet(max)
		return nil, nil
	}
	err := s.waitErr
	if err == nil {
		var first []health.Observation
		var any bool
		if first, any, err = s.next(s.eventSet, max); any {
			obs, s.waitErr = s.drain(s.added(nil, first))
		} else if err == nil {
			s.unread = false
		}
		if err == nil {
			return obs, nil
		}
	}
	s.waitErr, s.eventSetFailed = nil, true
	s.eventSets.setFailed()
	return s.dueXIDs(0), err // the error may end the session
}

// replaceEventSet puts the latest of several sets in the place of the present one, and adds the events of all to obs, each once. What
// the wait on an earlier set has returned is not repeated.
func (s *Session) replaceEventSet(sets []eventSet, obs []health.Observation) []health.Observation {
	obs, _ = s.drain(obs)
	for _, next := range sets {
		s.freeEventSet(&s.waiter, s.eventSet)
		s.eventSet, s.eventSetFailed, s.unread = next, false, true
		obs, s.waitErr = s.drain(obs)
	}
	return obs
}

// added adds events of the set to obs, each observation once. While the set is unread it may have what Wait has returned since the reader began the set: that is left out.
func (s *Session) added(obs, events []health.Observation) []health.Observation {
	for _, o := range events {
		if reported := s.unread && slices.Contains(s.reported, o); !reported && !slices.Contains(obs, o) {
			obs = append(obs, o)
		}
	}
	return obs
}

// keepReported keeps what Wait returns while there may be a set that has it too and was not taken, or not read to its end.
func (s *Session) keepReported(obs []health.Observation) {
	if !s.eventSets.overlap() && !s.unread {
		s.reported = nil
		return
	}
	for _, o := range obs {
		if !slices.Contains(s.reported, o) {
			s.reported = append(s.reported, o)
		}
	}
}

// hungWait is the call in which Wait hangs: it exceeds the time that it was to wait by the session's deadline. No events
// are received meanwhile; calls about GPUs are not affected. It is safe for concurrent use.
func (s *Session) hungWait() (gpu.Call, bool) {
	c, inProgress := s.waiter.current()
	if !inProgress || time.Since(c.Since) < time.Duration(s.waitLimit.Load())+s.deadline {
		return gpu.Call{}, false
	}
	return c, true
}

// next waits for one event of a set; false if there is none.
func (s *Session) next(e eventSet, max time.Duration) (obs []health.Observation, any bool, err error) {
	if e.operational && !s.noOperational.Load() {
		if obs, any, err = s.nextOperational(e, max); !isUnsupported(err) {
			s.waitedOperational = s.waitedOperational || err == nil
			return obs, any, err
		}
		if !s.waitedOperational { // else the answer may be wrong: see retained
			s.noOperational.Store(true)
		}
	}
	event, err := call(&s.waiter, "nvmlEventSetWait", gpu.Node, func() (event nvml.EventData, ret nvml.Return) {
		if event, ret = e.set.Wait(uint32(max.Milliseconds())); ret == nvml.ERROR_TIMEOUT {
			return event, nvml.SUCCESS
		}
		any = ret == nvml.SUCCESS
		return event, ret
	})
	switch {
	case any:
		g := e.find(func(g registeredGPU) bool { return g.handle == event.Device })
		obs = []health.Observation{s.observationOf(g, event)}
	case err == nil:
		s.drained = s.now()
	}
	return obs, any, err
}

// drain adds the events that the set has already to obs, and returns why the set is unusable. The set stays unread if there may be more, as after an error.
func (s *Session) drain(obs []health.Observation) ([]health.Observation, error) {
	for n := 0; s.eventSet.set != nil && n < maxDrain; n++ {
		next, any, err := s.next(s.eventSet, 0)
		if !any {
			s.unread = s.unread && err != nil
			return obs, err
		}
		obs = s.added(obs, next)
	}
	s.unread = s.unread && s.eventSet.set != nil
	return obs, nil
}

func (s *Session) waitForEventSet(max time.Duration) {
	t := time.NewTimer(max)
	defer t.Stop()
	select {
	case <-s.eventSets.added:
	case <-t.C:
	}
}

// faultEvents are the events that name a fault, except XIDs.
const faultEvents = nvml.EventTypeDoubleBitEccError | nvml.EventTypeSingleBitEccErrorStorm |
	nvml.EventTypeDramRetirementEvent | nvml.EventTypeDramRetirementFailure |
	nvml.EventTypeNonFatalPoisonError | nvml.EventTypeFatalPoisonError | nvml.EventTypeGpuUnavailableError

// find returns a registered GPU; nil if none matches.
func (e eventSet) find(matches func(registeredGPU) bool) *registeredGPU {
	if i := slices.IndexFunc(e.gpus, matches); i >= 0 {
		return &e.gpus[i]
	}
	return nil
}

// observationOf converts an event of a GPU; nil = of none that is registered. The GPU was found by its handle where the event has one: the
// UUID of a lost GPU can't be read, and an observation without a GPU counts against all of them.
func (s *Session) observationOf(g *registeredGPU, event nvml.EventData) health.Observation {
	o := health.Observation{At: gpu.Node}
	if g != nil {
		o.At = gpu.WholeGPU(g.device.ID)
		g.worker.eventPending.Store(true)
	}
	switch {
	case o.At == gpu.Node, event.EventType&(nvml.EventTypeXidCriticalError|faultEvents) == 0:
		o.Detail = fmt.Sprintf("event 0x%x", event.EventType)
	case event.EventType == nvml.EventTypeXidCriticalError:
		o.Kind, o.Code = health.XID, event.EventData
		if s.library.has(eventWaitV2) {
			o.At.GI, o.At.CI = event.GpuInstanceId, event.ComputeInstanceId
		}
	default:
		o.Kind, o.Code = health.Event, event.EventType
	}
	return o
}
