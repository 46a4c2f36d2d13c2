package nvidia

import (
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// drainAtMost bounds how many events one Wait takes off a set: only a flood is longer.
const drainAtMost = 1024

// Wait returns what happened since the last call, blocking for at most max; what happened several times is
// there once. An XID is an observation of that kind, at an instance if the driver can tell; another event
// that names a fault is of kind core.Event; a GPU that has its driver back is core.DriverRebound. Any other is of
// kind 0, which changes no health: it says where something happened, and asking says what. Where no GPU has
// events it just waits.
//
// An error means that events can't be had at present: the caller pauses and asks the GPUs, and Probe or
// Snapshot makes another set.
func (s *Session) Wait(max time.Duration) ([]core.Observation, error) {
	s.allowed.Store(int64(max))
	heard := s.binding()
	if s.restless.Swap(false) {
		heard = append(heard, core.Observation{At: core.Node, Detail: comeAndGo})
	}
	if s.layout.changed(s.proc) {
		heard = append(heard, core.Observation{At: core.Node, Detail: "GPUs or MIG instances came or went"})
	}
	for _, next := range s.ears.take() {
		heard, _ = s.drain(s.armed, heard)
		s.free(&s.waiter, s.armed)
		s.armed = next
	}
	switch {
	case len(heard) > 0:
		return heard, nil
	case s.armed.set == nil:
		s.idle(max)
		return nil, nil
	}
	err := s.broken
	if err == nil {
		var first core.Observation
		if first, err = s.next(s.armed, max); err == nil {
			heard, s.broken = s.drain(s.armed, []core.Observation{first})
			return heard, nil
		}
	}
	s.broken = nil
	if returned(err) == nvml.ERROR_TIMEOUT {
		return nil, nil
	}
	s.free(&s.waiter, s.armed)
	s.armed = armed{}
	s.ears.broke()
	return nil, err
}

// deaf is the call in which Wait hangs: it is in the driver for longer than it was told to wait, by the session's
// patience. No event is heard meanwhile; the GPUs can be asked all the same. It is safe for concurrent use.
func (s *Session) deaf() (core.Call, bool) {
	c, inside := s.waiter.busy()
	if !inside || time.Since(c.Since) < time.Duration(s.allowed.Load())+s.patience {
		return core.Call{}, false
	}
	return c, true
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

// drain adds what a set still holds to what was heard, each thing once. The error says why the set is of
// no more use.
func (s *Session) drain(a armed, heard []core.Observation) ([]core.Observation, error) {
	for n := 0; a.set != nil && n < drainAtMost; n++ {
		o, err := s.next(a, 0)
		switch {
		case returned(err) == nvml.ERROR_TIMEOUT:
			return heard, nil
		case err != nil:
			return heard, err
		case !slices.Contains(heard, o):
			heard = append(heard, o)
		}
	}
	return heard, nil
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

// faults are the events that name a fault, XIDs aside.
const faults = nvml.EventTypeDoubleBitEccError | nvml.EventTypeSingleBitEccErrorStorm |
	nvml.EventTypeDramRetirementEvent | nvml.EventTypeDramRetirementFailure |
	nvml.EventTypeNonFatalPoisonError | nvml.EventTypeFatalPoisonError | nvml.EventTypeGpuUnavailableError

// observed says what an event means. The GPU is found by its handle: asking a lost one for its UUID
// fails, and then all GPUs would be to blame.
func (s *Session) observed(a armed, event nvml.EventData) core.Observation {
	o := core.Observation{At: core.Node}
	for _, g := range a.gpus {
		if g.handle == event.Device {
			o.At = core.WholeGPU(g.device.ID)
			g.lane.hinted.Store(true)
		}
	}
	switch {
	case o.At == core.Node, event.EventType&(nvml.EventTypeXidCriticalError|faults) == 0:
		o.Detail = fmt.Sprintf("event 0x%x", event.EventType)
	case event.EventType == nvml.EventTypeXidCriticalError:
		o.Kind, o.Code = core.XID, event.EventData
		if s.waiter.have[attributed] {
			o.At.GI, o.At.CI = event.GpuInstanceId, event.ComputeInstanceId
		}
	default:
		o.Kind, o.Code = core.Event, event.EventType
	}
	return o
}
