package inventory

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// LimitMode is whether the driver limits the device memory of each share of a device that is shared by time-slicing.
type LimitMode uint8

// The modes. With LimitRequired a share takes no work while nothing can limit its memory; with LimitBestEffort it does, without a limit then.
const (
	LimitNone LimitMode = iota
	LimitBestEffort
	LimitRequired
)

var limitModeNames = [...]string{"", "best-effort", "required"}

// String returns the value of the key "limit": "required".
func (m LimitMode) String() string { return limitModeNames[m] }

// LimitPolicy is what all limits of a policy have in common. The zero value is a policy without limits.
type LimitPolicy struct {
	On         bool   // the policy has the switch for limits, which are experimental
	Reserve    uint64 // bytes of each GPU that no share has, a whole number of MiB: for CUDA contexts and the driver
	Overcommit bool   // the limits of the shares of a GPU may be more than its memory without Reserve
}

// DefaultReserve is LimitPolicy.Reserve unless a file sets it. An MPS server, and so a CUDA context with some modules, needs about as much (NVIDIA's page on
// memory partitioning with MPS).
const DefaultReserve uint64 = 1 << 30

// Available returns what the shares of a device with so much memory have together, in bytes: a whole number of MiB.
func (p LimitPolicy) Available(memory uint64) uint64 {
	return gpu.WholeMiB(memory - min(p.Reserve, memory))
}

// share returns the limit of each share of a device, 0 = none, and why the device can't be shared like that, with the numbers; "" if it can.
func (p LimitPolicy) share(d *gpu.Device, s Sharing) (limit uint64, why string) {
	if s.Limit == LimitNone || s.Mode != TimeSlicing || neverLimited(d) != "" {
		return 0, ""
	}
	n, available := uint64(max(s.Replicas, 1)), p.Available(d.Memory)
	if limit = s.Memory; limit == 0 {
		limit = gpu.WholeMiB(available / n)
	}
	has := fmt.Sprintf("its %d MiB less the reserve of %d MiB", d.Memory/gpu.MiB, p.Reserve/gpu.MiB)
	switch {
	case limit == 0:
		return 0, fmt.Sprintf("%s are less than 1 MiB for each of %d shares", has, n)
	case limit > available:
		return 0, fmt.Sprintf("the limit of a share, %d MiB, is more than %s", limit/gpu.MiB, has)
	case limit*n > available && !p.Overcommit:
		return 0, fmt.Sprintf("the limits of %d shares of %d MiB, %d MiB, are more than %s: want less memory, fewer replicas, or memoryLimits.overcommit",
			n, limit/gpu.MiB, limit*n/gpu.MiB, has)
	}
	return limit, ""
}

// neverLimited is why the driver never limits memory of a device; "" if it may. In MIG mode it charges nothing, with or without instances (vidmemConstruct in
// video_mem.c, open-gpu-kernel-modules 615), and a GPU without memory of its own has no limits (memacctInitGpuInfo in memacct.c).
func neverLimited(d *gpu.Device) string {
	switch {
	case d.MIG || d.Profile != "":
		return "MIG mode is on"
	case d.Memory == 0:
		return "the GPU has no memory of its own, or does not report it"
	}
	return ""
}

// Limits is what an agent whose policy has limits knows of the support for them. It is never changed.
type Limits struct {
	// Withheld is why the driver can't limit the shares of a GPU; a zero value means that it can. Shares whose limit is required take no new work until it can,
	// others get no limit until then. A GPU that is missing takes no work on shares with a limit until that is decided: within milliseconds after the
	// driver is open.
	Withheld map[gpu.DeviceID]LimitMissing

	// Room is which shares of a GPU with a required limit take no new work because running work has their memory; a GPU without an entry has room for all.
	Room map[gpu.DeviceID]Room

	Backend string // the controller of control groups by which the driver limits memory, "misc" or BackendDMem; "" = not known
}

// Room is which shares of a GPU take no new work: work that began by another policy has its memory.
type Room struct {
	Share    uint64   // the limit of a share, in bytes, for which this was decided: with another one, or another number of shares, nothing is known
	Replicas int      // the number of shares
	None     []UnitID // sorted
	Detail   string   // why None take no work, in one line
}

func (r Room) equal(o Room) bool {
	return r.Share == o.Share && r.Replicas == o.Replicas && r.Detail == o.Detail && slices.Equal(r.None, o.None)
}

// BackendDMem is the backend with which a limit also reserves memory, unless the reservation is 0 (dmem.min of the group and its ancestors).
const BackendDMem = "dmem"

// LimitMissing is why no limit can be set on a GPU. The zero value means that one can.
type LimitMissing struct {
	Reason health.Reason // ReasonNoLimit, ReasonNoController
	Detail string        // "driver 580.159.04: want 615 or newer"

	Passing bool // it ends by itself, within seconds
}

