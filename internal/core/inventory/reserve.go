package inventory

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Plan is what one container needs to use its devices.
type Plan struct {
	Units     []Unit       // distinct, sorted by ID
	Devices   []gpu.Device // of the units, distinct, in canonical order
	IDs       []string     // of Devices: UUIDs, or indices (see Inventory.ByIndex)
	Injection Injection    // of the units' pool
	Env       []EnvVar     // limits, sorted by name
	Nodes     []DeviceNode // with Injection.Nodes
	CDI       []string     // qualified names of CDI devices, as far as Injection.CDI is in force
	Mounts    []Mount      // with Injection.Libraries; not to be changed
	IMEX      bool         // the container gets IMEX channel 0
	Memory    uint64       // bytes that the driver is to limit the work to, on each device; 0 = no limit
	MPS       string       // pool whose MPS control daemon the container connects to; "" = none
}

// EnvVar is one environment variable of a container.
type EnvVar struct{ Name, Value string }

// DeviceNode is a device node that a container may open. Its path is the same as on the host.
type DeviceNode struct {
	Path        string // "/dev/nvidia0"
	Permissions string // "rw"
}

// VisibleDevices is the environment variable of NVIDIA's container runtime: UUIDs or indices, separated by commas.
const VisibleDevices = "NVIDIA_VISIBLE_DEVICES"

// UnknownUnitsError has the requested IDs that are not in the inventory.
type UnknownUnitsError struct{ IDs []UnitID }

// Error lists the IDs.
func (e *UnknownUnitsError) Error() string { return "unknown device IDs: " + joinIDs(e.IDs, ",") }

// UnhealthyUnitsError has the requested units that take no new work.
type UnhealthyUnitsError struct{ Units []Unit }

// Error lists the units with their health.
func (e *UnhealthyUnitsError) Error() string {
	texts := make([]string, len(e.Units))
	for i, u := range e.Units {
		texts[i] = fmt.Sprintf("%s is %s", u.ID, u.Health)
	}
	return "unhealthy devices: " + strings.Join(texts, "; ")
}

// SharedUnitsError means that a request has several units of a pool with Sharing.OnePerRequest.
type SharedUnitsError struct {
	Pool string
	N    int // number of requested units
}

// Error names the pool and the limit.
func (e *SharedUnitsError) Error() string {
	return fmt.Sprintf("%d units of %s, whose devices are shared: maximum request size for shared resources is 1", e.N, e.Pool)
}

// Reserve returns the plan for a container that uses the units. Order and repetitions of ids do not matter.
// Nothing is marked as in use, because the orchestrator keeps the record of allocations: a second call returns an
// equal plan. The error contains every invalid ID in one line (*UnknownUnitsError, *UnhealthyUnitsError, or both
// wrapped), or is a *SharedUnitsError or an *UnequalLimitsError. Several units of one device give that device once. No ID gives an empty
// plan.
func (a *Allocatable) Reserve(ids ...UnitID) (Plan, error) {
	return a.reserve(ids, func(u *Unit) (health.Health, bool) { return u.Health, u.Health.Schedulable() })
}

// ReserveTolerated is Reserve for work that tolerates conditions of its devices: it may have a unit that takes no new work if tolerates
// reports true for each of the unit's conditions because of which it does not. Conditions that no work can live with are never
// tolerated (see health.Health.Tolerable), and neither is a missing CDI definition, a required limit that nothing can hold or, behind a fault, that the GPU is
// not this agent's.
// That a GPU leaves for another API counts for nothing: the work was placed on it before, and holds it. While the driver is released for a reset no
// unit is given out. The error has the first condition of a unit that is not tolerated.
func (a *Allocatable) ReserveTolerated(tolerates func(Unit, health.Health) bool, ids ...UnitID) (Plan, error) {
	return a.reserve(ids, func(u *Unit) (health.Health, bool) {
		if u.Health.Schedulable() {
			return u.Health, true
		}
		if id := a.ownership.DriverReleased; id != "" {
			return health.New(health.ReasonResetting, string(id)), false
		}
		for _, h := range a.Conditions(*u) {
			if a.isDraining(u, h) {
				continue
			}
			if !h.Schedulable() && (!h.Tolerable() || !tolerates(*u, h)) {
				return h, false
			}
		}
		if h, ok := a.withheld[u.Device.ID]; ok && !a.isDraining(u, h) {
			return h, false
		}
		if ok, why := a.cdi.gives(u, a.incarnation); !ok && u.Injection.usesCDI(a.cdi, a.incarnation) {
			return health.New(health.ReasonNoCDI, why), false
		}
		if h := a.noLimit(u); h != (health.Health{}) {
			return h, false
		}
		return u.Health, true
	})
}

