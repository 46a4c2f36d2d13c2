package nvidia

import (
	"fmt"
	"runtime"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// bindEvents is the set of system events: the kernel driver was unbound from a GPU, or bound to one. A driver that has no
// such events gives none.
type bindEvents struct {
	set     nvml.SystemEventSet
	tried   bool // whether the set was created, successfully or not
	open    bool
	unbound map[uint32]bool // by nvmlSystemEventData_v1_t.gpuId
}

// readBindEvents returns the system events so far, without waiting. An unbind is of kind 0; a bind after it is
// health.DriverRebound: the driver has initialised the GPU again.
func (s *Session) readBindEvents() []health.Observation {
	if !s.bindEvents.tried {
		s.bindEvents.tried, s.bindEvents.unbound = true, map[uint32]bool{}
		s.openBindEvents()
	}
	var obs []health.Observation
	for s.bindEvents.open {
		events, err := s.nextBindEvents()
		if err != nil {
			s.closeBindEvents()
		}
		if len(events) == 0 {
			break
		}
		for _, e := range events {
			obs = append(obs, s.bindObservation(e))
		}
	}
	return obs
}

// openBindEvents creates the set, if the library has all functions for it.
func (s *Session) openBindEvents() {
	for _, name := range []string{"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree"} {
		if !s.library.has(name) {
			return
		}
	}
	create := nvml.SystemEventSetCreateRequest{}
	create.Version = nvml.STRUCT_VERSION(create, 1)
	err := do(&s.waiter, "nvmlSystemEventSetCreate", gpu.Node, func() nvml.Return { return s.lib.SystemEventSetCreate(&create) })
	if err != nil {
		return
	}
	s.bindEvents.set, s.bindEvents.open = create.Set, true
	register := nvml.SystemRegisterEventRequest{
		EventTypes: nvml.SystemEventTypeGpuDriverUnbind | nvml.SystemEventTypeGpuDriverBind, Set: create.Set,
	}
	register.Version = nvml.STRUCT_VERSION(register, 1)
	err = do(&s.waiter, "nvmlSystemRegisterEvents", gpu.Node, func() nvml.Return { return s.lib.SystemRegisterEvents(&register) })
	if err != nil {
		s.closeBindEvents()
	}
}

// nextBindEvents reads up to 16 events without waiting; none is no error. The request holds a pointer to data, and cgo requires
// that a Go pointer in memory that is passed to C points to pinned memory.
func (s *Session) nextBindEvents() ([]nvml.SystemEventData_v1, error) {
	data := make([]nvml.SystemEventData_v1, 16)
	var pinner runtime.Pinner
	pinner.Pin(&data[0])
	defer pinner.Unpin()
	r := nvml.SystemEventSetWaitRequest{Set: s.bindEvents.set, Data: &data[0], DataSize: uint32(len(data))}
	r.Version = nvml.STRUCT_VERSION(r, 1)
	err := do(&s.waiter, "nvmlSystemEventSetWait", gpu.Node, func() nvml.Return {
		ret := s.lib.SystemEventSetWait(&r)
		if ret == nvml.ERROR_TIMEOUT {
			r.NumEvent, ret = 0, nvml.SUCCESS
		}
		return ret
	})
	if err != nil {
		return nil, err
	}
	return data[:min(r.NumEvent, uint32(len(data)))], nil
}

// bindObservation converts a system event. The event has the GPU's PCI domain, bus and device in one number. If the GPU
// is not in the event set, the observation has the PCI address in place of the UUID.
func (s *Session) bindObservation(e nvml.SystemEventData_v1) health.Observation {
	pci := gpu.PCIAddress(fmt.Sprintf("%04x:%02x:%02x.0", e.GpuId>>16, e.GpuId>>8&0xff, e.GpuId&0xff))
	o := health.Observation{At: gpu.Node, PCI: pci, Detail: "driver bound"}
	switch {
	case e.EventType == nvml.SystemEventTypeGpuDriverUnbind:
		s.bindEvents.unbound[e.GpuId] = true
		o.Detail = "driver unbound"
	case s.bindEvents.unbound[e.GpuId]:
		delete(s.bindEvents.unbound, e.GpuId)
		o.Kind, o.Detail = health.DriverRebound, ""
	}
	for _, g := range s.eventSet.gpus {
		if g.device.PCI == pci {
			o.At, o.PCI = gpu.WholeGPU(g.device.ID), ""
			g.worker.eventPending.Store(true)
			if o.Kind == health.DriverRebound {
				g.worker.rebound.Store(true)
			}
		}
	}
	return o
}

// closeBindEvents belongs to the waiter, and to Close.
func (s *Session) closeBindEvents() {
	if !s.bindEvents.open {
		return
	}
	s.bindEvents.open = false
	free := nvml.SystemEventSetFreeRequest{Set: s.bindEvents.set}
	free.Version = nvml.STRUCT_VERSION(free, 1)
	_ = do(&s.waiter, "nvmlSystemEventSetFree", gpu.Node, func() nvml.Return { return s.lib.SystemEventSetFree(&free) })
}