// Equal reports whether two values have the same content.
func (l *Limits) Equal(o *Limits) bool {
	return l == o || l != nil && o != nil && l.Backend == o.Backend && maps.Equal(l.Withheld, o.Withheld) && maps.EqualFunc(l.Room, o.Room, Room.equal)
}

// missing returns why the driver can't limit the shares of a GPU, and whether that is known. Without an agent that looks, nothing is known.
func (l *Limits) missing(id gpu.DeviceID) (m LimitMissing, decided bool) {
	if l != nil {
		m, decided = l.Withheld[id]
	}
	return m, decided
}

// noRoom is why running work has the memory of a unit; "" if it has not. It is not decided after a change of the policy, until that was looked at.
func (l *Limits) noRoom(u *Unit) (why string, decided bool) {
	if l == nil {
		return "", true
	}
	r, known := l.Room[u.Device.At.GPU]
	if _, none := slices.BinarySearch(r.None, u.ID); none {
		why = r.Detail
	}
	return why, !known || r.Share == u.Memory && r.Replicas == u.Sharing.Replicas
}

// NotLimited is why the driver can't limit the memory of a unit whose policy wants that, in one line; "" if it can, if that is not known so far, or if the policy does not.
func (a *Allocatable) NotLimited(u Unit) string {
	if u.Memory == 0 {
		return ""
	}
	m, _ := a.limits.missing(u.Device.At.GPU)
	return m.Detail
}

// holds reports whether the driver is known to be able to limit the shares of a GPU.
func (l *Limits) holds(id gpu.DeviceID) bool {
	m, decided := l.missing(id)
	return decided && m == LimitMissing{}
}

// UntriedLimits is Limits for a process that does not look whether memory can be limited, and gives nothing out, as inspect without a running agent: no share is
// withheld for that. It is nil if no share has a limit.
func (inv *Inventory) UntriedLimits() *Limits {
	var l *Limits
	for u := range inv.orEmpty().Devices() {
		if u.Memory == 0 {
			continue
		}
		if l == nil {
			l = &Limits{Withheld: map[gpu.DeviceID]LimitMissing{}}
		}
		l.Withheld[u.Device.At.GPU] = LimitMissing{}
	}
	return l
}

// MemoryLimits returns to how many bytes the driver is to limit work that has these units, on each device: the sum of its shares, at most what all shares of the
// device have. A device whose shares have no limit is missing; nil = none has one.
func (p LimitPolicy) MemoryLimits(units []Unit) (limits map[gpu.DeviceID]uint64) {
	for i := range units {
		if u := &units[i]; u.Memory > 0 {
			if limits == nil {
				limits = map[gpu.DeviceID]uint64{}
			}
			limits[u.Device.ID] = min(limits[u.Device.ID]+u.Memory, p.Available(u.Device.Memory))
		}
	}
	return limits
}