// reserve returns the plan for units, each of which accept reports true for. Otherwise it returns why the unit takes no work.
func (a *Allocatable) reserve(ids []UnitID, accept func(*Unit) (health.Health, bool)) (Plan, error) {
	ids = slices.Clone(ids)
	slices.Sort(ids)
	ids = slices.Compact(ids)
	units := make([]Unit, 0, len(ids))
	var unknown UnknownUnitsError
	var unhealthy UnhealthyUnitsError
	for _, id := range ids {
		i, ok := a.byID[id]
		if !ok {
			unknown.IDs = append(unknown.IDs, id)
			continue
		}
		units = append(units, a.units[i])
		if why, ok := accept(&a.units[i]); !ok {
			last := len(units) - 1
			units[last].Health = why
			unhealthy.Units, units = append(unhealthy.Units, units[last]), units[:last]
		}
	}
	switch {
	case len(unknown.IDs) > 0 && len(unhealthy.Units) > 0:
		return Plan{}, fmt.Errorf("%w; %w", &unknown, &unhealthy)
	case len(unknown.IDs) > 0:
		return Plan{}, &unknown
	case len(unhealthy.Units) > 0:
		return Plan{}, &unhealthy
	case len(units) == 0:
		return Plan{}, nil
	}
	for i := range units {
		if u := &units[i]; u.Sharing.OnePerRequest && len(units) > 1 {
			return Plan{}, &SharedUnitsError{Pool: u.Pool, N: len(units)}
		}
	}
	p := a.plan(units)
	if err := a.addLimit(&p); err != nil {
		return Plan{}, err
	}
	return p, nil
}

// ByIndex reports whether plans of units of an API identify devices by index: with Config.IndexIDs, but for those of claims. What a claim was
// given is repeated to each of its containers until it ends, and an index can be another device by then.
func (a *Allocatable) ByIndex(through API) bool { return a.indexIDs && through != DRA }

func (a *Allocatable) plan(units []Unit) Plan {
	p := Plan{Units: units, IMEX: a.imexChannel}
	if units[0].Sharing.Mode == Exclusive {
		p.Devices = make([]gpu.Device, 0, len(units))
	}
	for i := range units {
		if i == 0 || units[i].Device.ID != units[i-1].Device.ID { // else a replica
			p.Devices = append(p.Devices, units[i].Device)
		}
	}
	slices.SortFunc(p.Devices, gpu.CompareDevices)
	p.Devices = slices.Compact(p.Devices)
	u := &units[0]
	p.IDs = make([]string, len(p.Devices))
	for i, d := range p.Devices {
		if p.IDs[i] = string(d.ID); a.ByIndex(u.API) {
			p.IDs[i] = d.CurrentIndex().String()
		}
	}
	p.Injection = u.Injection
	if u.Sharing.Mode == MPS {
		p.MPS, p.Env = u.Pool, u.Sharing.MPSLimits()
	}
	if p.Injection.Nodes {
		p.Nodes = a.deviceNodesOf(p.Devices)
	}
	if c := a.cdi; c != nil { // else nothing of it is in force: see WithHost
		if a.UsesCDI(p.Injection) {
			p.CDI = c.names(p.IDs)
		}
		if p.Injection.Libraries {
			p.Mounts = c.Libraries
		}
	}
	return p
}

// VisibleDevices returns the IDs in the format of the environment variable VisibleDevices.
func (p Plan) VisibleDevices() string { return strings.Join(p.IDs, ",") }

// MPSLimits returns the limits that CUDA reads in an MPS client. The client sees one device, as device 0.
func (s Sharing) MPSLimits() (env []EnvVar) {
	if s.Threads > 0 {
		env = append(env, EnvVar{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", strconv.Itoa(s.Threads)})
	}
	if s.Memory > 0 {
		env = append(env, EnvVar{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", fmt.Sprintf("0=%dM", s.Memory>>20)})
	}
	return env
}

// deviceNodesOf returns the device nodes for devices that exist on the node, each once and sorted.
func (a *Allocatable) deviceNodesOf(devices []gpu.Device) []DeviceNode {
	paths := slices.Clone(optionalNodes)
	for _, d := range devices {
		paths = append(paths, d.RequiredNodes()...)
	}
	if a.imexChannel {
		paths = append(paths, gpu.IMEXChannelNode)
	}
	slices.Sort(paths)
	var nodes []DeviceNode
	for _, path := range slices.Compact(paths) {
		if _, ok := slices.BinarySearch(a.nodes, path); ok {
			nodes = append(nodes, DeviceNode{Path: path, Permissions: "rw"})
		}
	}
	return nodes
}
