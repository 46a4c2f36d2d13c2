package nvidia

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// The calls of operational events, which libraries have from 615 on.
const (
	registerOperational = "nvmlEventSetRegisterGpuOperationalEvents_v1"
	waitV3              = "nvmlEventSetWait_v3"
	contextCount        = "nvmlEventSetGetContextCount_v1"
	contextXID          = "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1"
)

// operationalLevel is the log level of operational events from which on they are received: telemetry, diagnostics and notices may be many,
// and none of them is a fault.
const operationalLevel = nvml.GPU_OPERATIONAL_EVENT_LOG_LEVEL_WARNING

// maxContexts is the maximum number of contexts of one event that are searched for an XID.
const maxContexts = 16

// hasOperational reports whether the library has operational events. It is safe for concurrent use.
func (s *Session) hasOperational() bool {
	return !s.noOperational.Load() && s.library.has(registerOperational) && s.library.has(waitV3) && s.library.has(contextCount) &&
		s.library.has(contextXID)
}

// registerOperational adds the operational events of a GPU to a set that has its other events: Yes if they are in it, NotReported if the
// driver has none. A failure is no fault: the set has the XIDs.
func (s *Session) registerOperational(l *callSlot, id gpu.DeviceID, set nvml.EventSet) health.Tristate {
	if !s.hasOperational() {
		return health.NotReported
	}
	config := nvml.GpuOperationalEventConfig_v1{MinLogLevel: uint32(operationalLevel), MinSeverity: uint32(nvml.OPERATIONAL_EVENT_SEVERITY_ALL)}
	for i, b := range []byte(id[:min(len(id), len(config.Uuid)-1)]) {
		config.Uuid[i] = int8(b)
	}
	err := do(l, registerOperational, gpu.WholeGPU(id), func() nvml.Return { return set.RegisterGpuOperationalEvents_v1(&config) })
	if isUnsupported(err) {
		return health.NotReported
	}
	return health.TristateOf(err == nil)
}

// operationalEvents reports whether the operational events of a GPU are received at present.
func (s *Session) operationalEvents(id gpu.DeviceID) health.Tristate {
	if s.noOperational.Load() || s.xidEvents(id) == health.NotReported {
		return health.NotReported
	}
	i := slices.IndexFunc(s.registeredGPUs, func(r registration) bool { return r.device.ID == id })
	return s.registeredGPUs[i].operational
}

// nextOperational is next for a set with operational events.
func (s *Session) nextOperational(e eventSet, max time.Duration) (obs []health.Observation, any bool, err error) {
	event, err := call(&s.waiter, waitV3, gpu.Node, func() (event nvml.EventSetWaitData_v3, ret nvml.Return) {
		if event, ret = e.set.Wait_v3(uint32(max.Milliseconds())); ret == nvml.ERROR_TIMEOUT {
			return event, nvml.SUCCESS
		}
		any = ret == nvml.SUCCESS
		return event, ret
	})
	if !any {
		if err == nil {
			s.drained = s.now()
		}
		return nil, false, err
	}
	id := gpu.DeviceID(cString(event.Uuid[:]))
	g := e.find(func(g registeredGPU) bool { return g.device.ID == id || id == "" && len(e.gpus) == 1 })
	switch nvml.EventDataType(event.DataType) {
	case nvml.EVENT_DATA_TYPE_NVML_EVENT:
		return []health.Observation{s.observationOf(g, nvml.EventData{
			EventType: event.EventType, EventData: event.EventData, GpuInstanceId: event.GpuInstanceId, ComputeInstanceId: event.ComputeInstanceId,
		})}, true, nil
	case nvml.EVENT_DATA_TYPE_GPU_OPERATIONAL_EVENT:
		return s.operationalObservations(e, g, event), true, nil
	default:
		return []health.Observation{{At: gpu.Node, Detail: fmt.Sprintf("event of data type %d", event.DataType)}}, true, nil
	}
}