// HookLimits returns the limits that NVIDIA's hook may have to set for requests of the units, in bytes and sorted: each number of shares of one GPU has its own.
func (a *Allocatable) HookLimits() (all []uint64) {
	for u := range a.Devices() {
		if u.Memory == 0 || u.API == DRA || u.Injection.CDI == CDIOff {
			continue
		}
		most := uint64(u.Sharing.Replicas) //nolint:gosec // from 2
		if u.Sharing.OnePerRequest {
			most = 1
		}
		for n := range most {
			all = append(all, min((n+1)*u.Memory, a.limitPolicy.Available(u.Device.Memory)))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// PodLimited returns the devices whose work the agent limits by the group of its pod, sorted. NVIDIA's hook must not set a limit for the containers of that pod:
// with the backend misc it would count in place of the pod's.
func (a *Allocatable) PodLimited() (ids []gpu.DeviceID) {
	for u := range a.Devices() {
		if u.limitedByPod() {
			ids = append(ids, u.Device.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

func (u *Unit) limitedByPod() bool { return u.Memory > 0 && u.API == DRA }

// limitedByHook reports whether the limits of a unit are set by NVIDIA's hook, at the creation of a container, with the CDI names of the plan.
func (a *Allocatable) limitedByHook(u *Unit) bool {
	return u.Memory > 0 && u.API != DRA && a.UsesCDI(u.Injection)
}

// LimitWays is by what the memory of a unit is limited, in words; "" without a limit.
func (a *Allocatable) LimitWays(u Unit) string {
	cdi := a.UsesCDI(u.Injection)
	switch {
	case u.Memory == 0:
		return ""
	case u.API == DRA:
		return "the pod's control group"
	case u.API == DevicePlugin && cdi:
		return "NVIDIA's hook"
	case u.API == DevicePlugin:
		return "nothing: " + a.noCDINames(&u)
	case cdi:
		return "the task's control group (exec, java, raw_exec), or NVIDIA's hook (docker, podman)"
	}
	return "the task's control group (exec, java, raw_exec)"
}

// noCDINames is why containers get no CDI names with the injection of a unit, by which NVIDIA's hook would limit them.
func (a *Allocatable) noCDINames(u *Unit) string {
	if u.Injection.CDI == CDIAuto && a.cdi != nil {
		return a.cdi.Reason
	}
	return "device list strategy " + u.Injection.Name + " has no CDI device: want auto, cdi-cri or cdi-annotations"
}

// noLimit returns the health of a unit that takes no work because its memory can't be limited, or running work has it, or because that is not known so far; zero if it
// takes work.
func (a *Allocatable) noLimit(u *Unit) health.Health {
	required := u.Sharing.Limit == LimitRequired
	noRoom, _ := a.limits.noRoom(u)
	switch m, _ := a.limits.missing(u.Device.At.GPU); {
	case u.Memory == 0 && required:
		return health.New(health.ReasonNoLimit, neverLimited(&u.Device))
	case a.awaitsLimit(u):
		return health.New(health.ReasonNoLimit, "until the agent has looked for the support")
	case !required:
		return health.Health{}
	case m != LimitMissing{}:
		return health.New(m.Reason, m.Detail)
	case noRoom != "":
		return health.New(health.ReasonHeld, noRoom)
	case u.API == DevicePlugin && !a.UsesCDI(u.Injection):
		return health.New(health.ReasonNoLimit, a.noCDINames(u))
	case a.limitedByHook(u):
		if reason, why := a.cdi.noLimit(u.Device.ID, u.Memory); why != "" {
			return health.New(reason, why)
		}
	}
	return health.Health{}
}

// awaitsLimit reports whether a unit takes no work only until it is known whether its memory can be limited. If no part of the agent looks, it is only so with a limit that is
// required: no work gets such a unit without.
func (a *Allocatable) awaitsLimit(u *Unit) bool {
	_, decided := a.limits.missing(u.Device.At.GPU)
	if decided && u.Sharing.Limit == LimitRequired {
		_, decided = a.limits.noRoom(u)
	}
	return u.Memory > 0 && !decided && (a.limits != nil || u.Sharing.Limit == LimitRequired)
}

// AwaitsLimit reports whether a unit takes no work for a reason that ends by itself within seconds: it is not known so far whether its memory can be limited, or the
// limits of other work are set first.
func (a *Allocatable) AwaitsLimit(u Unit) bool {
	m, _ := a.limits.missing(u.Device.At.GPU)
	return a.awaitsLimit(&u) || m.Passing
}

// UnequalLimitsError means that a container would have shares of several GPUs with different limits. NVIDIA's hook takes one limit for all of its GPUs.
type UnequalLimitsError struct {
	Pool   string
	Limits map[gpu.DeviceID]uint64 // by device, in bytes
}

// Error names the pool and the limits.
func (e *UnequalLimitsError) Error() string {
	var texts []string
	for _, id := range slices.Sorted(maps.Keys(e.Limits)) {
		texts = append(texts, fmt.Sprintf("%d MiB of %s", e.Limits[id]/gpu.MiB, id))
	}
	return fmt.Sprintf("shares of %s with different limits: %s: a container has one limit for all of its GPUs: request one share, or GPUs with equal shares",
		e.Pool, strings.Join(texts, ", "))
}

// hookLimit returns the limits of the units of a request, at least one, on each device, and whether NVIDIA's hook sets them for a container: not if one of its GPUs can have none, because a
// container with variables for it does not start.
func (a *Allocatable) hookLimit(units []Unit) (limits map[gpu.DeviceID]uint64, byHook bool) {
	limits, byHook = a.LimitPolicy().MemoryLimits(units), a.limitedByHook(&units[0])
	for i := range units {
		d := &units[i].Device
		byHook = byHook && limits[d.ID] > 0 && a.limits.holds(d.At.GPU)
	}
	return limits, byHook
}

// equal reports whether the limits of all devices are the same.
func equal(limits map[gpu.DeviceID]uint64) bool {
	return len(slices.Compact(slices.Sorted(maps.Values(limits)))) <= 1
}

// addLimit adds the limit of the units to their plan, by a CDI device if NVIDIA's hook is to set it. The error is an *UnequalLimitsError, or an *UnhealthyUnitsError for
// units whose limit is required and not defined.
func (a *Allocatable) addLimit(p *Plan) error {
	limits, byHook := a.hookLimit(p.Units)
	if len(limits) == len(p.Devices) && equal(limits) {
		p.Memory = limits[p.Devices[0].ID]
	}
	if !byHook {
		return nil
	}
	if !equal(limits) {
		return &UnequalLimitsError{Pool: p.Units[0].Pool, Limits: limits}
	}
	defined := true
	for _, u := range p.Units {
		reason, why := a.cdi.noLimit(u.Device.ID, p.Memory)
		if why != "" && u.Sharing.Limit == LimitRequired {
			u.Health = health.New(reason, why)
			return &UnhealthyUnitsError{Units: []Unit{u}}
		}
		defined = defined && why == ""
	}
	if defined {
		p.CDI = append(p.CDI, a.cdi.limitName(p.Memory))
	}
	return nil
}
