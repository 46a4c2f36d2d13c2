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

// Wait returns what happened since the last call, each observation once, and waits for at most max.
//   - An XID event is of kind health.XID, at a MIG instance if the driver reports one.
//   - Another event that names a fault is of kind health.Event; Code is its nvmlEventType.
//   - A GPU that the kernel driver was unbound from and bound to again is of kind health.DriverRebound.
//   - Anything else is of kind 0 and changes no health: a Snapshot or Probe has to show what changed.
//
// On a node without events it only waits. After an error there are no events until the reader has created another event
// set, which Probe and Snapshot do; the caller pauses meanwhile. It belongs to the waiter.
func (s *Session) Wait(max time.Duration) ([]health.Observation, error) {
	s.waitLimit.Store(int64(max))
	obs := s.readBindEvents()
	if s.unstable.Swap(false) {
		obs = append(obs, health.Observation{At: gpu.Node, Detail: enumerationUnstable})
	}
	if s.procfs.changed(s.proc) {
		obs = append(obs, health.Observation{At: gpu.Node, Detail: "GPUs or MIG instances were added or removed"})
	}
	for _, next := range s.eventSets.takePending() {
		obs, _ = s.drain(s.eventSet, obs)
		s.freeEventSet(&s.waiter, s.eventSet)
		s.eventSet = next
	}
	switch {
	case len(obs) > 0:
		return obs, nil
	case s.eventSet.set == nil:
		s.waitForEventSet(max)
		return nil, nil
	}
	err := s.waitErr
	if err == nil {
		var first health.Observation
		var any bool
		if first, any, err = s.next(s.eventSet, max); any {
			obs, s.waitErr = s.drain(s.eventSet, []health.Observation{first})
		}
		if err == nil {
			return obs, nil
		}
	}
	s.waitErr = nil
	s.freeEventSet(&s.waiter, s.eventSet)
	s.eventSet = eventSet{}
	s.eventSets.setFailed()
	return nil, err
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
func (s *Session) next(e eventSet, max time.Duration) (o health.Observation, any bool, err error) {
	event, err := call(&s.waiter, "nvmlEventSetWait", gpu.Node, func() (event nvml.EventData, ret nvml.Return) {
		if event, ret = e.set.Wait(uint32(max.Milliseconds())); ret == nvml.ERROR_TIMEOUT {
			return event, nvml.SUCCESS
		}
		any = ret == nvml.SUCCESS
		return event, ret
	})
	if any {
		o = s.observationOf(e, event)
	}
	return o, any, err
}

// drain adds the events that a set has already to obs, each observation once. The error is why the set is unusable.
func (s *Session) drain(e eventSet, obs []health.Observation) ([]health.Observation, error) {
	for n := 0; e.set != nil && n < maxDrain; n++ {
		o, any, err := s.next(e, 0)
		if !any {
			return obs, err
		}
		if !slices.Contains(obs, o) {
			obs = append(obs, o)
		}
	}
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

// observationOf converts an event. The GPU is found by its handle: the UUID of a lost GPU can't be read, and an
// observation without a GPU counts against all of them.
func (s *Session) observationOf(e eventSet, event nvml.EventData) health.Observation {
	o := health.Observation{At: gpu.Node}
	for _, g := range e.gpus {
		if g.handle == event.Device {
			o.At = gpu.WholeGPU(g.device.ID)
			g.worker.eventPending.Store(true)
		}
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