// operationalObservations converts an operational event of a GPU; nil = the driver does not name it (615 leaves the UUID "empty if unavailable"), or it is of none that
// is registered. No XID counts then; if the event may be of a fault, a check of all GPUs is to find which has it.
func (s *Session) operationalObservations(e eventSet, g *registeredGPU, event nvml.EventSetWaitData_v3) []health.Observation {
	o := health.Observation{At: gpu.Node, Kind: health.Operational, Operational: health.OperationalEvent{
		Module: moduleName(event.SourceModule[:]), Code: event.ModuleEventCode, Severity: health.Severity(event.Severity),
		Attributes: event.Attributes, GroupAttributes: event.GroupAttributes, XID: s.contextXID(e.set),
	}}
	concerned := e.gpus
	if g != nil {
		o.At, concerned = gpu.WholeGPU(g.device.ID), []registeredGPU{*g}
	}
	if o.CallsForCheck() {
		for _, c := range concerned {
			c.worker.eventPending.Store(true)
		}
	}
	obs := []health.Observation{o}
	if g == nil || !o.Operational.Fault() || s.knownGroup(xidGroup{g.device.ID, o.Operational.XID, event.GroupCursor}) {
		return obs
	}
	fault := health.Observation{At: o.At, Kind: health.XID, Code: o.Operational.XID, FromOperational: true}
	if g.device.MIG {
		s.holdXID(fault)
		return obs
	}
	return append(obs, fault)
}

// xidGroup is an XID in a group of events: one incident, in one or more events.
type xidGroup struct {
	gpu   gpu.DeviceID
	xid   uint64
	group uint64 // groupCursor; 0 = not known
}

// maxXIDGroups bounds the groups that are remembered: those of one incident follow each other.
const maxXIDGroups = 64

// knownGroup reports whether an event of a group has had its XID before, and remembers it.
func (s *Session) knownGroup(x xidGroup) bool {
	if x.group == 0 {
		return false
	}
	if slices.Contains(s.xidGroups, x) {
		return true
	}
	if s.xidGroups = append(s.xidGroups, x); len(s.xidGroups) > maxXIDGroups {
		s.xidGroups = s.xidGroups[1:]
	}
	return false
}

// contextXID is the XID in the contexts of the event that a wait on a set has returned last; 0 if it has none, or that can't be read.
func (s *Session) contextXID(set nvml.EventSet) uint64 {
	n, err := call(&s.waiter, contextCount, gpu.Node, set.GetContextCount_v1)
	if err != nil {
		return 0
	}
	for i := range min(n.Count, maxContexts) {
		code, err := call(&s.waiter, contextXID, gpu.Node, func() (uint32, nvml.Return) {
			code, ret := set.GetGpuOperationalEventContextLegacyXid_v1(i)
			if ret == nvml.ERROR_NOT_FOUND { // another context
				return 0, nvml.SUCCESS
			}
			return code, ret
		})
		if err == nil && code != 0 {
			return uint64(code)
		}
	}
	return 0
}

// moduleName is a source module as one printable word. It may fill its array without a NUL.
func moduleName(module []int8) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return -1
		}
		return r
	}, cString(module))
}

// heldXID is the XID of an operational event that Wait has not returned yet.
type heldXID struct {
	fault health.Observation
	since time.Time
}

// holdFor is for how long the XID of an operational event of a GPU in MIG mode is held. Such an event names no instance (nvml.h), while the
// NVML event of the same XID does: that one is to be the first, or an instance's fault would be one of all instances.
const holdFor = 2 * time.Second

// holdXID has a later Wait return an XID.
func (s *Session) holdXID(fault health.Observation) {
	if slices.Contains(s.reported, fault) || slices.ContainsFunc(s.heldXIDs, func(h heldXID) bool { return h.fault == fault }) {
		return
	}
	s.heldXIDs = append(s.heldXIDs, heldXID{fault, s.now()})
}

// dueXIDs removes and returns the XIDs that were held for a time.
func (s *Session) dueXIDs(held time.Duration) (due []health.Observation) {
	for len(s.heldXIDs) > 0 && s.now().Sub(s.heldXIDs[0].since) >= held {
		due, s.heldXIDs = append(due, s.heldXIDs[0].fault), s.heldXIDs[1:]
	}
	return due
}
