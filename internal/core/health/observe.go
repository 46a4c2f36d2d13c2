package health

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

const (
	// relapseSpan is the time after a reset within which the same XID puts the GPU out of service.
	relapseSpan = time.Hour

	// Application faults of suspectWorkloads different workloads within workloadSpan indicate a hardware fault, as
	// in NVIDIA's workflow for XID 13 and 31.
	workloadSpan     = time.Hour
	suspectWorkloads = 3

	// unidentifiedXID is the XID that NVML reports for a fault that it can't identify.
	unidentifiedXID = 999
)

// observe applies one observation.
func (b *ledgerBuilder) observe(o Observation) {
	id := o.At.GPU
	switch o.Kind {
	case XID:
		b.recordFault(o, ReasonXID, b.policy.xid(o.Code, o.Severity()))
	case Event:
		if rule, ok := xid.Event(o.Code); ok {
			b.recordFault(o, ReasonEvent, rule)
		}
	case Lost:
		b.interruptRecovery(o)
		if history := b.history(id); o.At.GI == gpu.Whole && history.lostSince.IsZero() {
			history.lostSince = b.now
		}
		b.setLevel(Condition{At: o.At, Reason: ReasonLost, State: GPULost, Detail: o.Detail}, 1)
	case ProbeFailed:
		b.interruptRecovery(o)
		b.setLevel(Condition{At: o.At, Reason: ReasonProbe, State: Unhealthy, Detail: o.Detail}, b.policy.ProbeFailures)
	case CallPending:
		b.interruptRecovery(o)
	case Unresponsive:
		b.interruptRecovery(o)
		state := Unhealthy
		if id == "" {
			state = Unknown
		}
		b.setLevel(Condition{At: o.At, Reason: ReasonUnresponsive, State: state, Detail: o.Detail}, 1)
	case InstanceRead:
		b.remove(id, func(c Condition) bool { return c.At == o.At && c.Reason.isUnresponsive() })
	case Checked:
		b.check(id, o.Sample)
		b.history(id).lastCheck = LastCheck{Processes: o.processes()}
	case DriverRebound, WasReset:
		b.history(id).recordReset(b.now)
	case DriverUnavailable:
		b.driverLost(o)
	case DriverUnloaded:
		b.markReloading()
	case DriverAvailable:
		b.driverAnswered(o)
	case Operational:
		b.recordOperational(o)
	case Reserved:
		b.history(id).recordAllocation(o.At, o.Shared, b.now)
	case KernelLogRead, KernelLogReplaced: // State handles them
	}
}

// interruptRecovery records that a GPU did not respond: no recovery continues, and the health is unknown if no
// check completed since the agent started. A MIG instance that does not respond has no effect on its GPU.
func (b *ledgerBuilder) interruptRecovery(o Observation) {
	id := o.At.GPU
	if id == "" || o.At.GI != gpu.Whole {
		return
	}
	history := b.history(id)
	history.responding, history.completeChecks, history.lastCheck = false, 0, LastCheck{Failed: true, Failure: o.Detail}
	if history.checked.IsZero() {
		b.setLevel(Condition{At: gpu.WholeGPU(id), Reason: ReasonUnchecked, State: Unknown}, 1)
	}
	of := b.conditions[id]
	for i := range of {
		of[i].ClearingSince, of[i].CleanChecks = time.Time{}, 0
	}
}

// driverAnswered records that the driver responds. If its version changed, it was loaded again.
func (b *ledgerBuilder) driverAnswered(o Observation) {
	if b.driver != "" && o.Detail != "" && o.Detail != b.driver {
		b.markReloading()
	}
	b.driver = o.Detail
	b.remove(gpu.Node.GPU, func(c Condition) bool { return c.At == gpu.Node })
}

// markReloading records that the driver was, or is being, loaded again before it reports the next recovery action.
func (b *ledgerBuilder) markReloading() {
	for id := range b.histories {
		b.history(id).reloading = true
	}
}

