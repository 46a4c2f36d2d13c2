package nvidia

import (
	"fmt"
	"runtime"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// system listens to the kernel driver being unbound from GPUs and bound to them. Not every driver has such
// events; it is quiet then.
type system struct {
	set     nvml.SystemEventSet
	tried   bool
	open    bool
	unbound map[uint32]bool
}

// binding waits for no event but returns those that happened: an unbinding is a hint, a binding after one
// says that the GPU was initialised anew. It belongs to the waiter.
func (s *Session) binding() []core.Observation {
	if !s.system.tried {
		s.system.tried, s.system.unbound = true, map[uint32]bool{}
		s.openSystem()
	}
	var obs []core.Observation
	for s.system.open {
		events, err := s.nextBindings()
		if err != nil && returned(err) != nvml.ERROR_TIMEOUT {
			s.closeSystem() // it is as if the driver had none
		}
		if len(events) == 0 {
			break
		}
		for _, e := range events {
			obs = append(obs, s.bound(e))
		}
	}
	return obs
}

func (s *Session) openSystem() {
	for _, name := range []string{"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree"} {
		if !s.waiter.have[name] {
			return
		}
	}
	create := nvml.SystemEventSetCreateRequest{}
	create.Version = nvml.STRUCT_VERSION(create, 1)
	err := do(&s.waiter, "nvmlSystemEventSetCreate", core.Node, func() nvml.Return { return s.lib.SystemEventSetCreate(&create) })
	if err != nil {
		return
	}
	s.system.set, s.system.open = create.Set, true
	register := nvml.SystemRegisterEventRequest{
		EventTypes: nvml.SystemEventTypeGpuDriverUnbind | nvml.SystemEventTypeGpuDriverBind, Set: create.Set,
	}
	register.Version = nvml.STRUCT_VERSION(register, 1)
	err = do(&s.waiter, "nvmlSystemRegisterEvents", core.Node, func() nvml.Return { return s.lib.SystemRegisterEvents(&register) })
	if err != nil {
		s.closeSystem()
	}
}

// nextBindings asks for what is there. The request holds a pointer to the data, and Go lets no pointer to
// a pointer of its own go to C unless that is pinned.
func (s *Session) nextBindings() ([]nvml.SystemEventData_v1, error) {
	data := make([]nvml.SystemEventData_v1, 16)
	var pinner runtime.Pinner
	pinner.Pin(&data[0])
	defer pinner.Unpin()
	r := nvml.SystemEventSetWaitRequest{Set: s.system.set, Data: &data[0], DataSize: uint32(len(data))}
	r.Version = nvml.STRUCT_VERSION(r, 1)
	err := do(&s.waiter, "nvmlSystemEventSetWait", core.Node, func() nvml.Return { return s.lib.SystemEventSetWait(&r) })
	if err != nil {
		return nil, err
	}
	return data[:min(r.NumEvent, uint32(len(data)))], nil
}

// bound says what a system event means. It names the GPU by its PCI address, of which NVML gives the
// domain, the bus and the device in one number.
func (s *Session) bound(e nvml.SystemEventData_v1) core.Observation {
	pci := core.PCIAddress(fmt.Sprintf("%04x:%02x:%02x.0", e.GpuId>>16, e.GpuId>>8&0xff, e.GpuId&0xff))
	o := core.Observation{At: core.Node, PCI: pci, Detail: "driver bound"}
	switch {
	case e.EventType == nvml.SystemEventTypeGpuDriverUnbind:
		s.system.unbound[e.GpuId] = true
		o.Detail = "driver unbound"
	case s.system.unbound[e.GpuId]:
		delete(s.system.unbound, e.GpuId)
		o.Kind, o.Detail = core.DriverRebound, ""
	}
	for _, g := range s.armed.gpus {
		if g.device.PCI == pci {
			o.At, o.PCI = core.WholeGPU(g.device.ID), ""
			g.lane.hinted.Store(true)
			if o.Kind == core.DriverRebound {
				g.lane.rebound.Store(true)
			}
		}
	}
	return o
}

// closeSystem is called by the waiter, and by Close.
func (s *Session) closeSystem() {
	if !s.system.open {
		return
	}
	s.system.open = false
	free := nvml.SystemEventSetFreeRequest{Set: s.system.set}
	free.Version = nvml.STRUCT_VERSION(free, 1)
	_ = do(&s.waiter, "nvmlSystemEventSetFree", core.Node, func() nvml.Return { return s.lib.SystemEventSetFree(&free) })
}