// driverLost records that the driver can't be called. The same driver may respond later, also if its library was
// missing: that it was unloaded is the separate observation DriverUnloaded.
func (b *ledgerBuilder) driverLost(o Observation) {
	reason, other := ReasonDriver, ReasonMaintenance
	if gpu.DriverState(o.Code) == gpu.DriverReleased {
		reason, other = other, reason
	}
	b.remove(gpu.Node.GPU, func(c Condition) bool { return c.At == gpu.Node && c.Reason == other })
	b.setLevel(Condition{At: gpu.Node, Reason: reason, State: Unknown, Detail: o.Detail}, 1)
	for id := range b.histories {
		history := b.history(id)
		history.responding, history.completeChecks, history.checked = false, 0, time.Time{}
		history.lastCheck = LastCheck{Failed: true, Failure: o.Detail}
		history.driverAbsent = history.driverAbsent || gpu.DriverState(o.Code) == gpu.DriverAbsent
	}
}

// recordFault records an XID or another NVML event.
func (b *ledgerBuilder) recordFault(o Observation, reason Reason, rule xid.Rule) {
	if b.policy.Mode == ModeOff {
		return
	}
	seen := occurrenceOf(o, b.now, b.readHistory(o.At.GPU).LastReset)
	before := time.Time{}
	if !o.Simulated {
		history := b.history(o.At.GPU)
		if rule.Name == "" && history.countsFull(o.Code) {
			o.Code, rule = unidentifiedXID, b.policy.xid(unidentifiedXID, "")
		}
		switch count := history.faultCount(reason, o.Code); {
		case count == nil:
		case o.Again && b.find(UnknownFaults(o.At.GPU, b.now, "")) != nil:
			// The history may have lost the condition that an earlier process recorded.
		case count.reported(seen, o.source()):
			b.refineFault(o, rule)
			b.recordLoggedAction(o, seen)
			return
		case count.counted(o, seen):
			return
		}
		before = history.countFault(reason, o.Code, seen)
		b.recordLoggedAction(o, seen)
	}
	if rule.Class == xid.Application && !o.Simulated {
		b.recordApplicationFault(o.At, seen)
	}
	if rule.IsNote() {
		return
	}
	at := o.At
	if rule.WholeGPU() {
		at = gpu.WholeGPU(at.GPU)
	}
	c := b.recordEvent(Condition{
		At: at, Reason: reason, Code: o.Code, Last: seen.Latest, Detail: detailOf(rule, o), Simulated: o.Simulated,
	})
	c.addSeverity(o.Severity())
	if c.Count > 1 && rule.RepeatWindow > 0 && !before.IsZero() {
		c.Repeated = c.Repeated || seen.Latest.Sub(before).Abs() <= rule.RepeatWindow
	}
	history := b.readHistory(at.GPU)
	if c.severe(b.policy) && reason == ReasonXID && !seen.Latest.Before(history.LastReset) {
		for _, m := range history.ClearedByReset {
			if m.Code == o.Code && seen.Latest.Sub(m.At) <= relapseSpan {
				b.requireService(at.GPU, fmt.Sprintf("XID %d again within an hour of a reset", o.Code))
			}
		}
	}
}

// detailOf returns the meaning of a fault from the table, with the text of the kernel log if there is one.
func detailOf(rule xid.Rule, o Observation) string {
	if o.Detail == "" {
		return rule.Meaning
	}
	return rule.Meaning + " (" + truncated(o.Detail, 60) + ")"
}

// recordApplicationFault records an application fault. Repeated faults of one workload do not indicate a fault of
// the GPU. Workloads are told apart by reservations: neither NVML nor the kernel log names the workload of an XID, and
// the processes of one are as different as those of several. So a fault of a placement that several may have counts
// for none: it may be one that fails each time. Neither does one of a program that the agent itself runs, such as a proof.
func (b *ledgerBuilder) recordApplicationFault(at gpu.Placement, seen Occurrence) {
	history := b.history(at.GPU)
	if history.ofAgent(seen) {
		return
	}
	work, certain := history.workload(at, seen.Latest)
	if !certain {
		return
	}
	n := history.recordAppFault(work, seen.Latest, b.now)
	if b.policy.ApplicationFaults != xid.None && n >= suspectWorkloads {
		c := b.recordEvent(Condition{
			At: gpu.WholeGPU(at.GPU), Reason: ReasonWorkloads, State: b.policy.state(b.policy.ApplicationFaults),
			Detail: "application faults of several workloads within an hour",
		})
		c.State = b.policy.state(b.policy.ApplicationFaults)
	}
}

// requireService takes the GPU out of service until an operator clears the condition.
func (b *ledgerBuilder) requireService(id gpu.DeviceID, why string) {
	b.setLevel(Condition{At: gpu.WholeGPU(id), Reason: ReasonNeedsService, State: Unhealthy, Detail: why}, 1)
}
